"""What we save as safetensors, beside what the reference (release 0.8.0) makes of the same tensors.

With no metadata or one key all bytes are equal; more keys have no order in the reference,
and are sorted in our output.
"""

from __future__ import annotations

import io
import itertools
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is an oracle")
safetensors = pytest.importorskip("safetensors", reason="safetensors is the oracle")
import safetensors.numpy  # noqa: E402, F811
import safetensors.torch  # noqa: E402

import cases  # noqa: E402
import tensorio  # noqa: E402
from _trees import ML_DTYPES, Trees, bits, torch_base  # noqa: E402
from tensorio.formats._items import items_of  # noqa: E402
from tensorio.plan import PIECE  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

Array = np.ndarray[Any, Any]

NUMPY_DTYPES = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32",
                "float64", "complex64"]  # fmt: skip
TORCH_DTYPES = [*NUMPY_DTYPES, *ML_DTYPES, "float4_e2m1fn_x2"]

CASES = 400  # seeded dictionaries for each front; about 0.3 ms each


def saved(tensors: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    tensorio.save(tensors, out, format="safetensors", **options)
    return out.getvalue()


def header_of(data: bytes) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return parsed


def values(tensors: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of NumPy or torch tensors, and of what ``safetensors.deserialize`` gives."""
    out = {}
    for name, t in tensors.items():
        if isinstance(t, torch.Tensor):
            out[name] = (str(t.dtype).removeprefix("torch."), tuple(t.shape), bits(t))
        else:
            out[name] = (t.dtype.name, t.shape, np.ascontiguousarray(t).tobytes())
    return out


def assert_reference_reads(data: bytes, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Rust's parser takes the file, and the bytes are those of the tensors in C order."""
    got = {name: (tuple(t["shape"]), bytes(t["data"])) for name, t in safetensors.deserialize(data)}
    want = {}
    for name, (dtype, shape, raw) in values(tensors).items():
        if dtype == "float4_e2m1fn_x2":
            shape = (*shape[:-1], 2 * shape[-1])
        want[name] = (shape, raw)
    assert got == want
    assert header_of(data).get("__metadata__") == (None if metadata is None else dict(metadata))


# ------------------------------------------------------------ byte-identical

NAMES = ["weight", "bias", "a.b.c", "", "0", "\u00e9", "\u65e5\u672c", "\U0001f600", 'quo"te', "back\\slash", "tab\t",
         "nl\n", "cr\r", "bs\b", "ff\f", "\x00", "\x1f", "\x7f", "a/b", "\u2028\u2029", "\ufeff", "\ufffd\uffff", " ",
         "x" * 300, "__metadata", "__metadata__.x", "dtype", "{}"]  # fmt: skip


def dictionary(rng: random.Random, make: Callable[[random.Random], Any]) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(len(NAMES) if rng.random() < 0.2 else 6))
    return {name: make(rng) for name in names}


def some_metadata(rng: random.Random) -> dict[str, str] | None:
    return rng.choice((None, {rng.choice(NAMES): rng.choice(NAMES)}, {"format": "pt"}))


def shape_of(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice((0, 1, 2, 3, 5)) for _ in range(rng.choice((0, 1, 1, 2, 3, 4))))


def numpy_array(rng: random.Random) -> Array:
    dtype = rng.choice(NUMPY_DTYPES + ML_DTYPES)
    return cases.array(dtype, shape_of(rng), rng.randrange(100))


def torch_tensor(rng: random.Random) -> Any:
    shape = shape_of(rng)
    dtype = rng.choice(TORCH_DTYPES)
    return torch_base(dtype, shape if shape or "x2" not in dtype else (2,), rng)


@pytest.mark.parametrize("first", range(0, CASES, 200))
def test_numpy_dictionaries_are_byte_identical(first: int) -> None:
    for seed in range(first, first + 200):
        rng = random.Random(seed)
        tensors, metadata = dictionary(rng, numpy_array), some_metadata(rng)
        ours = saved(tensors, metadata=metadata)
        assert ours == safetensors.numpy.save(tensors, metadata), (seed, tensors.keys())
        assert_reference_reads(ours, tensors, metadata)


@pytest.mark.parametrize("first", range(0, CASES, 200))
def test_torch_dictionaries_are_byte_identical(first: int) -> None:
    for seed in range(first, first + 200):
        rng = random.Random(seed)
        tensors, metadata = dictionary(rng, torch_tensor), some_metadata(rng)
        ours = saved(tensors, metadata=metadata)
        assert ours == safetensors.torch.save(tensors, metadata), (seed, tensors.keys())
        assert_reference_reads(ours, tensors, metadata)


@pytest.mark.parametrize("front", ["numpy", "torch"])
def test_files_are_byte_identical(front: str, tmp_path: Path) -> None:
    make = numpy_array if front == "numpy" else torch_tensor
    for seed in range(1000, 1030):
        rng = random.Random(seed)
        tensors, metadata = dictionary(rng, make), some_metadata(rng)
        getattr(safetensors, front).save_file(tensors, tmp_path / "theirs.safetensors", metadata)
        tensorio.save(tensors, tmp_path / "ours.safetensors", metadata=metadata, durable=False)
        assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes(), seed
        if front == "torch" or not any(a.dtype.name.startswith("float8") for a in tensors.values()):
            back = getattr(safetensors, front).load_file(tmp_path / "ours.safetensors")
            assert values(back) == values(tensors)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(text.filter(lambda n: n != "__metadata__"), st.sampled_from(NUMPY_DTYPES), max_size=6),
    st.none() | st.dictionaries(text, text, max_size=1),
)
def test_any_names_and_metadata_are_byte_identical(names: dict[str, str], metadata: dict[str, str] | None) -> None:
    tensors = {name: cases.array(dtype, (i % 3, 2), i) for i, (name, dtype) in enumerate(names.items())}
    if not tensors and metadata == {}:
        return  # see test_no_tensors_with_empty_metadata_is_valid
    assert saved(tensors, metadata=metadata) == safetensors.numpy.save(tensors, metadata)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_dtype_is_byte_identical(dtype: str) -> None:
    tensor = torch_base(dtype, (3, 4), random.Random(1))
    ours = saved({"x": tensor})
    assert ours == safetensors.torch.save({"x": tensor})
    if dtype not in ("float4_e2m1fn_x2", "float8_e8m0fnu"):
        assert values(safetensors.torch.load(ours)) == values({"x": tensor})


@pytest.mark.parametrize("dtype", NUMPY_DTYPES + ML_DTYPES)
def test_numpy_and_torch_make_the_same_file(dtype: str) -> None:
    array = cases.array(dtype, (3, 4))
    assert saved({"x": array}) == saved({"x": cases.as_torch(array)})


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 0), (2, 0, 3), (1,) * 20, (1 << 40, 0), (7, 1, 5)])
def test_shape_is_byte_identical(shape: tuple[int, ...]) -> None:
    tensors = {"x": np.zeros(shape, np.float32), "y": np.ones(2, np.uint8)}
    assert saved(tensors) == safetensors.numpy.save(tensors)


def test_order_is_by_dtype_then_by_name() -> None:
    tensors = {f"{name}.{i}": torch_base(name, (2, 2), random.Random(0)) for i in (2, 10, 1) for name in TORCH_DTYPES}
    ours = saved(tensors)
    assert ours == safetensors.torch.save(tensors)
    order = [(e["dtype"], name) for name, e in header_of(ours).items()]
    firsts = [d for i, (d, _) in enumerate(order) if i == 0 or order[i - 1][0] != d]
    assert firsts == ["U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E5M2FNUZ",
                      "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL"]  # fmt: skip
    assert all(a[1] < b[1] for a, b in itertools.pairwise(order) if a[0] == b[0])


def test_names_are_ordered_by_code_point_beyond_16_bits() -> None:
    tensors = {name: np.ones(1, "u1") for name in ("\uffff", "\U00010000", "\ue000", "z", "\u00e9")}
    assert saved(tensors) == safetensors.numpy.save(tensors)


@pytest.mark.parametrize("count", [1000, 10_000])
def test_many_tensors_are_byte_identical(count: int) -> None:
    rng = random.Random(0)
    tensors = {f"model.layers.{i}.weight": np.full((rng.randrange(5), 3), i, rng.choice(("f4", "f2", "i8")))
               for i in range(count)}  # fmt: skip
    assert saved(tensors) == safetensors.numpy.save(tensors)


@pytest.mark.parametrize("size", [1, 65535, 65536, 65537, 524287, 524288, 524289, 3_000_001])
def test_payload_of_any_size_is_byte_identical(size: int) -> None:
    raw = np.frombuffer(random.Random(size).randbytes(size), np.uint8)
    tensors = {"raw": raw, "before": np.ones(3, "f8"), "behind": np.ones(5, "?")}
    assert saved(tensors) == safetensors.numpy.save(tensors)


def test_header_of_any_length_is_padded_alike() -> None:
    for n in range(20):
        tensors = {"x" * n: np.ones(1, "u1")}
        assert saved(tensors) == safetensors.numpy.save(tensors)


def test_no_tensors_are_byte_identical() -> None:
    assert saved({}) == safetensors.numpy.save({}) == b"\x08" + bytes(7) + b"{}      "
    assert saved({}, metadata={"a": "b"}) == safetensors.numpy.save({}, {"a": "b"})
    assert tensorio.load(saved({})) == {}


def test_strict_accepts_what_we_write() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        data = saved(dictionary(rng, torch_tensor), metadata=some_metadata(rng))
        tensorio.load(data, strict=True)


# ------------------------------------------------------- order of metadata keys


def test_metadata_keys_are_sorted() -> None:
    metadata = {name: str(i) for i, name in enumerate(reversed(NAMES))}
    ours = saved({"x": np.ones(2, "f4")}, metadata=metadata)
    assert list(header_of(ours)["__metadata__"]) == sorted(metadata)
    assert ours == saved({"x": np.ones(2, "f4")}, metadata=dict(sorted(metadata.items())))
    assert_reference_reads(ours, {"x": np.ones(2, "f4")}, metadata)


def test_metadata_comes_back_from_the_reference(tmp_path: Path) -> None:
    metadata = {"format": "pt", "\u00e9": "\n", "": ""}
    tensorio.save({"x": np.ones(2)}, tmp_path / "x.safetensors", metadata=metadata, durable=False)
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as f:
        assert f.metadata() == metadata
    with tensorio.open(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.metadata == metadata


@pytest.mark.parametrize("metadata", [{"a": 1}, {"a": None}, {1: "a"}, {"a": ["b"]}])
def test_metadata_that_is_not_text_is_refused(metadata: Any) -> None:
    with pytest.raises(TypeError, match="str to str"):
        saved({"x": np.ones(1)}, metadata=metadata)


# ------------------------------------------------ our output is right for these

STRIDED: dict[str, Callable[[], Array]] = {
    "transposed": lambda: np.arange(6, dtype="f4").reshape(2, 3).T,
    "fortran": lambda: np.asfortranarray(np.arange(24, dtype="i4").reshape(2, 3, 4)),
    "reversed": lambda: np.arange(5, dtype="i8")[::-1],
    "every_second": lambda: np.arange(10, dtype="u2").reshape(5, 2)[::2],
    "broadcast": lambda: np.broadcast_to(np.arange(3, dtype="f8"), (4, 3)),
    "zero_stride_scalar": lambda: np.broadcast_to(np.float32(7), (2, 2)),
    "big_endian": lambda: np.arange(4, dtype=">f8"),
    "big_endian_transposed": lambda: np.arange(6, dtype=">i4").reshape(2, 3).T,
    "one_field": lambda: np.zeros(3, [("a", "u1"), ("b", "f4")])["b"],
    "bfloat16_columns": lambda: np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)[:, ::2],
    "larger_than_a_piece": lambda: np.arange(1 << 20, dtype="f4").reshape(1024, 1024).T,
    "one_long_row_reversed": lambda: np.arange(1 << 20, dtype="f4")[::-1],
    "single_wide_row": lambda: np.broadcast_to(np.arange(1 << 18, dtype="f4")[::-1], (2, 1 << 18)),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())
def test_array_in_any_layout_is_written_in_c_order(make: Callable[[], Array]) -> None:
    array = make()
    data = saved({"x": array, "y": np.ones(1, "f4")})
    back = safetensors.numpy.load(data) if array.dtype.name != "bfloat16" else tensorio.load(data)
    assert np.array_equal(back["x"], array)
    assert back["x"].shape == array.shape
    assert back["y"] == 1
    native = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("=")))
    assert data == safetensors.numpy.save({"x": native.reshape(array.shape), "y": np.ones(1, "f4")})


TORCH_STRIDED: dict[str, Callable[[], Any]] = {
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "slice_of_a_base": lambda: torch.arange(60.0).reshape(6, 10)[2:4, 1:3],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "conjugate": lambda: torch.tensor([1 + 2j, -3j]).conj(),
    "conjugate_contiguous": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "imaginary": lambda: torch.randn(4, dtype=torch.complex64).imag,
    "conjugate_transposed": lambda: torch.randn(3, 4, dtype=torch.complex64).mH,
    "negative_contiguous": lambda: torch._neg_view(torch.arange(3.0)),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 2)),
    "asks_for_gradients": lambda: torch.ones(2, requires_grad=True) * 2,
    "channels_last": lambda: torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "float8_transposed": lambda: torch_base("float8_e4m3fn", (3, 4), random.Random(0)).t(),
    "float4_rows": lambda: torch_base("float4_e2m1fn_x2", (4, 6), random.Random(0))[::2],
}


@pytest.mark.parametrize("make", TORCH_STRIDED.values(), ids=TORCH_STRIDED.keys())
def test_torch_tensor_of_any_kind_is_written_as_its_values(make: Callable[[], Any]) -> None:
    tensor = make()
    data = saved({"x": tensor})
    assert_reference_reads(data, {"x": tensor})
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    assert data == safetensors.torch.save({"x": plain})


@pytest.mark.parametrize("metadata", [None, {}, {"k": "v"}])
def test_no_tensors_with_empty_metadata_is_valid(metadata: dict[str, str] | None) -> None:
    data = saved({}, metadata=metadata)
    assert_reference_reads(data, {}, metadata)
    with tensorio.open(data, strict=True) as checkpoint:
        assert len(checkpoint) == 0
        assert checkpoint.metadata == (metadata or {})


def test_empty_metadata_with_tensors_is_byte_identical() -> None:
    tensors = {"x": np.ones(3, "f4")}
    assert saved(tensors, metadata={}) == safetensors.numpy.save(tensors, {})


def test_tensor_called_metadata_is_refused() -> None:
    with pytest.raises(tensorio.TensorMismatchError, match="__metadata__"):
        saved({"__metadata__": np.ones(3), "x": np.ones(1)})


def test_tensors_that_share_memory_are_each_written() -> None:
    base = torch.arange(12.0)
    tensors = {"a": base, "b": base, "c": base[2:5], "d": base.view(3, 4).t()}
    assert_reference_reads(saved(tensors), tensors)
    arrays = {"a": base.numpy(), "b": base.numpy(), "c": base.numpy()[2:5]}
    assert_reference_reads(saved(arrays), arrays)


def test_float4_shape_counts_numbers(tmp_path: Path) -> None:
    tensor = torch_base("float4_e2m1fn_x2", (3, 5), random.Random(0))
    data = saved({"x": tensor})
    assert header_of(data)["x"] == {"dtype": "F4", "shape": [3, 10], "data_offsets": [0, 15]}
    (tmp_path / "x.safetensors").write_bytes(data)
    assert values(safetensors.torch.load_file(tmp_path / "x.safetensors")) == values({"x": tensor})
    with pytest.raises(tensorio.UnsupportedError):
        saved({"x": torch_base("float4_e2m1fn_x2", (), random.Random(0))})


def test_nested_mappings_are_flattened_by_dots() -> None:
    nested = {
        "a": {"b": np.ones(2, "f4"), "c": [np.zeros(1, "f4"), np.ones(3, "i4")]},
        5: np.ones(1),
        "t": (np.ones(4),),
    }
    flat = {"a.b": nested["a"]["b"], "a.c.0": nested["a"]["c"][0], "a.c.1": nested["a"]["c"][1], "5": nested[5],
            "t.0": nested["t"][0]}  # fmt: skip
    assert saved(nested) == saved(flat) == safetensors.numpy.save(flat)


def test_ordered_dict_and_input_order_make_no_difference() -> None:
    tensors = {f"t{i}": np.full(2, i, "f4") for i in range(10)}
    assert saved(OrderedDict(reversed(tensors.items()))) == saved(tensors) == safetensors.numpy.save(tensors)


@pytest.mark.parametrize(
    "bad, kind, words",
    [
        ({"x": 1}, tensorio.TensorMismatchError, "x"),
        ({"x": np.ones(1), "note": "text"}, tensorio.TensorMismatchError, "note"),
        ({"a": {"b": np.ones(1)}, "a.b": np.ones(1)}, tensorio.TensorMismatchError, "a.b"),
        ([np.ones(1)], tensorio.TensorMismatchError, "list"),
        (np.ones(1), tensorio.TensorMismatchError, "mapping"),
        ({"x": np.ones(1, "c16")}, tensorio.UnsupportedError, "complex128"),
        ({"x": np.array(["a"])}, tensorio.UnsupportedError, "dtype"),
        ({"x": np.array([None])}, tensorio.UnsupportedError, "dtype"),
        ({"x": torch.ones(2, dtype=torch.complex128)}, tensorio.UnsupportedError, "complex128"),
        ({"x": torch.empty(2, device="meta")}, tensorio.UnsupportedError, "meta"),
        ({"x": torch.eye(2).to_sparse()}, tensorio.UnsupportedError, "sparse"),
        ({"x": torch.empty(2, dtype=torch.bits8)}, tensorio.UnsupportedError, "bits8"),
        ({"x": torch.arange(4, dtype=torch.uint8).view(torch.int4)}, tensorio.UnsupportedError, "int4"),
    ],
    ids=["int", "text", "two_names", "list", "array", "complex128", "strings", "objects", "torch_complex128", "meta",
         "sparse", "bits8", "int4"],
)  # fmt: skip
def test_what_the_format_cannot_hold_is_refused(bad: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        saved(bad)


def test_name_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises((tensorio.TensorMismatchError, ValueError), match=r"surrogate|UTF-8|utf-8"):
        saved({"\ud800": np.ones(1)})
    with pytest.raises((tensorio.TensorMismatchError, ValueError), match=r"surrogate|UTF-8|utf-8"):
        saved({"x": np.ones(1)}, metadata={"k": "\udfff"})


def test_mapping_in_itself_is_refused() -> None:
    loop: dict[str, Any] = {"x": np.ones(1)}
    loop["again"] = loop
    with pytest.raises(tensorio.TensorMismatchError, match="itself"):
        saved(loop)


@pytest.mark.parametrize("left", [0, 8])
@pytest.mark.parametrize("start", [0, 5])
def test_tensor_larger_than_its_storage_is_refused(left: int, start: int, in_child: Any) -> None:
    """What sharding libraries leave behind: a shape over a storage whose bytes were given back."""
    whole = torch.ones(1 << 20)
    tensor = whole[start:]
    whole.untyped_storage().resize_(left)
    with pytest.raises(tensorio.TensorIOError):
        in_child(saved, {"x": tensor})


# ------------------------------------------------------------------ alignment


@pytest.mark.parametrize("align", [8, 16, 64, 128, 256, 4096, 65536, 1 << 20])
def test_alignment_moves_the_payload_only(align: int, tmp_path: Path) -> None:
    tensors = {"a": np.arange(5.0), "b": np.arange(3, dtype="u1")}
    data = saved(tensors, align=align)
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % align == 0
    assert start - len(json.dumps(header_of(data), separators=(",", ":"))) - 8 < max(align, 8)
    assert_reference_reads(data, tensors)
    assert header_of(data) == header_of(saved(tensors))
    (tmp_path / "x.safetensors").write_bytes(data)
    assert values(safetensors.numpy.load_file(tmp_path / "x.safetensors")) == values(tensors)
    assert values(tensorio.load(data)) == values(tensors)


@pytest.mark.parametrize("align", [1, 2, 4, 8, None])
def test_small_alignment_is_the_references(align: int | None) -> None:
    tensors = {"a": np.arange(5.0)}
    assert saved(tensors, align=align) == safetensors.numpy.save(tensors)


@pytest.mark.parametrize("align", [0, -8, 3, 12, 7])
def test_alignment_that_is_none_is_refused(align: int) -> None:
    with pytest.raises(ValueError, match="align"):
        saved({"a": np.ones(1)}, align=align)


# --------------------------------------------------------------------- limits

LIMIT = 100_000_000  # bytes of header that readers take


def entry(name: int) -> int:
    """Bytes of a header with one empty tensor with a name of so many letters."""
    return len('{"":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}') + name


def test_header_at_the_limit_is_written_and_beyond_it_refused(tmp_path: Path) -> None:
    room = LIMIT - entry(0)
    tensorio.save({"x" * room: np.zeros(0, "u1")}, tmp_path / "full.safetensors", durable=False)
    with (tmp_path / "full.safetensors").open("rb") as f:
        assert int.from_bytes(f.read(8), "little") == LIMIT
    with safetensors.safe_open(tmp_path / "full.safetensors", "np") as theirs:
        assert len(next(iter(theirs.keys()))) == room
    for beyond in (1, 8):
        with pytest.raises(tensorio.LimitError, match=r"100,?000,?000|header"):
            tensorio.save({"x" * (room + beyond): np.zeros(0, "u1")}, tmp_path / "over.safetensors", durable=False)
    with pytest.raises(tensorio.TensorIOError):
        tensorio.save({"x": np.ones(1)}, tmp_path / "over.safetensors", align=LIMIT * 2, durable=False)
    assert [p.name for p in tmp_path.iterdir()] == ["full.safetensors"]
    (tmp_path / "full.safetensors").unlink()


# ------------------------------------------------------------- every front reads


def test_flat_part_of_any_tree_is_read_by_the_reference() -> None:
    """Trees as for torch files, of which the tensors are kept: names nested, layouts odd."""
    codes = {*NUMPY_DTYPES, *ML_DTYPES}
    for seed in range(200):
        maker = Trees(seed, "numpy")
        tensors = {f"{i}.{name}": a for i, (name, a) in enumerate((n, maker.array()) for n in NAMES[:8])
                   if a.dtype.name in codes}  # fmt: skip
        assert_reference_reads(saved(tensors), tensors)


def _strided() -> dict[str, Any]:
    large = torch.arange(3 << 20, dtype=torch.int64)
    return {
        "transposed": large.reshape(2048, -1).T,
        "one row": large.reshape(1, 2, -1).transpose(1, 2),
        "every other": large[::2],
        "bfloat16": torch.randn(3, 50).bfloat16().T,
        "bool": (torch.randn(7, 5) > 0)[:, ::2],
        "conjugate": torch.randn(40, 3, dtype=torch.complex64).conj(),
        "expanded": torch.randn(1, 3).expand(500, 3),
        "parameter": torch.nn.Parameter(torch.randn(4, 6).T),
        "float8": torch.randn(6, 4).to(torch.float8_e4m3fn).T,
    }


def test_strided_torch_tensors_are_as_the_reference_writes_them_whole(tmp_path: Path) -> None:
    tensors = _strided()
    plain = {name: t.detach().resolve_conj().contiguous() for name, t in tensors.items()}
    safetensors.torch.save_file(plain, tmp_path / "want.safetensors")
    tensorio.save(tensors, tmp_path / "found.safetensors")
    tensorio.save_async(tensors, tmp_path / "async.safetensors").result()
    want = (tmp_path / "want.safetensors").read_bytes()
    assert (tmp_path / "found.safetensors").read_bytes() == want
    assert (tmp_path / "async.safetensors").read_bytes() == want


def test_no_copy_of_a_whole_strided_torch_tensor_is_made() -> None:
    items = items_of(_strided())
    assert len(items.payloads.makers) == len(items.names)
    for i, maker in items.payloads.makers.items():
        sizes = [len(memoryview(piece).cast("B")) for piece in maker()]
        assert sum(sizes) == items.payloads.sizes[i]
        assert max(sizes) <= PIECE
