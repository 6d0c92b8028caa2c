"""Tensors in pickles: every argument's rule, and the same answer however the pickle is spelled.

The machine takes what ``torch.save`` writes by a fast path and everything else opcode by
opcode; a spelling may change the time, never the tensors or the verdict.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from hexfile import HOOKS, name, number, numbers, pickled, storage, tensor, text
from tensorio import HeaderError, LimitError, UnsupportedError
from tensorio.tensors import CONJ, NEG, PARAMETER, REQUIRES_GRAD

RAW = {"0": np.arange(4, dtype="f4").tobytes()}
V2 = name("torch._utils", "_rebuild_tensor_v2")
V3 = name("torch._utils", "_rebuild_tensor_v3")
S = storage("FloatStorage", "0", 4)
U = storage("UntypedStorage", "0", 16, module="torch.storage")


def read(body: bytes, storages: dict[str, bytes] = RAW, **options: Any) -> Any:
    return tensorio.load(hexfile.torch_file(pickled(body, 4), storages), **options)


def args(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"tR"


def v2(first: bytes = S, offset: bytes = b"K\x00", size: bytes = b"K\x04\x85", stride: bytes = b"K\x01\x85",
       grad: bytes = b"\x89", hooks: bytes = HOOKS, more: bytes = b"") -> bytes:  # fmt: skip
    return V2 + args(first, offset, size, stride, grad, hooks, more)


def v3(
    first: bytes = U, dtype: bytes = name("torch", "uint16"), size: int = 4, stride: int = 1, more: bytes = b""
) -> bytes:
    return V3 + args(first, b"K\x00", number(size) + b"\x85", number(stride) + b"\x85", b"\x89", HOOKS, dtype, more)


# ------------------------------------------------------------------ good ones


def test_tensor_by_hand_reads() -> None:
    assert read(v2()).tolist() == [0, 1, 2, 3]


def test_tensor_of_the_first_rebuild_function_reads() -> None:
    body = name("torch._utils", "_rebuild_tensor") + args(S, b"K\x01", b"K\x02\x85", b"K\x02\x85")
    assert read(body).tolist() == [1, 3]


@pytest.mark.parametrize("hooks", [HOOKS, b"N"], ids=["dict", "none"])
def test_tensor_hooks_may_be_absent_as_in_old_files(hooks: bytes) -> None:
    assert read(v2(hooks=hooks)).tolist() == [0, 1, 2, 3]


def test_tensor_sizes_may_be_a_list_or_a_torch_size() -> None:
    as_size = name("torch", "Size") + b"K\x02K\x02\x86\x85R"
    for size in (b"](K\x02K\x02e", as_size):
        assert read(v2(size=size, stride=b"K\x02K\x01\x86")).tolist() == [[0, 1], [2, 3]]


def test_tensor_storage_words_may_be_bytes_as_in_python2() -> None:
    pid = b"(C\x07storage" + name("torch", "FloatStorage") + b"C\x010C\x03cpuK\x04tQ"
    assert read(v2(first=pid)).tolist() == [0, 1, 2, 3]


def test_tensor_location_is_only_a_tag() -> None:
    assert read(v2(first=storage("FloatStorage", "0", 4, "cuda:7"))).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("cls", cases.TORCH_STORAGES)
@pytest.mark.parametrize("module", ["torch", "torch.cuda"])
def test_tensor_of_every_storage_class(cls: str, module: str) -> None:
    want = cases.array(cases.TORCH_STORAGES[cls], (6,))
    got = read(v2(first=storage(cls, "0", 6, module=module), size=b"K\x06\x85"), {"0": want.tobytes()})
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", [*cases.DTYPES, "complex32", "float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4",
                                   "bits4x2", "bits16"])  # fmt: skip
def test_tensor_over_an_untyped_storage_of_every_dtype(dtype: str) -> None:
    data = hexfile.torch_file(pickled(v3(dtype=name("torch", dtype), size=1)), RAW)
    with tensorio.open(data) as checkpoint:
        info = checkpoint.infos[""]
        assert (info.dtype, info.shape) == (dtype, (1,))
        assert checkpoint[""].tobytes() == RAW["0"][: checkpoint[""].itemsize]


VIEWS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], list[Any]]] = {
    "last": (3, (1,), (1,), [3]),
    "scalar": (2, (), (), 2),  # type: ignore[dict-item]
    "expanded": (1, (2, 3), (0, 0), [[1, 1, 1], [1, 1, 1]]),
    "transposed": (0, (2, 2), (1, 2), [[0, 2], [1, 3]]),
    "overlapping": (0, (3, 2), (1, 1), [[0, 1], [1, 2], [2, 3]]),
    "length_one_with_any_stride": (0, (1, 4), (1 << 40, 1), [[0, 1, 2, 3]]),
    "empty": (0, (0,), (1,), []),
    "empty_with_any_offset": (1 << 50, (0, 3), (3, 1), []),
    "empty_with_any_strides": (0, (3, 0), (1 << 62, 1 << 62), [[], [], []]),
}


@pytest.mark.parametrize(("offset", "size", "stride", "want"), VIEWS.values(), ids=VIEWS.keys())
def test_tensor_view_inside_its_storage_reads(offset: int, size: Any, stride: Any, want: Any) -> None:
    body = v2(offset=number(offset), size=numbers(size), stride=numbers(stride))
    assert read(body).tolist() == want
    assert read(body, mmap=False).shape == size


def test_tensor_flags_say_what_was_saved() -> None:
    meta = b"}(" + text("conj") + b"\x88" + text("neg") + b"\x89" + text("note") + b"Nu"
    bodies = {
        "plain": v2(),
        "grad": v2(grad=b"\x88"),
        "meta": v2(first=storage("ComplexFloatStorage", "0", 2), size=b"K\x02\x85", more=meta),
        "parameter": name("torch._utils", "_rebuild_parameter") + args(v2(first=b"h\x01"), b"\x88", HOOKS),
    }
    bodies["parameter"] = name("torch._utils", "_rebuild_parameter") + args(v2(), b"\x88", HOOKS)
    flags = {}
    for key, body in bodies.items():
        with tensorio.open(hexfile.torch_file(pickled(body), RAW)) as checkpoint:
            flags[key] = checkpoint.infos[""].flags
    assert flags == {"plain": 0, "grad": REQUIRES_GRAD, "meta": CONJ, "parameter": PARAMETER | REQUIRES_GRAD}
    assert NEG not in flags.values()


# ---------------------------------------------------------------- damaged ones

MANY = b"(" + b"K\x01" * 65 + b"t"
BAD: dict[str, tuple[bytes, type[Exception], str]] = {
    "five_arguments": (V2 + args(S, b"K\x00", b")", b")", b"\x89"), HeaderError, "expected 6 arguments"),
    "eight_arguments": (v2(more=b"}}"), HeaderError, "expected 6 arguments"),
    "no_storage": (v2(first=b"N"), HeaderError, "expected a storage"),
    "storage_class_for_storage": (v2(first=name("torch", "FloatStorage")), HeaderError, "expected a storage"),
    "offset_text": (v2(offset=text("0")), HeaderError, "expected an int"),
    "offset_bool": (v2(offset=b"\x88"), HeaderError, "expected an int"),
    "offset_float": (v2(offset=b"G" + bytes(8)), HeaderError, "expected an int"),
    "offset_negative": (v2(offset=number(-1)), HeaderError, "negative"),
    "offset_behind_the_end": (v2(offset=number(1)), HeaderError, "leaves its storage"),
    "offset_of_2_62": (v2(offset=number(1 << 62)), HeaderError, "leaves its storage"),
    "offset_of_2_64": (v2(offset=number(1 << 64)), HeaderError, "over 2^63"),
    "size_too_large": (v2(size=b"K\x05\x85"), HeaderError, "leaves its storage"),
    "size_negative": (v2(size=numbers([-4])), HeaderError, "negative"),
    "size_text": (v2(size=text("4")), HeaderError, "tuples of int"),
    "size_int": (v2(size=b"K\x04"), HeaderError, "tuples of int"),
    "size_float": (v2(size=b"G" + bytes(8) + b"\x85"), HeaderError, "expected an int"),
    "size_bool": (v2(size=b"\x88\x85"), HeaderError, "expected an int"),
    "size_none": (v2(size=b"N\x85"), HeaderError, "expected an int"),
    "size_wraps": (v2(size=numbers([1 << 62, 16]), stride=numbers([0, 1])), HeaderError, "leaves its storage"),
    "size_and_stride_wrap": (
        v2(size=numbers([1 << 32]), stride=numbers([1 << 32])),
        HeaderError,
        "overflow|leaves|stride",
    ),
    "size_of_2_63": (v2(size=numbers([1 << 63])), HeaderError, "over 2^63"),
    "stride_too_large": (v2(stride=b"K\x02\x85"), HeaderError, "leaves its storage"),
    "stride_negative": (v2(stride=numbers([-1])), HeaderError, "negative"),
    "stride_of_2_62": (v2(stride=numbers([1 << 62])), HeaderError, "stride"),
    "ranks_differ": (v2(stride=b"K\x01K\x01\x86"), HeaderError, "1 dimensions and stride 2"),
    "rank_65": (v2(size=MANY, stride=MANY), LimitError, "65 dimensions"),
    "grad_int": (v2(grad=b"K\x01"), HeaderError, "bool as requires_grad"),
    "hooks_dict": (v2(hooks=b"}"), HeaderError, "OrderedDict of hooks"),
    "metadata_list": (v2(more=b"]"), HeaderError, "dict of tensor metadata"),
    "conj_int": (v2(more=b"}" + text("conj") + b"K\x01s"), HeaderError, "bool as conj"),
    "numel_too_small": (v2(first=storage("FloatStorage", "0", 3)), HeaderError, "found a record of 16 bytes"),
    "numel_too_large": (v2(first=storage("FloatStorage", "0", 5)), HeaderError, "found a record of 16 bytes"),
    "numel_negative": (v2(first=storage("FloatStorage", "0", -4)), HeaderError, "negative"),
    "numel_wraps": (v2(first=storage("FloatStorage", "0", (1 << 62) + 4)), HeaderError, "found a record of 16 bytes"),
    "numel_of_2_64": (v2(first=storage("FloatStorage", "0", (1 << 64) + 4)), HeaderError, "over 2^63"),
    "wider_class": (v2(first=storage("DoubleStorage", "0", 4)), HeaderError, "found a record of 16 bytes"),
    "no_such_record": (v2(first=storage("FloatStorage", "7", 4)), HeaderError, "'7' has no record"),
    "key_with_a_zero": (v2(first=storage("FloatStorage", "00", 4)), HeaderError, "'00' has no record"),
    "key_with_a_nul": (v2(first=storage("FloatStorage", "0\0", 4)), HeaderError, "has no record"),
    "key_with_a_space": (v2(first=storage("FloatStorage", " 0", 4)), HeaderError, "has no record"),
    "key_up": (v2(first=storage("FloatStorage", "../data/0", 4)), HeaderError, "has no record"),
    "key_of_2_64": (v2(first=storage("FloatStorage", str(1 << 64), 4)), HeaderError, "has no record"),
    "key_other_digits": (v2(first=storage("FloatStorage", "\u0660", 4)), HeaderError, "has no record"),
    "key_int": (
        v2(first=b"(" + text("storage") + name("torch", "FloatStorage") + b"K\x00" + text("cpu") + b"K\x04tQ"),
        HeaderError,
        "storage key",
    ),
    "pid_of_four": (
        v2(first=b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + b"tQ"),
        HeaderError,
        "5 parts",
    ),
    "pid_of_six": (v2(first=S[:-2] + b"NtQ"), HeaderError, "5 parts"),
    "pid_text": (v2(first=text("0") + b"Q"), HeaderError, "no such tensor"),
    "pid_module": (v2(first=S.replace(b"storage", b"modules", 1)), HeaderError, "expected a persistent id"),
    "pid_of_a_number": (b"K\x05\x85Q", HeaderError, "found a tuple that begins with int"),
    "pid_of_nothing": (b")Q", HeaderError, "found tuple"),
    "pid_class_is_a_dtype": (v2(first=S.replace(b"FloatStorage", b"float32", 1)), HeaderError, "storage class"),
    "v2_of_an_untyped_storage": (v2(first=U), HeaderError, "untyped storage needs a dtype"),
    "v3_of_a_typed_storage": (v3(first=S), HeaderError, "expected an untyped storage"),
    "v3_without_dtype": (v3(dtype=b"N"), HeaderError, "expected a dtype"),
    "v3_with_a_storage_class": (v3(dtype=name("torch", "FloatStorage")), HeaderError, "expected a dtype"),
    "v3_leaves_its_bytes": (v3(size=9), HeaderError, "leaves its storage"),
    "parameter_of_a_list": (
        name("torch._utils", "_rebuild_parameter") + args(b"]", b"\x89", HOOKS),
        HeaderError,
        "a tensor",
    ),
    "parameter_of_two": (name("torch._utils", "_rebuild_parameter") + args(v2(), b"\x89"), HeaderError, "3 arguments"),
    "parameter_grad_none": (name("torch._utils", "_rebuild_parameter") + args(v2(), b"N", HOOKS), HeaderError, "bool"),
    "storage_as_two_types": (
        b"(" + v2() + v2(first=storage("IntStorage", "0", 4)) + b"t",
        HeaderError,
        "mentioned twice",
    ),
    "storage_as_two_sizes": (
        b"(" + v2() + v2(first=storage("FloatStorage", "0", 5)) + b"t",
        HeaderError,
        "mentioned twice",
    ),
    "tensor_as_a_key": (b"}" + v2() + b"Ns", HeaderError, "key of a plain type"),
    "tensor_built_upon": (v2() + b"}b", HeaderError, "state of a Variable"),
    "empty_tensor_filled_with_a_state": (
        v2(first=storage("CharStorage", "0", 16), size=b"K\x00\x85")
        + b"(K\x01K\x01\x85"
        + name("numpy", "dtype")
        + args(text("u1"), b"\x89", b"\x88")
        + b"\x89C\x01atb",
        HeaderError,
        "state",
    ),
}


@pytest.mark.parametrize("more", [b"", b"K\x03\x85"], ids=["two", "three"])
def test_calls_of_sparse_classes_are_not_supported(more: bytes) -> None:
    for unknown in ("error", "opaque"):
        with pytest.raises(UnsupportedError, match=r"torch\.sparse\.FloatTensor called with indices and values"):
            read(name("torch.sparse", "FloatTensor") + args(v2(), v2(), *([more] if more else [])), unknown=unknown)
    with pytest.raises(HeaderError, match="what is no tensor"):
        read(name("torch.sparse", "FloatTensor") + args(b"K\x05", v2()))


@pytest.mark.parametrize(("body", "kind", "words"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("door", ["open", "load"])
def test_tensor_that_does_not_fit_is_refused(body: bytes, kind: type[Exception], words: str, door: str) -> None:
    data = hexfile.torch_file(pickled(body, 4), RAW)
    with pytest.raises(kind, match=words.replace("^", r"\^").replace("'", "'")) as caught:
        getattr(tensorio, door)(data)
    assert caught.value.offset is not None  # type: ignore[attr-defined]
    assert caught.value.record == "archive/data.pkl"  # type: ignore[attr-defined]


@pytest.mark.parametrize("body", [b[0] for key, b in BAD.items() if key != "pid_module"])
def test_tensor_that_does_not_fit_is_refused_as_opaque_data_too(body: bytes) -> None:
    with pytest.raises((HeaderError, LimitError)):
        read(body, unknown="opaque")


def test_tensor_on_conjugated_reals_reads_the_reals() -> None:
    """NumPy's conjugate of a real number is itself; torch never writes the bit there."""
    meta = b"}" + text("conj") + b"\x88s"
    assert read(v2(more=meta)).tolist() == [0, 1, 2, 3]


# ---------------------------------------------------------------- two spellings

SPELLINGS: dict[str, dict[str, Any]] = {
    "long_memo": {"memo": "long"},
    "memoize": {"memo": "memoize"},
    "protocol_4": {"words": "short"},
    "protocol_4_memoize": {"words": "short", "memo": "memoize"},
    "padded": {"padded": True},
    "padded_protocol_4": {"padded": True, "words": "short", "memo": "long"},
}


def torch_objects() -> dict[str, Callable[[], Any]]:
    import torch

    def shared() -> Any:
        base = torch.arange(24.0)
        w = base[:12].reshape(3, 4)
        return {"base": base, "w": w, "again": w, "t": w.t(), "tail": base[20:], "row": w[1, ::2]}

    def tied() -> Any:
        a = torch.ones(2, 2)
        return [a, {"a": a, "copy": a.clone()}, (a,)]

    def kinds() -> Any:
        return {str(d): torch.zeros(3, dtype=d) for d in (torch.float64, torch.bool, torch.bfloat16, torch.uint16,
                                                          torch.float8_e5m2, torch.complex64)}  # fmt: skip

    def shapes() -> Any:
        return [
            torch.zeros(s) for s in ((), (0,), (1,), (2, 3), (1, 2, 3), (1, 2, 3, 4), (1,) * 20, (300, 300), (70000,))
        ]

    def parameters() -> Any:
        return torch.nn.Linear(3, 2).state_dict() | {
            "p": torch.nn.Parameter(torch.ones(2)),
            "g": torch.ones(1).requires_grad_(),
        }

    def values() -> Any:
        return {"n": 5, "x": 1.5, "big": 1 << 70, "t": torch.arange(3), "s": "x" * 300, "none": None, 3: torch.ones(1)}

    def many() -> Any:
        return {f"layer.{i}": torch.full((2,), float(i)) for i in range(700)}

    return {"shared": shared, "tied": tied, "kinds": kinds, "shapes": shapes, "parameters": parameters,
            "values": values, "many": many}  # fmt: skip


def parts_of(data: bytes) -> tuple[bytes, dict[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {n.partition("/")[2]: archive.read(n) for n in archive.namelist()}
    return records["data.pkl"], {k[5:]: v for k, v in records.items() if k.startswith("data/")}


def picture(data: bytes) -> Any:
    """Everything a user can see of a file: infos, values, the tree's shape."""
    with tensorio.open(data) as checkpoint:
        infos = {
            n: (i.dtype, i.shape, i.flags, i.chunks[0].strides, i.chunks[0].extent.nbytes)
            for n, i in checkpoint.infos.items()
        }
        starts = [(i.chunks[0].extent.storage, i.chunks[0].extent.offset) for i in checkpoint.infos.values()]
        same = [starts.index(s) for s in starts]
        opened = {n: (a.dtype, a.shape, a.strides, a.tobytes()) for n, a in checkpoint.items()}
        paths = dict(checkpoint.paths)
    return infos, same, opened, paths, skeleton(tensorio.load(data))


def skeleton(tree: Any) -> Any:
    if isinstance(tree, np.ndarray):
        return tree.dtype, tree.shape, tree.strides, tree.tobytes()
    if isinstance(tree, dict):
        return (
            type(tree),
            [(k, skeleton(v)) for k, v in tree.items()],
            vars(tree) if hasattr(tree, "__dict__") else None,
        )
    if isinstance(tree, list | tuple):
        return type(tree), [skeleton(v) for v in tree]
    return tree


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("which", ["shared", "tied", "kinds", "shapes", "parameters", "values", "many"])
def test_tensors_are_the_same_in_every_spelling(which: str, spelling: str) -> None:
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save(torch_objects()[which](), buffer)
    pickle, storages = parts_of(buffer.getvalue())
    other = hexfile.respelled(pickle, **SPELLINGS[spelling])
    assert other != pickle
    assert picture(hexfile.torch_file(other, storages)) == picture(hexfile.torch_file(pickle, storages))


def test_tensors_are_the_same_whichever_memo_slot_is_asked_for_again() -> None:
    """The fast path makes nothing of its arguments; a pickle that asks for one gets it all the same."""
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save([torch.arange(6.0).reshape(2, 3), torch.ones(2)], buffer)
    pickle, storages = parts_of(buffer.getvalue())
    slots = [int(arg or 0) for op, arg, _ in pickletools.genops(pickle) if op.name == "BINPUT"]
    assert len(slots) > 15
    for slot in slots:
        again = pickle[:-1] + b"h" + bytes([slot]) + b"\x86."
        plain = hexfile.respelled(again, padded=True)
        fast, slow = (outcome(hexfile.torch_file(p, storages)) for p in (again, plain))
        assert fast == slow, f"memo slot {slot}"


def outcome(data: bytes) -> Any:
    try:
        return repr(tensorio.load(data)).partition(" object at ")[0]
    except tensorio.TensorIOError as error:
        return type(error), error.message


NUMBERS = [0, 1, 2, 3, 5, 120]  # all of them memo slots that a pickle of this length may have


def test_tensors_with_any_number_changed_have_one_verdict_in_both_spellings() -> None:
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save([torch.arange(6.0).reshape(2, 3), torch.arange(3)], buffer)
    pickle, storages = parts_of(buffer.getvalue())
    checked = 0
    for op, arg, at in pickletools.genops(pickle):
        if op.name not in ("BININT1", "BINPUT", "BINGET"):
            continue
        for value in NUMBERS:
            if value == arg:
                continue
            changed = pickle[: at + 1] + bytes([value]) + pickle[at + 2 :]  # type: ignore[operator]
            fast, slow = (
                verdict(hexfile.torch_file(p, storages)) for p in (changed, hexfile.respelled(changed, padded=True))
            )
            assert fast == slow, f"{op.name} at {at}: {arg} -> {value}"
            checked += 1
    assert checked > 150


def verdict(data: bytes) -> Any:
    try:
        tree = tensorio.load(data)
    except tensorio.TensorIOError as error:
        return type(error)
    return repr(tree).partition(" object at ")[0]


# ---------------------------------------------------------------------- sharing


def test_tensors_of_one_storage_share_its_bytes() -> None:
    body = b"(" + v2() + v2(offset=b"K\x01", size=b"K\x02\x85") + b"t"
    a, b = tensorio.load(hexfile.torch_file(pickled(body), RAW), writable=True)
    b[0] = 9
    assert a.tolist() == [0, 9, 2, 3]


def test_tensors_of_a_deflated_storage_share_its_bytes() -> None:
    records = hexfile.torch_records(pickled(b"(" + v2() + v2(offset=b"K\x01", size=b"K\x02\x85") + b"t"), RAW)
    records[4].method = 8
    data = hexfile.zip_file(records)
    for tree in (tensorio.load(data, writable=True), tensorio.open(data, writable=True).tree()):
        a, b = tree
        b[0] = 9
        assert a.tolist() == [0, 9, 2, 3]


def test_tensors_of_a_foreign_storage_share_its_bytes() -> None:
    """One storage seen as float32 stays one storage when its bytes are swapped."""
    raw = {"0": np.arange(4, dtype=">f4").tobytes()}
    body = b"(" + v2() + v2(offset=b"K\x01", size=b"K\x02\x85") + b"t"
    a, b = tensorio.load(hexfile.torch_file(pickled(body), raw, byteorder="big"), writable=True)
    b[0] = 9
    assert a.tolist() == [0, 9, 2, 3]


def test_tensor_saved_under_two_names_is_one_array() -> None:
    body = pickled(b"]q\x07(" + tensor() + b"q\x08h\x08e")
    a, b = tensorio.load(hexfile.torch_file(body, RAW))
    assert a is b


ARRAY = (hexfile.name("numpy._core.multiarray", "_reconstruct") + hexfile.name("numpy", "ndarray")
         + b"K\x00\x85C\x01b\x87R")  # fmt: skip


@pytest.mark.parametrize("body", [
    hexfile.name("torch._utils", "_rebuild_parameter") + b"(" + ARRAY + b"\x88" + hexfile.HOOKS + b"tR",
    hexfile.name("torch.nn.parameter", "Parameter") + ARRAY + b"\x85R",
    hexfile.name("torch.cuda", "DoubleTensor") + ARRAY + b"\x85\x81",
], ids=["rebuild_parameter", "Parameter", "DoubleTensor"])  # fmt: skip
def test_array_in_a_tensor_s_place_is_judged_alike_by_open_and_load(body: bytes) -> None:
    data = hexfile.torch_file(pickled(body, 4), RAW)
    verdicts = []
    for act in (tensorio.open, tensorio.load):
        try:
            act(data)
            verdicts.append("read")
        except tensorio.TensorIOError as error:
            verdicts.append(type(error).__name__)
    assert verdicts[0] == verdicts[1]
