"""What the modules of the frameworks that go by NumPy have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensorio import _served
from tensorio.safetensors._devices import backend_of, device_of
from tensorio.safetensors._file import of_buffer, opened
from tensorio.safetensors._readers import reader_of
from tensorio.safetensors._writing import bytes_of, plan_of, write

__all__ = ["load", "load_file", "save", "save_file"]

Convert = Callable[[Any], Any]
Metadata = Mapping[str, str] | None


def save(framework: str, tensors: Mapping[str, Any], to_numpy: Convert, metadata: Metadata) -> bytes:
    """Return a file of a framework's tensors as bytes; the caller's dict stays as it is."""
    plan = plan_of({name: to_numpy(tensor) for name, tensor in tensors.items()}, metadata)
    _served.count(f"safetensors.{framework}.save", plan.nbytes)
    return bytes_of(plan)


def save_file(framework: str, tensors: Mapping[str, Any], to_numpy: Convert, filename: Any, metadata: Metadata) -> None:
    """Write a file of a framework's tensors; the caller's dict stays as it is."""
    plan = plan_of({name: to_numpy(tensor) for name, tensor in tensors.items()}, metadata)
    write(plan, filename)
    _served.count(f"safetensors.{framework}.save_file", plan.nbytes)


def load(framework: str, data: Any, device: Any = "cpu") -> dict[str, Any]:
    """Return the tensors of a file in memory, by offset."""
    where = device_of(device, framework)
    file = of_buffer(data)
    _served.count(f"safetensors.{framework}.load", file.storage.nbytes)
    return reader_of(framework, file, mapped=False, device=where).tensors()


def load_file(framework: str, filename: Any, backend: str, device: Any = "cpu") -> dict[str, Any]:
    """Return the tensors of a file, by offset."""
    where, mapped = device_of(device, framework), backend_of(backend) == "mmap"
    file = opened(filename, writable=False)
    _served.count(f"safetensors.{framework}.load_file", file.storage.nbytes)
    return reader_of(framework, file, mapped=mapped, device=where).tensors()
