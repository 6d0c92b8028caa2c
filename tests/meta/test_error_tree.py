"""The tree of errors is the one that is documented, and callers may rely on its bases."""

from __future__ import annotations

import inspect
import pickle

import pytest

import tensorio
from tensorio import errors

TREE = {
    "TensorIOError": (Exception,),
    "FormatError": (tensorio.TensorIOError, ValueError),
    "UnknownFormatError": (tensorio.FormatError,),
    "TruncatedError": (tensorio.FormatError,),
    "HeaderError": (tensorio.FormatError,),
    "ChecksumError": (tensorio.FormatError,),
    "LimitError": (tensorio.FormatError,),
    "DecryptionError": (tensorio.FormatError,),
    "UnsupportedError": (tensorio.TensorIOError, NotImplementedError),
    "UnsafePickleError": (tensorio.TensorIOError, pickle.UnpicklingError),
    "TensorNotFoundError": (tensorio.TensorIOError, KeyError),
    "TensorMismatchError": (tensorio.TensorIOError, ValueError),
    "NonFiniteError": (tensorio.TensorIOError, ValueError),
    "LockedError": (tensorio.TensorIOError,),
    "PublicationError": (tensorio.TensorIOError,),
    "NotPublishedError": (tensorio.PublicationError, LookupError),
    "NameTakenError": (tensorio.PublicationError,),
}


@pytest.mark.parametrize("name", TREE)
def test_error_has_the_bases_of_the_design(name: str) -> None:
    assert getattr(errors, name).__bases__ == TREE[name]
    assert getattr(tensorio, name) is getattr(errors, name)


def test_there_are_no_other_errors() -> None:
    ours = {n for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, Exception)}
    assert ours == set(TREE)
    assert set(TREE) <= set(tensorio.__all__)


def test_the_docstring_draws_the_same_tree() -> None:
    doc = errors.__doc__ or ""
    lines = [line for line in doc.splitlines() if line.strip().split(" ")[0] in TREE]
    depth = {line.strip().split(" ")[0]: (len(line) - len(line.lstrip())) // 2 for line in lines}
    assert set(depth) == set(TREE)
    root = depth["TensorIOError"]
    for name, bases in TREE.items():
        if name != "TensorIOError":
            assert depth[name] == depth[bases[0].__name__] + 1, name
    assert root == 2
    for line in lines:
        other = [b.__name__ for b in TREE[line.strip().split(" ")[0]][1:]]
        assert all(f"({o})" in line or f".{o})" in line for o in other), line


@pytest.mark.parametrize("name", TREE)
def test_error_says_in_its_module_where_it_is_from(name: str) -> None:
    assert getattr(tensorio, name).__module__ == "tensorio.errors"
    assert inspect.getdoc(getattr(tensorio, name))
