"""The state of all random number generators of a program that uses torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from tensorio.errors import TensorMismatchError
from tensorio.manager import _rng

__all__ = ["rng_state", "set_rng_state"]


def rng_state(generators: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of `random`, NumPy, torch on the CPU and all devices, and of generators given.

    Parameters
    ----------
    generators : mapping of str to torch.Generator or numpy.random.Generator, optional
        Those of your own (a DataLoader's, for example), by a name for each.

    Returns
    -------
    dict
        Of dicts, lists, NumPy arrays, numbers and strings: `tensorio.save` writes
        it, and `tensorio.load` returns an equal one.

    Notes
    -----
    A device's state is fetched from it, which waits for what it does. What a
    DataLoader's workers draw from comes from these states when they start.
    """
    ours, numpys = _sorted(generators)
    state = _rng.rng_state(numpys)
    state["torch"] = {
        "cpu": torch.get_rng_state().numpy(),
        "cuda": [one.numpy() for one in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "mps": torch.mps.get_rng_state().cpu().numpy() if torch.backends.mps.is_available() else None,
        "generators": {name: one.get_state().cpu().numpy() for name, one in ours.items()},
    }
    return state


def set_rng_state(state: Mapping[str, Any], generators: Mapping[str, Any] | None = None) -> None:
    """Set what `rng_state` returned: all of it, or nothing if a part is damaged.

    Parameters
    ----------
    state : mapping
        From `tensorio.load` or `tensorio.torch.load`.
    generators : mapping, optional
        Under the names that they had.

    Raises
    ------
    TensorMismatchError
        A part is missing or damaged, the number of devices is another one, or
        generators were given under other names; no generator is changed.
    """
    ours, numpys = _sorted(generators)
    setters = _rng.numpy_setters(state, numpys)
    part = _rng.tried("torch", lambda: dict(state["torch"]))
    cpu = _bytes("torch.cpu", part.get("cpu"))
    _rng.tried("torch.cpu", lambda: torch.Generator().set_state(cpu))
    setters.append(lambda: torch.set_rng_state(cpu))
    setters += _cuda_setters(part.get("cuda"))
    if part.get("mps") is not None and torch.backends.mps.is_available():
        mps = _bytes("torch.mps", part["mps"])
        _rng.tried("torch.mps", lambda: torch.Generator("mps").set_state(mps))
        setters.append(lambda: torch.mps.set_rng_state(mps))
    saved = _rng.tried("torch.generators", lambda: dict(part["generators"]))
    _rng.require_names(saved, ours)
    for name, generator in ours.items():
        held = _bytes(f"torch.generators.{name}", saved[name])
        _rng.tried(f"torch.generators.{name}", partial(torch.Generator(generator.device).set_state, held))
        setters.append(partial(generator.set_state, held))
    _rng.set_all(setters)


def _sorted(generators: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of torch, and the others."""
    given = dict(generators or {})
    ours = {name: one for name, one in given.items() if isinstance(one, torch.Generator)}
    return ours, {name: one for name, one in given.items() if name not in ours}


def _bytes(part: str, value: Any) -> torch.Tensor:
    """A state as torch takes it; a copy, as what is loaded may be a read-only view of a file."""

    def made() -> torch.Tensor:
        held = torch.as_tensor(_rng.plain(value).copy())
        if held.dtype != torch.uint8 or held.ndim != 1:
            raise ValueError(f"expected a row of bytes, found {held.dtype} of shape {tuple(held.shape)}")
        return held

    return _rng.tried(part, made)  # type: ignore[no-any-return]


def _cuda_setters(saved: Any) -> list[_rng.Setter]:
    """What sets the states of CUDA devices; those of a run on fewer devices or none can't be set on more."""
    states = [_bytes(f"torch.cuda.{i}", one) for i, one in enumerate(_rng.tried("torch.cuda", lambda: list(saved)))]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not devices:
        return []  # a run that goes on without them draws nothing from theirs
    if len(states) != devices:
        raise TensorMismatchError(f"random state of CUDA devices: expected {devices}, found {len(states)}")
    for i, one in enumerate(states):
        _rng.tried(f"torch.cuda.{i}", partial(torch.Generator(f"cuda:{i}").set_state, one))
    return [lambda: torch.cuda.set_rng_state_all(states)]
