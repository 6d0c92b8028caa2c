"""Our readers beside the reference readers, on files that the reference wrote and on mutations of them.

Both directions of the verdict: what the reference accepts we accept, and the other way
round, except for what DESIGN.md refuses on purpose (a name that occurs twice) and for
NumPy's limits (64 dimensions, 2^63 - 1).
"""

from __future__ import annotations

import io
import json
import pickletools
import random
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import hexfile
import tensorio

torch = pytest.importorskip("torch", reason="torch is the oracle")
pytest.importorskip("safetensors", reason="safetensors is the oracle")
import safetensors.numpy  # noqa: E402
import safetensors.torch  # noqa: E402

Array = np.ndarray[Any, Any]

MUTATIONS = 60_000  # about 2 s of both readers together

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def raw(array: Array) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes()


# ----------------------------------------------------------------- safetensors

ST_NUMPY = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32",
            "float64", "complex64", "bfloat16"]  # fmt: skip


@st.composite
def tensor_dicts(draw: st.DrawFn) -> dict[str, Array]:
    keys = draw(st.lists(names.filter(lambda n: n != "__metadata__"), unique=True, max_size=6))
    return {
        key: cases.array(draw(st.sampled_from(ST_NUMPY)), draw(shapes), seed) for seed, key in enumerate(keys)
    }  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(tensors=tensor_dicts(), metadata=st.none() | st.dictionaries(names, names, min_size=1, max_size=3))
def test_safetensors_written_by_the_reference_reads_the_same(tensors: dict[str, Array], metadata: Any) -> None:
    data = safetensors.numpy.save(tensors, metadata)
    with tensorio.open(data) as checkpoint:
        assert checkpoint.metadata == (metadata or {})
        assert {k: raw(v) for k, v in checkpoint.items()} == {k: raw(v) for k, v in tensors.items()}
    assert {k: raw(v) for k, v in tensorio.load(data).items()} == {k: raw(v) for k, v in tensors.items()}


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
                                   "float8_e8m0fnu", "bfloat16", "complex64", "uint64"])  # fmt: skip
def test_safetensors_written_from_torch_reads_the_same(dtype: str) -> None:
    want = cases.array(dtype, (3, 4))
    data = safetensors.torch.save({"x": cases.as_torch(want)})
    assert raw(tensorio.load(data)["x"]) == raw(want)


FRAGMENTS = [
    b'"a":', b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}', b"null", b"true", b"1.0", b"-1", b"-0", b"01", b"1e3",
    b"18446744073709551615", b"18446744073709551616", b"[]", b"{}", b'"__metadata__"', b"\\u0000", b"\\ud800",
    b"\\ud83d\\ude00", b"\\/", b"\\x", b"\x00", b"\x7f", b"\xff", b"\xc3\xa9", b"\xed\xa0\x80", b"\xef\xbb\xbf", b" ",
    b"\t", b"\n", b"\r", b"\f", b",", b":", b"[", b"]", b"{", b"}", b'"', b"//", b"'a'", b"NaN", b'"BF16"', b'"F4"',
    b'"F6_E2M3"', b'"U8"', b'"I64"', b'"f32"', b"[" * 60, b'"extra":[[[]]],', b'"shape":[1],', b"0", b"4", b"8",
]  # fmt: skip


def seeds() -> list[bytes]:
    """Small files whose mutations reach most rules."""
    entry = hexfile.st_entry
    return [
        cases.CASES["safetensors_small"]().data,
        hexfile.st_file({"a": entry("F32", [1], 0, 4), "b": entry("U8", [2, 2], 4, 8)}, b"01234567"),
        hexfile.st_file({"__metadata__": {"k": "v", "e": "\u00e9\n"}, "x": entry("F4", [4], 0, 2)}, b"12"),
        hexfile.st_file({"z": entry("F32", [0], 0, 0), "a": entry("I64", [], 0, 8), "y": entry("F6_E2M3", [4], 8, 11)},
                        b"0123456789a"),
        hexfile.st_file('{"__metadata__":null,"q":{"data_offsets":[0,1],"shape":[1,1],"dtype":"BOOL"}}', b"\1"),
    ]  # fmt: skip


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to three changes to a header, its length field kept true (mostly), its payload mostly as it was."""
    length = int.from_bytes(data[:8], "little")
    header, payload = bytearray(data[8 : 8 + length]), data[8 + length :]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(header) + 1)
        what = rng.randrange(8)
        if what == 0 and at < len(header):
            header[at] = rng.randrange(256)
        elif what == 1:
            header[at:at] = rng.choice(FRAGMENTS)
        elif what == 2:
            del header[at : at + rng.choice((1, 1, 2, 5))]
        elif what == 3:
            end = min(len(header), at + rng.randrange(1, 60))
            header[end:end] = header[at:end]
        elif what == 4:
            numbers = list(re.finditer(rb"\d+", header))
            if numbers:
                m = rng.choice(numbers)
                header[m.start() : m.end()] = rng.choice(
                    (
                        b"0",
                        b"1",
                        b"2",
                        b"4",
                        b"8",
                        b"16",
                        b"4294967296",
                        b"-1",
                        b"18446744073709551615",
                        b"18446744073709551616",
                    )
                )
        elif what == 5:
            words = list(re.finditer(rb'"[^"]*"', header))
            if words:
                a, b = rng.choice(words), rng.choice(words)
                header[a.start() : a.end()] = b[0]
        elif what == 6:
            header[at:at] = rng.choice((b" ", b"\n", b"\t", b"\r")) * rng.randrange(1, 9)
        else:
            payload = rng.choice((payload + b"\0", payload[:-1], payload * 2))
    length = len(header) if rng.randrange(20) else rng.choice((0, 1, len(header) + 1, len(header) - 1, 1 << 63, 10**8))
    return hexfile.st_file(bytes(header), payload, length=max(length, 0), pad=1)


def reference_verdict(data: bytes) -> dict[str, Any] | None:
    try:
        return {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in safetensors.deserialize(data)}
    except safetensors.SafetensorError:
        return None


def our_verdict(data: bytes) -> dict[str, Any] | None:
    """What we read; None if refused."""
    codes = {name: code for code, (name, _) in cases.ST_CODES.items()}
    try:
        with tensorio.open(data, format="safetensors") as checkpoint:
            return {n: (codes[i.dtype], i.shape, checkpoint[n].tobytes()) for n, i in checkpoint.infos.items()}
    except (tensorio.FormatError, tensorio.UnsupportedError):
        return None


def refused_on_purpose(data: bytes) -> bool:
    """Whether a key of the header or of its metadata occurs twice, or a shape is beyond NumPy."""
    found = False

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        found = found or len({key for key, _ in pairs}) != len(pairs)
        shape = dict(pairs).get("shape")
        if isinstance(shape, list):
            found = found or len(shape) > 64 or any(isinstance(n, int) and n >= 1 << 63 for n in shape)
        return dict(pairs)

    json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=check)
    return found


def test_safetensors_mutations_have_the_references_verdict() -> None:
    rng = random.Random(20240229)
    files = seeds()
    accepted = purposely = 0
    for i in range(MUTATIONS):
        data = mutated(rng.choice(files), rng)
        ours = our_verdict(data)
        theirs = reference_verdict(data)
        if ours is None and theirs is not None and refused_on_purpose(data):
            purposely += 1
            continue
        assert ours == theirs, f"mutation {i}: {data!r}"
        accepted += ours is not None
    assert accepted > MUTATIONS // 50, "the mutations hardly ever leave a good file: they test nothing"
    assert purposely < MUTATIONS // 100


@pytest.mark.parametrize("data", [
    hexfile.st_file('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"\\u0061":{"dtype":"U8","shape":[0],'
                    '"data_offsets":[0,0]}}'),
    hexfile.st_file('{"__metadata__":{"k":"1","k":"2"}}'),
], ids=["tensor", "metadata"])  # fmt: skip
def test_safetensors_duplicates_are_refused_though_the_reference_reads_them(data: bytes) -> None:
    assert reference_verdict(data) is not None
    for read in (tensorio.open, tensorio.load):
        with pytest.raises(tensorio.HeaderError, match="duplicate"):
            read(data)


# ----------------------------------------------------------------------- torch

TORCH_DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
                torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32,
                torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]  # fmt: skip


@st.composite
def torch_tensors(draw: st.DrawFn) -> Any:
    """A view of a storage: sliced, transposed, expanded, offset."""
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    base = torch.arange(48, dtype=torch.uint8).repeat(16)[: 48 * dtype.itemsize]
    if dtype is torch.bool:
        base = base % 2
    base = base.view(dtype)
    kind = draw(st.integers(0, 7))
    if kind == 0:
        return base.reshape(6, 8).t()
    if kind == 1:
        return base[draw(st.integers(0, 47)) :]
    if kind == 2:
        return base.reshape(6, 8)[1:4, ::3]
    if kind == 3:
        return base[:1].expand(3, 5)
    if kind == 4:
        return base[0]
    if kind == 5:
        return base[:0].reshape(0, 3)
    if kind == 6:
        return base.reshape(2, 2, 3, 4).permute(3, 1, 0, 2)
    return torch.nn.Parameter(base.clone(), requires_grad=dtype.is_floating_point)


leaves = st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats(allow_nan=False) | names
keys = names | st.integers(-1000, 1000)
objects = st.recursive(
    leaves | torch_tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


def saved(obj: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def same(ours: Any, theirs: Any) -> None:
    """The same tree, with arrays for tensors."""
    if isinstance(theirs, torch.Tensor):
        t = theirs.detach()
        assert isinstance(ours, np.ndarray)
        assert ours.dtype.name == str(t.dtype).removeprefix("torch.")
        assert ours.shape == tuple(t.shape)
        if ours.size:
            assert [s // ours.itemsize for s in ours.strides] == list(t.stride())
        assert np.ascontiguousarray(ours).tobytes() == t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() \
            if t.numel() else True  # fmt: skip
        return
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            same(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            same(a, b)
    else:
        assert ours == theirs


@settings(max_examples=150, deadline=None)
@given(objects)
def test_torch_zip_written_by_torch_reads_the_same(obj: Any) -> None:
    data = saved(obj)
    same(tensorio.load(data), torch.load(io.BytesIO(data), weights_only=True))


@settings(max_examples=40, deadline=None)
@given(objects, st.sampled_from([3, 4, 5]))
def test_torch_zip_of_any_pickle_protocol_reads_the_same(obj: Any, protocol: int) -> None:
    buffer = io.BytesIO()
    torch.save(obj, buffer, pickle_protocol=protocol)
    same(tensorio.load(buffer.getvalue()), torch.load(io.BytesIO(buffer.getvalue()), weights_only=False))


def number_changes(pickle: bytes) -> Iterator[bytes]:
    """The pickle with every one of its small numbers replaced in turn."""
    ops: list[tuple[Any, Any, Any]] = list(pickletools.genops(pickle))
    for op, arg, at in ops:
        if op.name == "BININT1":
            for value in (0, 1, 2, 3, 4, 6, 12, 200):
                if value != arg:
                    yield pickle[: at + 1] + bytes([value]) + pickle[at + 2 :]


def test_torch_zip_with_any_number_changed_has_the_references_verdict() -> None:
    """Sizes, strides, offsets and element counts: a view that leaves its storage is refused, any other read alike."""
    data = saved({"a": torch.arange(12.0).reshape(3, 4)[1:, ::2], "b": torch.arange(3)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = {n.partition("/")[2]: archive.read(n) for n in archive.namelist()}
    storages = {k.removeprefix("data/"): v for k, v in parts.items() if k.startswith("data/")}
    accepted = 0
    for pickle in number_changes(parts["data.pkl"]):
        whole = hexfile.torch_file(pickle, storages)
        try:
            theirs = torch.load(io.BytesIO(whole), weights_only=True)
        except Exception:
            with pytest.raises(tensorio.FormatError):
                tensorio.load(whole)
            continue
        accepted += 1
        same(tensorio.load(whole), theirs)
    assert accepted > 5


@pytest.mark.parametrize("lazy", ["conj", "neg", "both"])
def test_torch_lazy_bits_read_as_the_values(lazy: str) -> None:
    z = torch.tensor([1 + 2j, -3 + 0.5j])
    obj = {"conj": z.conj(), "neg": z.conj().imag, "both": torch._neg_view(z.conj())}[lazy]
    theirs = torch.load(io.BytesIO(saved(obj)), weights_only=True)
    want = theirs.resolve_conj().resolve_neg().numpy()
    assert np.array_equal(tensorio.load(saved(obj)), want)
    with tensorio.open(saved(obj)) as checkpoint:
        assert np.array_equal(checkpoint[""], want)
