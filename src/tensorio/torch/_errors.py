"""Errors of `tensorio.torch.load`: ours, that callers of `torch.load` catch as well.

What `torch.load` raises of a file that it can't read is a RuntimeError, an
UnpicklingError or an EOFError, depending on how far it got. Ours say more, are
all of these, and end in torch's phrase.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from tensorio.encryption._opening import without_argument
from tensorio.errors import TensorIOError, error_context
from tensorio.torch._words import with_words

__all__ = ["LoadError", "torch_errors"]


class LoadError(TensorIOError, RuntimeError, pickle.UnpicklingError, EOFError):
    """A file that `tensorio.torch.load` refuses; also of the class in `tensorio.errors` that says why."""


@contextmanager
def torch_errors(path: str | None = None) -> Iterator[None]:
    """Let errors of ours leave as ones that are torch's, too."""
    try:
        with error_context(path=path):
            yield
    except LoadError:
        raise
    except TensorIOError as error:
        raise _as_torch(error).with_traceback(error.__traceback__) from None


def _as_torch(error: TensorIOError) -> LoadError:
    made = _class(type(error)).__new__(_class(type(error)), *error.args)
    made.__dict__.update(error.__dict__)
    made.message = without_argument(with_words(error.message))
    return made


_classes: dict[type[TensorIOError], type[LoadError]] = {}


def _class(cls: type[TensorIOError]) -> type[LoadError]:
    """`cls` and `LoadError` in one, by the name of `cls`."""
    if cls not in _classes:
        _classes[cls] = type(
            cls.__name__, (LoadError, cls), {"__doc__": cls.__doc__, "__reduce__": _reduce, "__module__": __name__}
        )
    return _classes[cls]


def _reduce(error: LoadError) -> tuple[object, ...]:
    plain = next(c for c in type(error).__mro__ if issubclass(c, TensorIOError) and not issubclass(c, LoadError))
    return _again, (plain, error.args, error.__dict__)


def _again(cls: type[TensorIOError], args: tuple[object, ...], state: dict[str, object]) -> LoadError:
    """Make a pickled error again."""
    error = _class(cls).__new__(_class(cls), *args)
    error.__dict__.update(state)
    return error
