"""The state of random number generators as plain data that every format of nested objects holds.

::

    {"python": {"version": 3, "words": uint32[625], "gauss": None},
     "numpy":  {"bit_generator": "MT19937", "state": {"key": uint32[624], "pos": 624}, "has_gauss": 0, "gauss": 0.0},
     "generators": {"data": {"bit_generator": "PCG64", "state": {...}, ...}}}

A state is tried on generators of its own before any that counts is set.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tensorio.errors import TensorMismatchError, escaped

__all__ = ["numpy_setters", "rng_state", "set_all", "set_rng_state", "state_of_generator"]

Setter = Callable[[], object]


def rng_state(generators: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of `random`, of NumPy's global generator, and of generators given.

    Parameters
    ----------
    generators : mapping of str to numpy.random.Generator, optional
        Those of your own, by a name for each.

    Returns
    -------
    dict
        Of dicts, arrays, numbers and strings: `tensorio.save` writes it, and
        `tensorio.load` returns an equal one.

    Notes
    -----
    `tensorio.torch.rng_state` has those of torch besides.
    """
    import numpy as np

    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": dict(np.random.get_state(legacy=False)),
        "generators": {name: state_of_generator(one) for name, one in (generators or {}).items()},
    }


def set_rng_state(state: Mapping[str, Any], generators: Mapping[str, Any] | None = None) -> None:
    """Set what `rng_state` returned: all of it, or nothing if a part is damaged.

    Parameters
    ----------
    state : mapping
        Arrays may have become torch tensors.
    generators : mapping of str to numpy.random.Generator, optional
        Under the names that they had.

    Raises
    ------
    TensorMismatchError
        A part is missing or damaged, or generators were given under other names;
        no generator is changed.
    """
    set_all(numpy_setters(state, generators or {}))


def state_of_generator(generator: Any) -> dict[str, Any]:
    """Return the state of a generator of NumPy's."""
    state = generator.bit_generator.state
    return dict(state)


def set_all(setters: list[Setter]) -> None:
    """Call what was tried before."""
    for setter in setters:
        setter()


def numpy_setters(state: Mapping[str, Any], generators: Mapping[str, Any]) -> list[Setter]:
    """Try a state on generators of its own, and return what sets it.

    Raises
    ------
    TensorMismatchError
        See `set_rng_state`.
    """
    import numpy as np

    setters: list[Setter] = []
    python = tried("python", lambda: _python_state(state["python"]))
    tried("python", lambda: random.Random().setstate(python))
    setters.append(lambda: random.setstate(python))

    legacy = tried("numpy", lambda: plain(state["numpy"]))
    tried("numpy", lambda: np.random.RandomState().set_state(legacy))
    setters.append(lambda: np.random.set_state(legacy))

    saved = tried("generators", lambda: dict(state["generators"]))
    require_names(saved, generators)
    for name, generator in generators.items():
        part = f"generators.{name}"
        one = tried(part, partial(plain, saved[name]))
        bits = generator.bit_generator
        if not isinstance(one, dict) or one.get("bit_generator") != type(bits).__name__:
            raise TensorMismatchError(
                f"random state {escaped(part)}: expected that of {type(bits).__name__}, "
                f"found {escaped(one.get('bit_generator') if isinstance(one, dict) else one)}"
            )
        tried(part, partial(setattr, type(bits)(), "state", one))
        setters.append(partial(setattr, bits, "state", one))
    return setters


def require_names(saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise unless generators are given for just those that were saved."""
    if set(saved) != set(given):
        raise TensorMismatchError(
            f"random state: expected generators named {escaped(sorted(map(str, saved)))}, "
            f"found {escaped(sorted(map(str, given)))}"
        )


def tried(part: str, attempt: Callable[[], Any]) -> Any:
    """Return what an attempt returns; what it raises becomes an error that names the part."""
    try:
        return attempt()
    except TensorMismatchError:
        raise
    except Exception as error:  # of whatever kind a damaged state brings a generator to
        why = f"{type(error).__name__}: {error}"
        raise TensorMismatchError(
            f"random state {escaped(part)} is damaged or missing ({escaped(why)[1:-1]}); nothing was set"
        ) from None


def plain(value: Any) -> Any:
    """Return a part of a state with arrays for torch's tensors, and plain numbers."""
    import numpy as np

    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, str | int | float | bytes) or value is None:
        return value
    return np.asarray(value)


def _python_state(part: Mapping[str, Any]) -> tuple[Any, ...]:
    words = plain(part["words"])
    if words.shape != (625,) or words.min() < 0 or words.max() > 0xFFFF_FFFF:
        raise ValueError(f"expected 625 words of 32 bits, found shape {words.shape}")
    gauss = part["gauss"]
    return int(part["version"]), tuple(int(word) for word in words), None if gauss is None else float(gauss)
