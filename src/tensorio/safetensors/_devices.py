"""What callers may say for a framework and for a device."""

from __future__ import annotations

import re

from tensorio.safetensors._errors import SafetensorError

__all__ = ["BACKENDS", "FRAMEWORKS", "backend_of", "device_of", "framework_of"]

# What a caller may write -> the framework's one name here.
FRAMEWORKS = {
    "pt": "torch", "torch": "torch", "pytorch": "torch", "np": "numpy", "numpy": "numpy", "tf": "tensorflow",
    "tensorflow": "tensorflow", "jax": "flax", "flax": "flax", "mlx": "mlx", "paddle": "paddle",
}  # fmt: skip
BACKENDS = ("mmap", "pread")

# torch's accelerators; one of them may be followed by its number.
_DEVICE = re.compile(r"(cpu|cuda|mps|npu|xpu|xla|mlu|musa|hpu)(?::([0-9]{1,9}))?", re.ASCII)
_WITH_DEVICES = ("torch", "paddle")


def framework_of(name: object) -> str:
    """Return the one name of a framework."""
    found = FRAMEWORKS.get(name) if isinstance(name, str) else None
    if found is None:
        raise SafetensorError(f"framework {name} is invalid; expected one of {', '.join(FRAMEWORKS)}")
    return found


def backend_of(name: object) -> str:
    """Return the name of a backend, checked."""
    if name not in BACKENDS:
        raise SafetensorError(f'backend "{name}" is invalid (expected one of: "mmap", "pread")')
    return str(name)


def device_of(device: object, framework: str) -> str | int:
    """Return a device as text or number.

    Parameters
    ----------
    device : str, int, torch.device or None
        None is the CPU; a number is the machine's kind of accelerator.
    framework : str
        One name, see `framework_of`; only torch and paddle have devices other than the CPU here.
    """
    if device is None:
        return "cpu"
    number_of = getattr(type(device), "__index__", None)  # NumPy's integers are numbers, too
    if number_of is not None and not isinstance(device, bool) and number_of(device) >= 0:
        where: str | int = number_of(device)
    else:
        text = str(device) if type(device).__name__ == "device" else device
        match = _DEVICE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise SafetensorError(f"device {device} is invalid")
        kind, number = match.groups()
        if kind == "mps" and number not in (None, "0"):
            raise SafetensorError(f"device {device} is invalid: only mps or mps:0 is supported")
        where = kind if kind == "cpu" else match[0]
    if where != "cpu" and framework not in _WITH_DEVICES:
        raise SafetensorError(f"Device {where} is not supported for framework {framework}")
    return where
