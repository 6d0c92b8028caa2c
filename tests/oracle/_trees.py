"""Random trees of tensors and plain values, and what torch files are compared by."""

from __future__ import annotations

import io
import random
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict
from typing import Any

import ml_dtypes
import numpy as np
import torch

import tensorio

Array = np.ndarray[Any, Any]

# Element types that have a storage class in torch, and those that go by bytes and a dtype.
CLASSIC = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
           "complex128", "complex64"]  # fmt: skip
BY_DTYPE = ["complex32", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
            "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4",
            "bits4x2"]  # fmt: skip
TORCH_DTYPES = CLASSIC + BY_DTYPE

# What NumPy has arrays of, with and without ml_dtypes.
NUMPY_DTYPES = ["f4", "f8", "f2", "i8", "i4", "i2", "i1", "u1", "u2", "u4", "u8", "?", "c8", "c16"]
ML_DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


# ----------------------------------------------------------------- saved bytes


def saved_by_torch(obj: Any) -> bytes:
    """What ``torch.save`` writes into a file object."""
    out = io.BytesIO()
    torch.save(obj, out)
    return out.getvalue()


def saved(obj: Any, **options: Any) -> bytes:
    """What ``tensorio.save`` writes into a file object."""
    out = io.BytesIO()
    tensorio.save(obj, out, format="torch_zip", **options)
    return out.getvalue()


def masked(data: bytes) -> bytes:
    """A torch file with the serialization id's digits zeroed, and the CRC over them in its two places."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        last = archive.infolist()[-1]
        directory = archive.start_dir
    assert last.filename.endswith("/.data/serialization_id")
    assert last.file_size == 40
    out = bytearray(data)
    name, extra = struct.unpack_from("<HH", out, last.header_offset + 26)
    start = last.header_offset + 30 + name + extra
    assert out[start : start + 40].isdigit()
    out[start : start + 40] = bytes(40)
    out[start + 44 : start + 48] = bytes(4)  # behind the descriptor's signature
    entry = out.rindex(b"PK\1\2", directory)
    out[entry + 16 : entry + 20] = bytes(4)
    return bytes(out)


def id_of(data: bytes) -> bytes:
    """The serialization id."""
    return record(data, ".data/serialization_id")


def record(data: bytes, name: str) -> bytes:
    """One record of a torch file, by the part of its name behind the prefix."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(archive.namelist()[0].partition("/")[0] + "/" + name)


def storages(data: bytes) -> list[bytes]:
    """The payloads of a torch file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [archive.read(n) for n in archive.namelist() if n.partition("/")[2].startswith("data/")]


def assert_same_file(ours: bytes, theirs: bytes) -> None:
    """Byte-identical but for the id; the message shows where the pickles part."""
    if masked(ours) == masked(theirs):
        return
    a, b = record(ours, "data.pkl"), record(theirs, "data.pkl")
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    where = f"at {at} of the pickle: {a[max(at - 30, 0) : at + 30]!r}, expected {b[max(at - 30, 0) : at + 30]!r}"
    raise AssertionError(where if a != b else f"behind equal pickles: {len(ours)} bytes, expected {len(theirs)}")


def assert_sound(data: bytes) -> None:
    """Every CRC holds."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None


# ------------------------------------------------------------------- equality


def bits(tensor: Any) -> bytes:
    """The bytes of a tensor's values, in C order."""
    t = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    raw: bytes = t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
    return raw


def assert_equal(got: Any, want: Any) -> None:
    """The same tree: types, order of keys, attributes, bits of every tensor and float."""
    if isinstance(want, np.ndarray):
        want = from_numpy(want)
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert (got.dtype, got.shape, got.layout) == (want.dtype, want.shape, want.layout)
        assert got.requires_grad == want.requires_grad
        assert isinstance(got, torch.nn.Parameter) == isinstance(want, torch.nn.Parameter)
        assert bits(got) == bits(want)
        return
    assert type(got) is type(want)
    if isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            assert_equal(got[key], want[key])
        if hasattr(want, "__dict__"):
            assert vars(got) == vars(want)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_equal(a, b)
    elif isinstance(want, float):
        assert struct.pack("<d", got) == struct.pack("<d", want)
    elif isinstance(want, complex):
        assert_equal((got.real, got.imag), (want.real, want.imag))
    else:
        assert got == want


# ------------------------------------------------------------- NumPy to torch


def from_numpy(array: Array) -> Any:
    """The tensor over an array's memory; ml_dtypes' types go through the integers of their width."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # arrays that may not be written to
        if array.dtype.name in ML_DTYPES:
            return torch.from_numpy(array.view(f"u{array.itemsize}")).view(getattr(torch, array.dtype.name))
        return torch.from_numpy(array)


def through_torch(obj: Any, memo: dict[int, Any] | None = None) -> Any:
    """The same tree with ``torch.from_numpy`` of its arrays; what was one object still is one."""
    memo = {} if memo is None else memo
    if id(obj) in memo:
        return memo[id(obj)]
    new: Any = obj
    if isinstance(obj, np.ndarray):
        new = memo[id(obj)] = from_numpy(obj)
    elif type(obj) in (dict, OrderedDict):
        new = memo[id(obj)] = type(obj)()
        new.update((key, through_torch(value, memo)) for key, value in obj.items())
        if hasattr(obj, "__dict__"):
            vars(new).update(vars(obj))
    elif type(obj) is list:
        new = memo[id(obj)] = []
        new.extend(through_torch(value, memo) for value in obj)
    elif type(obj) is tuple:
        new = memo[id(obj)] = tuple(through_torch(value, memo) for value in obj)
    return new


# ----------------------------------------------------------------- generators


class Trees:
    """Trees made at random from a seed: containers, shared parts, plain values, tensors.

    Parameters
    ----------
    seed : int
    kind : {"numpy", "torch"}
        What the tensors are.
    """

    KEYS = ["weight", "bias", "0", "1", "2", "storage", "cpu", "a.b", "", "\u00e9", "\u2028\U0001f600", "running_mean"]
    WORDS = ["", "x", "0", "cpu", "storage", "adam", "na\u00efve", "\u65e5\u672c", "a" * 300, "\x00\n\x7f"]

    def __init__(self, seed: int, kind: str) -> None:
        self.rng = random.Random(seed)
        self.tensor = self.array if kind == "numpy" else self.torch_tensor
        self.made: list[Any] = []  # what may be referred to again
        self.bases: list[Any] = []

    def tree(self, depth: int = 0) -> Any:
        """A tree; at the root, always a container."""
        roll = self.rng.random()
        if depth and self.made and roll < 0.12:
            return self.rng.choice(self.made)
        if not depth or (depth < 4 and roll < 0.4):
            new = self.container(depth)
        elif roll < 0.75:
            new = self.tensor()
        else:
            return self.plain()
        self.made.append(new)
        return new

    def container(self, depth: int) -> Any:
        """A dict, OrderedDict, list or tuple."""
        rng = self.rng
        parts = [self.tree(depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 3, 4, 6)))]
        what = rng.randrange(10)
        if what < 2:
            return parts
        if what < 4:
            return tuple(parts)
        made: dict[Any, Any] = OrderedDict() if what < 6 else {}
        for part in parts:
            made[rng.choice(self.KEYS) if rng.random() < 0.8 else rng.randrange(-5, 70000)] = part
        return made

    def plain(self) -> Any:
        """A value that torch reads back with ``weights_only=True``."""
        rng = self.rng
        choices = [
            None, True, False, rng.randrange(300), rng.randrange(-70000, 70000), rng.getrandbits(40) - (1 << 39),
            rng.getrandbits(200), -rng.getrandbits(64), rng.random(), -0.0, float("inf"), float("nan"),
            complex(rng.random(), -1), rng.choice(self.WORDS), rng.choice(self.WORDS),
            rng.randbytes(rng.randrange(1, 5)), bytearray(rng.randbytes(rng.randrange(4))), {rng.randrange(9)}, set(),
            Counter(rng.choice(self.WORDS)),
        ]  # fmt: skip
        return rng.choice(choices)

    def shape(self) -> tuple[int, ...]:
        """Up to four dimensions, now and then an empty one."""
        return tuple(self.rng.choice((0, 1, 1, 2, 3, 4, 5)) for _ in range(self.rng.choice((0, 1, 1, 2, 2, 3, 4))))

    def array(self) -> Array:
        """An array with memory of its own, in any layout that torch can share."""
        rng = self.rng
        shape = self.shape()
        kind = np.dtype(rng.choice(NUMPY_DTYPES))
        if rng.random() < 0.25:
            kind = np.dtype(getattr(ml_dtypes, rng.choice(ML_DTYPES)))
        raw = rng.randbytes(int(np.prod(shape)) * kind.itemsize)
        made: Array = np.empty(shape, kind)
        made[...] = np.frombuffer(raw, kind).reshape(shape) if kind != np.bool_ else rng.random() < 0.5
        how = rng.randrange(12)
        if how == 0 and made.ndim > 1:
            made = made.T
        elif how == 1 and made.ndim:
            made = made[::2]
        elif how == 2 and made.ndim > 1:
            made = made[1:, ::2]
        elif how == 3:
            made = np.broadcast_to(made, (3, *made.shape))
        elif how == 4:
            made = np.asfortranarray(made)
        elif how == 5:
            made.flags.writeable = False
        return made

    def torch_tensor(self) -> Any:
        """A tensor: a view of a new or an earlier storage, a Parameter, one that asks for gradients."""
        rng = self.rng
        if self.bases and rng.random() < 0.4:
            made = rng.choice(self.bases)
        else:
            made = torch_base(rng.choice(TORCH_DTYPES), self.shape(), rng)
            self.bases.append(made)
        how = rng.randrange(14)
        if how == 0 and made.dim() > 1:
            made = made.transpose(0, -1)
        elif how == 1 and made.dim():
            made = made[1:]
        elif how == 2 and made.dim() > 1:
            made = made[:, ::2]
        elif how == 3:
            made = made.expand(3, *made.shape)
        elif how == 4:
            made = made.detach()
        elif how == 5 and made.is_complex():
            made = made.conj()
        elif how == 6 and made.dtype in (torch.complex64, torch.complex128):
            made = made.clone().conj().imag  # a storage may be saved as one type only
        elif how == 7 and (made.is_floating_point() or made.is_complex()):
            made = torch.nn.Parameter(made, requires_grad=rng.random() < 0.7)
        elif how == 8:
            made = torch.nn.Parameter(made, requires_grad=False)
        elif how == 9 and made.dtype in (torch.float32, torch.float64, torch.complex64):
            made = made.detach().requires_grad_()
        return made


def torch_base(dtype: str, shape: tuple[int, ...], rng: random.Random) -> Any:
    """A contiguous tensor of any torch type, over random bytes."""
    kind = getattr(torch, dtype)
    count = int(np.prod(shape))
    if dtype == "bool":
        return torch.tensor([rng.random() < 0.5 for _ in range(count)], dtype=kind).reshape(shape)
    if not count:
        return torch.empty(shape, dtype=kind)
    raw = torch.frombuffer(bytearray(rng.randbytes(count * kind.itemsize)), dtype=torch.uint8)
    return raw.view(kind).reshape(shape)
