"""What goes into the pickle machine besides the pickle, and what comes out."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from tensorio._arrays import Lease
    from tensorio.dtypes import DType

__all__ = ["SPARE", "Loaded", "Maker", "Mentioned", "Named", "NotPlain", "Placed", "Records", "Rules", "Unbuilt"]

# Promise P3 of docs/security.md: the pickles of a file cost at most this many bytes, plus 32 times theirs.
SPARE = 64 << 20


class Records(NamedTuple):
    """The records that storages may be in, known before the pickle is read.

    Attributes
    ----------
    numbers : array of int64
        Record of the storage key "0", "1", ...; -1 where there is none.
    keys : dict of str to int
        Record of every other storage key.
    extents : array of int64
        (storage, offset, nbytes) per record, in bytes; storage -1 if the record
        is not raw in the file.
    """

    numbers: array[int]
    keys: dict[str, int]
    extents: array[int]

    @classmethod
    def none(cls) -> Records:
        """No records: a pickle that may not mention storages."""
        return cls(array("q"), {}, array("q"))


class NotPlain(Exception):
    """The pickle has something that a `Maker` does not make; whoever asked for it goes another way."""


class Maker(Protocol):
    """Makes the tensors of another library, and the values that go with them, while a pickle is read.

    Only what most checkpoints hold: anything else ends the run with `NotPlain`.
    """

    @property
    def consumer(self) -> Callable[[Any], Any]:
        """What takes a DLPack capsule."""

    @property
    def taken(self) -> bytes:
        """By dtype code: 1 where `consumer` takes capsules of it."""

    @property
    def values(self) -> Mapping[Any, Any]:
        """What stands for a `TorchDType`, a `TorchTag` or a type; others are not plain."""

    @property
    def dtypes(self) -> Mapping[Any, DType]:
        """The rows of dtypes among the values."""

    @property
    def calls(self) -> Mapping[str, Callable[[tuple[Any, ...], Callable[[object], None]], Any]]:
        """In the place of `tensorio._calls.CALLS`, and all of those that there are."""

    def moves(self, location: object) -> bool:
        """Tell whether storages of a location go to another device than the file's memory."""

    def base(self, lease: Lease, offset: int, nbytes: int, itemsize: int, location: object) -> Any:
        """Return all bytes of a record as a tensor that others may be views of.

        Parameters
        ----------
        itemsize : int
            What their address must be a multiple of.
        location : object
            As the pickle has it; None if the bytes stay where they are.
        """

    def view(self, base: Any, dtype: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return a tensor in the storage of another one; offset and strides in elements."""

    def parameter(self, tensor: Any, requires_grad: bool) -> Any:
        """Return a tensor as a parameter."""

    def set_bits(self, tensor: Any, conj: bool, neg: bool) -> None:
        """Mark a tensor as conjugated, negated or both."""


class Rules(NamedTuple):
    """How a pickle is to be read.

    Attributes
    ----------
    unknown : {"error", "opaque"}
        Whether names that are not allowed are refused or kept as `Opaque`.
    encoding : str or None
        Of Python 2's strings: a codec's name, or ``"bytes"`` to keep them as
        bytes. None: text where it is UTF-8, else bytes.
    allow : mapping of (module, name) to type
        Classes that the caller allowed.
    legacy : bool
        Whether persistent ids may be those of the time before zip: storage views,
        classes with their source.
    own : str
        Names of modules that begin with this are the file's own classes: always
        `Opaque`, never refused.
    spare : int
        Bytes that reading it may cost besides those per byte of the pickle.
    maker : Maker or None
        Makes tensors in the place of NumPy, where arrays would be made.
    """

    unknown: str = "error"
    encoding: str | None = None
    allow: Mapping[tuple[str, str], type] = {}
    own: str = ""
    legacy: bool = False
    spare: int = SPARE
    maker: Maker | None = None


class Placed(NamedTuple):
    """A tensor that a pickle refers to by a persistent id, described elsewhere in the file (tar).

    Attributes
    ----------
    record : int
        Number of its record in `Records`.
    dtype : str
        Canonical name.
    offset : int
        In elements, from the start of the record.
    size, stride : tuple of int
        In elements; None for both: the whole record, flat.
    """

    record: int
    dtype: str
    offset: int = 0
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None


class Mentioned(NamedTuple):
    """A storage that a pickle mentions, if its records were not known before.

    Attributes
    ----------
    key : str
    nbytes : int
        Of the whole storage.
    itemsize : int
        Bytes per element of the class it is mentioned as.
    location : str
        The device it was on.
    """

    key: str
    nbytes: int
    itemsize: int
    location: str


class Named(NamedTuple):
    """A name that a pickle refers to.

    Attributes
    ----------
    module, name : str
        As the pickle spells them.
    offset : int
        Of the opcode, in bytes from the start of the pickle.
    """

    module: str
    name: str
    offset: int


class Loaded(NamedTuple):
    """What the pickle machine makes of a pickle.

    Attributes
    ----------
    obj : object
        What was pickled, with arrays (or `Leaf`) at the tensors.
    rows, dims : array of int64
        Columns of a `Table`; empty if arrays were made at once.
    end : int
        First byte behind the pickle's STOP.
    mentioned : list of Mentioned
        By record number, if the records were not known before; else empty. The
        storage of a row is then its record, and its offset counts from there.
    """

    obj: Any
    rows: array[int]
    dims: array[int]
    end: int
    mentioned: list[Mentioned]


class Unbuilt:
    """An object that is made by its state, while it has none yet.

    Attributes
    ----------
    kind : str
        What makes the object of its state.
    slots : list of int
        Memo slots that the pickle machine put it into.
    """

    __slots__ = ("kind", "slots")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.slots: list[int] = []
