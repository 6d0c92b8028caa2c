"""Files and folders encrypted and decrypted: each appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tensorio.encryption._clear import fits, has_tensors, is_usual
from tensorio.encryption._header import CHUNK, MAGIC, chunk_log, is_encrypted
from tensorio.encryption._keys import KeySource
from tensorio.encryption._opening import NOT_ENCRYPTED, decrypted, has_encrypted, head_of
from tensorio.encryption._plan import copied_plan, encrypted_plan
from tensorio.encryption._tensors import decrypted_tensors, encrypted_tensors
from tensorio.errors import DecryptionError, FormatError, TensorMismatchError, UnsupportedError, error_context, escaped
from tensorio.formats import safetensors, target_name
from tensorio.formats._base import DELTA_KEY, Opened, OpenOptions
from tensorio.plan import CheckedPlan, Plan
from tensorio.storage.base import Storage
from tensorio.storage.opening import open_storage
from tensorio.sums import is_manifest
from tensorio.tp import Rules
from tensorio.writing.folders import staged_folder
from tensorio.writing.output import write_plan

__all__ = ["Decryption", "Encryption", "Processed", "process"]

Progress = Callable[[int, int], object]


@dataclass
class Encryption:
    """How to encrypt; see `tensorio.encrypt`."""

    key: bytes = field(repr=False)
    key_id: str = ""
    tensors: tuple[str, ...] | None = None
    chunk: int = CHUNK
    old_key: KeySource | None = None
    clear: tuple[str, ...] | None = None
    used: set[str] = field(default_factory=set)  # patterns that fitted a tensor

    def __post_init__(self) -> None:
        chunk_log(self.chunk)
        if self.tensors == ():
            raise ValueError("tensors= is one pattern or more, or None for all of the file")
        Rules((pattern, "replicate") for pattern in self.tensors or ())  # says at once what is no pattern

    def wants(self, name: str, storage: Storage) -> bool:
        """Whether a file of a folder is to be encrypted: all but those that may stay readable."""
        if is_encrypted(head_of(storage, len(MAGIC))):
            return True  # with another key, whatever its name is
        if self.clear is not None and fits(name, self.clear):
            return False
        if has_tensors(name, storage):
            return True
        return self.tensors is None and (self.clear is not None or not is_usual(name, storage))

    def plan(self, storage: Storage) -> Plan | None:
        """Plan the encrypted file; None if no tensor in it is to be."""
        storage = self._plain(storage)
        if self.tensors is None:
            return encrypted_plan(storage, self.key, key_id=self.key_id, chunk=self.chunk)
        if not safetensors.recognises(head_of(storage, 4096), storage):
            raise UnsupportedError("expected a safetensors file: of others, no single tensors can be encrypted")
        opened = safetensors.open(storage, OpenOptions(key=self.old_key if _marked(storage) else None))
        if DELTA_KEY in (opened.metadata or {}):
            raise UnsupportedError("single tensors of a delta can't be encrypted: convert it to a whole file first")
        chosen = self._chosen(opened.table.names)
        if not chosen:
            return None
        return encrypted_tensors(opened, chosen, self.key, key_id=self.key_id, chunk=self.chunk)

    def copied(self, storage: Storage) -> Plan:
        """Plan a file that stays readable: nothing in it keeps its old key."""
        plain = None if self.old_key is None else Decryption(self.old_key).plan(storage)
        return copied_plan(storage) if plain is None else plain

    def _plain(self, storage: Storage) -> Storage:
        """What is to be encrypted: the bytes of the file, or those it was made of."""
        if is_encrypted(head_of(storage, len(MAGIC))):
            if self.old_key is None:
                raise DecryptionError(
                    "the file is encrypted already: to encrypt it with another key, give its key as old_key="
                )
            return decrypted(storage, self.old_key)
        if self.old_key is not None and not _marked(storage):
            raise DecryptionError("old_key= was given, but nothing in the file is encrypted")
        if self.old_key is not None and self.tensors is None:
            raise UnsupportedError("expected tensors= with a file of which tensors are encrypted; or decrypt it first")
        if self.tensors is not None and self.old_key is None and _marked(storage):
            raise DecryptionError("tensors of the file are encrypted already: give their key as old_key=")
        return storage

    def _chosen(self, fqns: Iterable[str]) -> Collection[str]:
        patterns = [(p, Rules([(p, "replicate")])) for p in self.tensors or ()]
        chosen = set()
        for fqn in fqns:
            fitting = [p for p, rules in patterns if rules.match(fqn) is not None]
            self.used.update(fitting)
            if fitting:
                chosen.add(fqn)
        return chosen

    def finish(self, done: int) -> None:
        """Raise if a pattern fitted nothing, or nothing was encrypted."""
        idle = [p for p in self.tensors or () if p not in self.used]
        if idle:
            raise TensorMismatchError(f"tensors={escaped(idle[0])} fits no tensor")
        if not done:
            raise UnsupportedError("expected files to encrypt in the folder, found none but such as stay readable")


@dataclass
class Decryption:
    """How to decrypt; see `tensorio.decrypt`."""

    key: KeySource

    def wants(self, name: str, storage: Storage) -> bool:
        """Whether a file of a folder may be encrypted: any may."""
        return True

    def plan(self, storage: Storage) -> Plan | None:
        """Plan the decrypted file; None if nothing in it is encrypted."""
        if is_encrypted(head_of(storage, len(MAGIC))):
            return copied_plan(decrypted(storage, self.key))
        if _marked(storage):
            return decrypted_tensors(_opened(storage, self.key))
        return None

    def copied(self, storage: Storage) -> Plan:
        """Plan a file in which nothing is encrypted."""
        return copied_plan(storage)

    def finish(self, done: int) -> None:
        """Raise if nothing was decrypted."""
        if not done:
            raise DecryptionError(NOT_ENCRYPTED.partition(";")[0])


def _opened(storage: Storage, key: KeySource | None) -> Opened:
    return safetensors.open(storage, OpenOptions(key=key))


def _marked(storage: Storage) -> bool:
    """Whether a file is a safetensors file of which tensors are encrypted."""
    head = head_of(storage, 4096)
    if not safetensors.recognises(head, storage):
        return False
    try:
        return has_encrypted(safetensors.notes_of(storage))
    except FormatError:
        return False  # by chance, or damaged: whoever opens it says more


class Processed(NamedTuple):
    """What was written.

    Attributes
    ----------
    files : list of str
        Paths; none for a file object.
    nbytes : int
        Of all of them.
    clear : list of str
        The paths of those that are copies.
    """

    files: list[str]
    nbytes: int
    clear: list[str]


def process(
    src: Any, dst: Any, how: Encryption | Decryption, *, write: Callable[..., None], durable: bool,
    progress: Progress | None,
) -> Processed:  # fmt: skip
    """Encrypt or decrypt a file, or the files of a folder.

    Parameters
    ----------
    write : callable
        What writes the plan of a file: `tensorio.writing.output.write_plan`, or something that does more.
    """
    if isinstance(src, str | os.PathLike) and os.path.isdir(src):
        return _folder(os.fsdecode(src), os.fsdecode(dst), how, durable, progress)
    with _planned(src, how) as (plan, made):
        how.finish(made)
        write(plan, dst, durable=durable, progress=progress)
    name = target_name(dst)
    return Processed([] if name is None else [name], plan.nbytes, [])


@contextmanager
def _planned(src: Any, how: Encryption | Decryption, member: str | None = None) -> Iterator[tuple[Plan, bool]]:
    """Open a file, or one of a folder, and plan what becomes of it, or a copy; and tell which."""
    storage, _, name = open_storage(src)
    try:
        with error_context(path=name):
            plan = how.plan(storage) if member is None or how.wants(member, storage) else None
            written = how.copied(storage) if plan is None else plan
            yield CheckedPlan(written, storage.check_unchanged), plan is not None
    finally:
        storage.close()


def _folder(src: str, dst: str, how: Encryption | Decryption, durable: bool, progress: Progress | None) -> Processed:
    entries = sorted(
        name for name in os.listdir(src) if not is_manifest(name)
    )  # it would not be true of what is written
    for name in entries:
        if os.path.isdir(os.path.join(src, name)):
            raise UnsupportedError(f"expected a folder of files, found the folder {escaped(name)} in it", path=src)
    total = sum(os.path.getsize(os.path.join(src, name)) for name in entries)
    before = nbytes = 0
    copied = []

    def step(now: int, _: int) -> None:
        if progress is not None:
            progress(min(before + now, total), total)

    with staged_folder(dst, durable=durable) as staging:
        for name in entries:
            path = os.path.join(src, name)
            with _planned(path, how, name) as (plan, made):
                copied += [] if made else [name]
                nbytes += plan.nbytes
                write_plan(plan, os.path.join(staging, name), durable=durable, progress=step)
            before += os.path.getsize(path)
        how.finish(len(entries) - len(copied))
    files, clear = ([os.path.join(dst, name) for name in listed] for listed in (entries, copied))
    return Processed(files, nbytes, clear)
