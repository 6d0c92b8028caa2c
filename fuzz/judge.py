"""What must hold of a file, whatever is in it: tensorio's promises, tried on one input.

Raises `Broken` with a kind and a sentence; a crash, a hang or too much memory end the
process that runs this, which its parent notices.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import os
import random
import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

import tensorio
from tensorio.values import Opaque

SECONDS = 1.0  # of CPU per input and act
LINE = 500
MIB = 1 << 20
NODES = 20_000  # of a tree that are looked at: sharing makes some trees endless
SANITIZED = "asan" in Path("/proc/self/maps").read_text()


class Broken(Exception):
    """A promise does not hold."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Outcome:
    """How one act on one file ended.

    Attributes
    ----------
    error : Exception or None
    picture : str
        Digest of the result, or the error without the file's name.
    shape : str
        The kinds of things in it, or the error without its numbers and quotations: inputs that differ in this are
        worth keeping.
    """

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value = value
        self.error = error
        if error is None:
            self.picture, self.shape = contents(value)
        else:
            where = (getattr(error, "record", None), getattr(error, "offset", None))
            self.picture = f"{type(error).__name__} at {where}"  # the words may tell what was at hand
            words = re.sub(r"'(?:[^'\\]|\\.)*'|\d+", "#", str(getattr(error, "message", error)))
            self.shape = f"{type(error).__name__}: {words}"


def attempt(act: Any, what: Any, size: int, **options: Any) -> Outcome:
    """Do it; the outcome, if it is one of those that are allowed. What took long may try again: the machine is busy."""
    for last in (False, False, True):
        start = time.process_time()
        outcome = attempt_once(act, what, size, options)
        taken = time.process_time() - start
        if taken <= SECONDS * (20 if SANITIZED else 1):
            break
        if last:
            raise Broken("slow", f"{taken:.2f} s for {act.__name__} {options} of {size} bytes")
    return outcome


def attempt_once(act: Any, what: Any, size: int, options: dict[str, Any]) -> Outcome:
    try:
        outcome = Outcome(act(what, **options))
    except tensorio.TensorIOError as error:
        check_message(error, size)
        outcome = Outcome(error=error)
    except OSError as error:
        outcome = Outcome(error=error)
    except MemoryError as error:
        raise Broken("memory", f"MemoryError from {act.__name__} {options}") from error
    except Broken:
        raise
    except Exception as error:
        raise Broken("escaped", f"{type(error).__name__} from {act.__name__} {options}: {error}") from error
    return outcome


def check_message(error: tensorio.TensorIOError, size: int) -> None:
    """P5: one printable line that says where."""
    text = str(error)
    if not 10 < len(text) <= LINE:
        raise Broken("message", f"{len(text)} characters: {text[:600]}")
    if not text.isprintable():
        raise Broken("message", f"not printable: {text!r}")
    if error.offset is not None and not 0 <= error.offset <= size:
        raise Broken("offset", f"{error.offset} of {size} bytes: {text}")


def contents(tree: Any) -> tuple[str, str]:
    """A digest of all values of a tree, and the set of their kinds. Touches the bytes of its arrays."""
    digest = hashlib.sha1()
    kinds: set[str] = set()
    seen: dict[int, int] = {}
    stack = [tree]
    keep = []  # what arrays give is alive until the end, so that no id comes twice
    while stack and len(seen) < NODES:
        x = stack.pop()
        if id(x) in seen:
            digest.update(b"again %d" % seen[id(x)])
            continue
        seen[id(x)] = len(seen)
        keep.append(x)
        if type(x).__module__.startswith("tensorio") and type(x).__name__.startswith("_") and not is_allowed(x):
            raise Broken("leak", f"{type(x).__module__}.{type(x).__name__} in the result")
        kinds.add(type(x).__name__ + (f" {x.dtype}" if isinstance(x, np.ndarray) else ""))
        digest.update(f"{type(x).__name__} ".encode())
        if isinstance(x, np.ndarray):
            digest.update(f"{x.dtype} {x.shape} {x.flags.writeable} ".encode())
            digest.update(array_bytes(x, stack))
        else:
            parts = parts_of(x)
            if parts is None:
                digest.update(scalar(x))
            else:
                digest.update(b"%d " % len(parts))
                stack.extend(reversed(parts))
    return digest.hexdigest(), " ".join(sorted(kinds))


def is_allowed(x: Any) -> bool:
    """Whether an object of a private class of ours may be in a result: names stand for themselves."""
    return type(x).__name__ == "_Global"


def array_bytes(x: np.ndarray[Any, Any], stack: list[Any]) -> bytes:
    """The bytes of an array, or of its corners: a view may have 2^40 elements."""
    if x.dtype.hasobject:
        stack.extend(x.ravel().tolist() if x.size < 1000 else [])
        return b""
    if x.nbytes <= MIB:
        return x.tobytes()
    return x[(0,) * x.ndim].tobytes() + x[(-1,) * x.ndim].tobytes()


def parts_of(x: Any) -> list[Any] | None:
    """What is in a container; None for what is no container."""
    if isinstance(x, dict):
        return [*x.keys(), *x.values(), *([vars(x)] if getattr(x, "__dict__", None) else [])]
    if isinstance(x, Opaque):
        return [x.module, x.name, x.args, x.state, x.items]
    if isinstance(x, list | tuple):
        return list(x)
    if isinstance(x, set | frozenset):
        return [contents(item)[0] for item in list(x)[:100]]
    if isinstance(x, slice):
        return [x.start, x.stop, x.step]
    if hasattr(x, "__dataclass_fields__"):
        return [getattr(x, name) for name in x.__dataclass_fields__]
    if isinstance(x, argparse.Namespace | types.SimpleNamespace):
        return [vars(x)]
    if isinstance(x, collections.deque):
        return [x.maxlen, *x]
    return None


def scalar(x: Any) -> bytes:
    if isinstance(x, int):
        return b"%x" % x
    if isinstance(x, str):
        return str(x).encode("utf-8", "surrogatepass")
    return bytes(x) if isinstance(x, bytes | bytearray) else repr(x).encode("utf-8", "surrogatepass")


# ----------------------------------------------------------------- the promises


class Judge:
    """Tries the promises on inputs.

    Parameters
    ----------
    folder : path
        For one file at a time; best in memory.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "input")
        self.worded_otherwise = 0

    def __call__(self, data: bytes, suffix: str, room: int, rng: random.Random, format: str | None = None) -> Outcome:
        """P2 to P6 for one file; how loading it from memory ends.

        `room` is what an offset may point into: the file, or an unpacked record.
        """
        self.options: dict[str, Any] = {} if format is None else {"format": format}
        before = start_of_peak()
        opened = attempt(look, data, room, **self.options)
        check_memory(before, 64 * MIB + 32 * len(data), "opening")
        loaded = attempt(tensorio.load, data, room, **self.options)
        if opened.error is not None and loaded.error is None:
            raise Broken("verdict", f"load takes what open refuses: {opened.picture}")
        path = self.path + suffix
        Path(path).write_bytes(data)
        for mmap in (True, False):
            other = attempt(tensorio.load, path, room, mmap=mmap, **self.options)
            self.same(loaded, other, f"path, mmap={mmap}")
        self.others(data, path, room, rng, loaded)
        return loaded

    def same(self, a: Outcome, b: Outcome, what: str) -> None:
        """P6. A name's suffix may decide which format words the refusal of what nobody recognises."""
        if isinstance(a.error, tensorio.UnknownFormatError) and b.error is not None:
            return
        if a.error is not None and b.error is not None:
            self.worded_otherwise += a.picture != b.picture  # the first of several faults is not always the same
        elif a.picture != b.picture:
            said = [f"{o.picture[:100]} {str(o.error)[:200]}" for o in (a, b)]
            raise Broken("P6", f"bytes: {said[0]}; {what}: {said[1]}")

    def others(self, data: bytes, path: str, room: int, rng: random.Random, loaded: Outcome) -> None:
        """The other ways to read a file, by turns."""
        turn = rng.randrange(8)
        if turn < 3:
            opaque = attempt(tensorio.load, data, room, unknown="opaque", **self.options)
            if loaded.error is None:
                self.same(loaded, opaque, "unknown='opaque'")
            if turn == 0:
                attempt(look, path, room, unknown="opaque", **self.options)
        elif turn == 3:
            strict = attempt(tensorio.load, data, room, strict=True, **self.options)
            if strict.error is None:
                self.same(loaded, strict, "strict=True")
        elif turn == 4:
            attempt(tensorio.verify, path, room)
        elif turn == 5 and loaded.error is None:
            self.some_names(data, room)
        elif turn == 6:
            attempt(tensorio.load, path, room, writable=True, **self.options)

    def some_names(self, data: bytes, room: int) -> None:
        try:
            with tensorio.open(data, **self.options) as checkpoint:
                names = list(checkpoint)[::2]
        except tensorio.TensorIOError:
            return
        attempt(tensorio.load, data, room, names=names, **self.options)


def look(source: Any, **options: Any) -> Any:
    """Open a file and ask for all that can be known of it; every extent lies inside its storage."""
    with tensorio.open(source, **options) as checkpoint:
        limits = [storage.nbytes for storage in checkpoint._opened.storages]
        for name, info in list(checkpoint.infos.items())[:1000]:
            if not isinstance(name, str) or any(n < 0 for n in info.shape):
                raise Broken("P2", f"{name!r} {info}")
            for chunk in info.chunks:
                extent = chunk.extent
                reach = sum((n - 1) * s for n, s in zip(chunk.shape, chunk.strides, strict=True) if n)
                empty = 0 in chunk.shape
                if extent.offset < 0 or extent.nbytes < 0 or extent.offset + extent.nbytes > limits[extent.storage]:
                    raise Broken("P2", f"extent outside its storage of {limits[extent.storage]} bytes: {info}")
                if not empty and (reach < 0 or reach >= max(extent.nbytes, 1)):
                    raise Broken("P2", f"elements outside their extent: {info}")
        paths = list(checkpoint.paths.items())[:1000]
        return [checkpoint.format, checkpoint.metadata, paths, contents(checkpoint.tree())[0]]


def start_of_peak() -> int:
    """Forget the peak of resident memory; what is resident now, in bytes. -1 where that can't be known."""
    if SANITIZED:
        return -1
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
        return _status("VmRSS")
    except OSError:
        return -1


def check_memory(before: int, allowed: int, what: str) -> None:
    """P3."""
    if before >= 0 and (grown := _status("VmHWM") - before) > allowed:
        raise Broken("memory", f"{what} took {grown >> 20} MiB, of {allowed >> 20} allowed")


def _status(field: str) -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field + ":"))


# ----------------------------------------------------------------------- P1

QUIET = ("tensorio", "numpy", "ml_dtypes", "encodings", "_")
DANGEROUS = {"subprocess", "os", "socket", "ctypes", "shutil", "urllib", "pty", "compile", "exec", "pickle", "code"}
HARMLESS = {"os.listdir", "os.scandir"}


class Watch:
    """What no file may cause: imports, code, processes, sockets, files written, errors that nobody can catch."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.events: list[str] = []
        self.lost: list[str] = []
        self.armed = False
        sys.addaudithook(self.hook)
        sys.unraisablehook = lambda args: self.lost.append(f"{args.err_msg} {args.exc_type.__name__}: {args.exc_value}")

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event == "import" and not str(args[0]).startswith(QUIET):
            self.note(event, args[0])
        elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
            if not str(args[0]).startswith((self.folder, "/proc/self/")):
                self.note(event, args)
        elif event.partition(".")[0] in DANGEROUS and event not in HARMLESS:
            self.note(event, args)

    def note(self, event: str, what: Any) -> None:
        self.events.append(f"{event} {str(what)[:100]}")

    def check(self) -> None:
        """P1; and nothing goes to stderr by the interpreter's last resort."""
        events, lost = self.events[:], self.lost[:]
        self.events.clear()
        self.lost.clear()
        if events:
            raise Broken("P1", "; ".join(events[:5]))
        if lost:
            raise Broken("unraisable", "; ".join(lost[:5]))
