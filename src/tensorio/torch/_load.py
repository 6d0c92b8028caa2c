"""`load`: three ways, the first that does.

1. The pickle machine makes torch tensors itself: what most checkpoints hold.
2. What is special goes to torch's own weights-only unpickler, over our bytes;
   the machine has read the file once before, so that a damaged one never
   reaches torch.
3. What is not about safe reading (``weights_only=False``, other pickle
   modules, TorchScript, shared mappings) is `torch.load`'s, as it was called.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import replace
from typing import Any

import torch

from tensorio import _served, formats
from tensorio.checkpoint._loading import reads_payload, settle
from tensorio.checkpoint._several import place_of_several
from tensorio.errors import ChecksumError, UnsafePickleError, UnsupportedError
from tensorio.formats._base import OpenOptions
from tensorio.pickles import NotPlain
from tensorio.storage.base import Storage
from tensorio.storage.files import FileStorage
from tensorio.storage.opening import leave_behind
from tensorio.torch import _exact
from tensorio.torch._errors import torch_errors
from tensorio.torch._maker import TorchMaker
from tensorio.torch._places import Places, is_ordinary
from tensorio.torch._settings import setting
from tensorio.torch._several import load_several
from tensorio.torch._sources import is_path, is_real_file, open_source
from tensorio.torch._tensors import tensors_of, to_device

__all__ = ["TORCH_FORMATS", "load", "load_storage", "torch_load"]

# Whatever takes its place later (`tensorio.dropin`), this is torch's.
torch_load = torch.serialization.load

_ENCODING = "utf-8"  # of Python 2's strings, if nobody says otherwise
_LONGEST_NAME = 500  # characters
_TRUE = ("1", "y", "yes", "true")
TORCH_FORMATS = ("torch_zip", "torch_legacy", "torch_tar")


def load(
    f: Any,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Load what `torch.save` saved, with tensors that alias the file's mapping.

    Parameters
    ----------
    f : str, os.PathLike, seekable binary file object, or buffer
        A file object counts from its current position on; a stream of legacy
        objects is left behind the one that was read. One that is open for
        writing is read into memory, since its next write would change what was
        loaded. Of a folder or an index: the tensors of all its files.
    map_location : None, str, torch.device, dict or callable
        Where storages go, as in `torch.load`. CUDA: through two pinned buffers,
        reading and copying at once.
    pickle_module : module, optional
        Given: the whole call is passed on to `torch.load`.
    weights_only : bool, optional
        As in `torch.load`, the environment's word included. False: passed on to
        `torch.load`, which runs what the file says.
    mmap : bool, optional
        None and True: map the file. Pages are private and copied when written:
        tensors may be changed, the file never does. False: read all of it with
        all cores. None is True where ``torch.utils.serialization.config`` says
        so. With ``set_default_mmap_options(MAP_SHARED)``, True is passed on to
        `torch.load`.
    **pickle_load_args
        ``encoding`` of strings that Python 2 wrote, ``"utf-8"`` if not given.

    Returns
    -------
    object
        What `torch.load` returns: the same values, dtypes, strides, sharing of
        storages, conjugation, parameters. One torch storage per stored storage,
        in the mapping (copies: no; deflated, foreign or unaligned bytes: yes),
        valid as long as a tensor needs it.

    Raises
    ------
    LoadError
        A damaged file; also of a class of `tensorio.errors` that says how, and
        a RuntimeError, UnpicklingError and EOFError, as callers of `torch.load`
        expect.
    pickle.UnpicklingError
        torch's own, of names that its rules refuse.
    OSError
        From the system.

    Notes
    -----
    About 2 us of CPU per tensor, whatever its size.
    """
    if mmap is None and setting("load", "mmap", False):
        mmap = True
    if not _is_ours(f, pickle_module, weights_only, mmap, pickle_load_args):
        _served.pass_on("torch.load")
        return torch_load(
            f, map_location, pickle_module, weights_only=weights_only, mmap=mmap, **pickle_load_args
        )  # fmt: skip
    several = place_of_several(f)
    if several is not None:
        words = {"weights_only": weights_only, "mmap": mmap, **pickle_load_args}
        with torch_errors():
            return load_several(several, lambda file: load(file, map_location, **words))
    if pickle_load_args:
        warnings.warn("pickle_load_args only works if `weights_only=False`.", stacklevel=2)
    storage, name = open_source(f, mmap is not False)
    try:
        with torch_errors(name):
            found = _Load(f, storage, name, map_location, mmap, pickle_load_args.get("encoding", _ENCODING)).run()
            leave_behind(f, storage)
    finally:
        storage.close()  # the tensors keep what they need
    return found


def load_storage(f: Any, storage: Storage, name: str, map_location: Any) -> Any:
    """Load what is in a storage that was opened for `f`; see `load`."""
    # What goes to torch is read by it: it maps no legacy file, and its mappings may be shared ones.
    return _Load(f, storage, name, map_location, False, _ENCODING).run()


def _is_ours(f: Any, pickle_module: Any, weights_only: bool | None, mmap: bool | None, more: dict[str, Any]) -> bool:
    """Whether `torch.load` would read weights only, from a file of a kind that is read here."""
    forced, unforced = (os.getenv(name, "0").lower() in _TRUE for name in (
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"))  # fmt: skip
    if (forced and unforced) or pickle_module is not None or set(more) - {"encoding"}:
        return False
    if not forced and (not weights_only if weights_only is not None else unforced):
        return False
    if not (is_path(f) or _is_buffer(f) or all(hasattr(f, word) for word in ("read", "seek", "tell"))):
        return False
    if hasattr(f, "seekable") and not f.seekable():
        return False
    return not mmap or ((is_path(f) or is_real_file(f)) and not _is_shared())


def _is_buffer(f: Any) -> bool:
    return isinstance(f, bytes | bytearray | memoryview)


def _is_shared() -> bool:
    """Whether the user asked torch for mappings whose writes reach the file."""
    get = getattr(torch.serialization, "get_default_mmap_options", None)
    shared = getattr(torch.serialization, "MAP_SHARED", None)  # Windows has none
    return get is not None and shared is not None and bool(get() == shared)


def _tolerate(error: ChecksumError) -> bool:
    """Go on where elements changed: torch checks none, and its shared mappings are made for that. Say so, though."""
    if "/data/" not in (error.record or ""):
        return False
    warnings.warn(f"{error}; loaded as it is, as torch.load does", stacklevel=2)
    return True


class _Load:
    """One call, with the bytes at hand."""

    def __init__(
        self, f: Any, storage: Storage, name: str, map_location: Any, mmap: bool | None, encoding: str
    ) -> None:
        self._f = f
        self._storage = storage
        self._name = name
        self._map_location = map_location
        self._mmap = mmap
        self._encoding = encoding
        self._options = OpenOptions(writable=True, encoding=encoding, tolerate=_tolerate)

    def run(self) -> Any:
        format = formats.of_storage(self._storage, None, self._name)
        if format.NAME == "torchscript":
            _served.pass_on("torch.load")
            return self._as_a_whole()
        _served.count("torch.load", self._storage.nbytes)
        if format.NAME == "safetensors":
            return self._safetensors(format)
        if format.NAME not in TORCH_FORMATS:
            raise UnsupportedError(
                f"expected a file of torch.save, found one of format {format.NAME!r}: tensorio.load opens it"
            )
        self._bring(format)
        found, plain = self._plain(format)
        if not plain:
            self._validate(format)
            found = self._special(format)
        if isinstance(self._storage, FileStorage):
            self._storage.check_unchanged()
        return found

    def _plain(self, format: Any) -> tuple[Any, bool]:
        """The first way: what was found, and whether it leads anywhere."""
        if not is_ordinary() or not self._is_little():
            return None, False
        try:
            places = Places(self._map_location)
            found = format.load(self._storage, replace(self._options, maker=TorchMaker(places)))
            places.finish()
        except (NotPlain, UnsafePickleError, UnsupportedError):
            return None, False
        return found, True

    def _bring(self, format: Any) -> None:
        """Where page faults are dear, read a good file by large reads before it is looked at."""
        if self._mmap is None and reads_payload(self._storage, "auto"):
            self._validate(format)
            settle(self._storage, "auto", None, whole=False)
            self._storage.read_ahead(0, self._storage.nbytes)

    def _is_little(self) -> bool:
        """Whether a file that does not say so is little-endian."""
        get = getattr(torch.serialization, "get_default_load_endianness", None)
        asked = None if get is None else get()
        return asked is None or asked.name == "LITTLE"

    def _validate(self, format: Any) -> None:
        """See that the structure is whole, whatever the names in the pickle are."""
        # No tensor is made here; with a maker, text is read as torch takes it.
        options = replace(self._options, encoding=None, maker=TorchMaker(Places(None)))
        try:
            format.open(self._storage, options)
            return
        except UnsafePickleError as error:
            if any(len(name) > _LONGEST_NAME for name in error.globals):
                raise  # torch searches its message for words, in time that grows with the square of its length
        except UnsupportedError:
            pass
        with contextlib.suppress(UnsupportedError):  # whole, but of a kind that torch knows and we don't
            format.open(self._storage, replace(options, unknown="opaque"))

    def _special(self, format: Any) -> Any:
        """The second way; if it fails, torch says why in the words of `torch.load`."""
        if format.NAME == "torch_zip" and _exact.KNOWN:
            with contextlib.suppress(Exception):
                return _exact.load_zip(self._storage, self._options, self._map_location, self._encoding)
        return self._as_a_whole()

    def _as_a_whole(self) -> Any:
        """`torch.load` of our bytes; of the file itself, where it can be opened once more."""
        words = {"map_location": self._map_location, "weights_only": True}
        if self._encoding != _ENCODING:
            words["encoding"] = self._encoding
        if is_path(self._f) and isinstance(self._storage, FileStorage):
            return torch_load(self._f, mmap=self._mmap, **words)
        inside = _exact.as_file(self._storage)
        found = torch_load(inside, mmap=False, **words)  # whatever the user's settings say of files
        self._storage.used = inside.tell()
        return found

    def _safetensors(self, format: Any) -> dict[str, torch.Tensor]:
        self._bring(format)
        where = self._map_location
        if not isinstance(where, str | torch.device | None):
            kind = "dict" if isinstance(where, dict) else "callable" if callable(where) else type(where).__name__
            raise RuntimeError(
                f"Loading safetensors file with {kind} map_location is not supported: it goes to one device, named by "
                "a str or a torch.device"
            )
        return to_device(tensors_of(format.open(self._storage, self._options)), "cpu" if where is None else where)
