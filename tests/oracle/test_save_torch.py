"""What we save as a torch file, beside what ``torch.save`` makes of the same object.

All bytes are equal but those of the serialization id (40 digits, and the CRC over them in two
places): torch's own hashes names in the order of a C++ hash table. NumPy arrays are compared
through ``torch.from_numpy``.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import fractions
import io
import math
import os
import pickle
import random
import struct
import threading
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is the oracle")
from torch.utils.serialization import config  # noqa: E402

import tensorio  # noqa: E402
from _trees import (  # noqa: E402
    ML_DTYPES,
    NUMPY_DTYPES,
    TORCH_DTYPES,
    Trees,
    assert_equal,
    assert_same_file,
    assert_sound,
    bits,
    id_of,
    masked,
    saved,
    saved_by_torch,
    storages,
    through_torch,
    torch_base,
)  # fmt: skip

pytestmark = [
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the layout is that of torch 2.13"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:Sparse .* support is in beta"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions"),
]

Array = np.ndarray[Any, Any]

SEEDS = 400  # trees of each kind; about 1 ms each
BATCH = 200


def load(data: bytes, weights_only: bool = True) -> Any:
    return torch.load(io.BytesIO(data), weights_only=weights_only)


def assert_saves_like_torch(obj: Any, weights_only: bool = True) -> None:
    """Our file is torch's, its CRCs hold, and torch finds the object in it."""
    ours = saved(obj)
    assert_same_file(ours, saved_by_torch(through_torch(obj)))
    assert_sound(ours)
    assert_equal(load(ours, weights_only), obj)


# ------------------------------------------------------------- generated trees


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_numpy_trees_are_byte_identical(first: int) -> None:
    for seed in range(first, first + BATCH):
        assert_saves_like_torch(Trees(seed, "numpy").tree())


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_torch_trees_are_byte_identical(first: int) -> None:
    for seed in range(first, first + BATCH):
        assert_saves_like_torch(Trees(seed, "torch").tree())


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_trees_in_files_map_equal(kind: str, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs" / "some.file.pt", tmp_path / "some.file.pt"
    theirs.parent.mkdir()
    for seed in range(2000, 2040):
        tree = Trees(seed, kind).tree()
        torch.save(through_torch(tree), theirs)
        tensorio.save(tree, ours, durable=False)
        assert_same_file(ours.read_bytes(), theirs.read_bytes())
        assert_equal(torch.load(ours, weights_only=True, mmap=True), tree)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
floats = st.floats(allow_nan=True, allow_infinity=True)
plain = (
    st.none() | st.booleans() | st.integers() | st.integers(-(1 << 2200), 1 << 2200) | floats | texts
    | st.binary(max_size=5) | st.binary(max_size=5).map(bytearray) | st.complex_numbers()
    | st.sets(st.integers(0, 3), max_size=1) | st.frozensets(texts, max_size=1)
    | st.lists(texts, max_size=4).map(Counter) | st.sampled_from([torch.float32, torch.bits8, torch.int4])
    | st.builds(torch.Size, st.lists(st.integers(0, 1 << 40), max_size=5)) | st.just(torch.device("cuda", 1))
    | st.fractions()
)  # fmt: skip
plain_trees = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(texts | st.integers(), inner, max_size=4)
        | st.dictionaries(texts | st.floats(allow_nan=False), inner, max_size=4).map(OrderedDict)
        | inner.map(lambda x: [x, x, (x,)])
    ),
    max_leaves=25,
)


@settings(max_examples=300, deadline=None)
@given(plain_trees)
def test_plain_trees_are_byte_identical(tree: Any) -> None:
    assert_same_file(saved(tree), saved_by_torch(tree))


# ----------------------------------------------------------------- torch tensors

BASE = torch.arange(200.0).reshape(20, 10)


def empty_storage() -> Any:
    e = torch.empty(0)
    return [e, e.detach(), e.view(3, 0), e.view(torch.int32)]


def bytes_as_every_byte_type() -> Any:
    """One storage that all types without a storage class, and uint8, may share."""
    raw = torch.arange(16, dtype=torch.uint8)
    return [raw, raw.view(torch.float8_e4m3fn), raw.view(torch.uint16), raw[4:8].view(torch.complex32),
            raw.view(torch.float4_e2m1fn_x2), raw]  # fmt: skip


def with_attribute() -> Any:
    t = torch.ones(3)
    t.note = "kept"
    return t


def parameter_with_attribute() -> Any:
    p = torch.nn.Parameter(torch.ones(3))
    p.tag = {"sharded": True}
    return p


def without_storage() -> Any:
    """What sharding libraries leave behind: a shape, and a storage of no bytes."""
    t = torch.ones(5)
    t.untyped_storage().resize_(0)
    return t


TENSORS: dict[str, Callable[[], Any]] = {
    "transposed": lambda: BASE.t(),
    "view_inside": lambda: BASE[3:7, 2:5],
    "every_third": lambda: BASE[::3, ::3],
    "expanded": lambda: torch.zeros(1).expand(5, 4),
    "expanded_to_nothing": lambda: torch.zeros(1).expand(0, 4),
    "empty": lambda: torch.zeros(0, 3),
    "empty_at_an_offset": lambda: BASE[5:5],
    "zero_dim": lambda: torch.tensor(3.5),
    "zero_dim_inside": lambda: BASE[3, 4],
    "overlapping_windows": lambda: torch.arange(10).unfold(0, 4, 2),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "sixty_four_dims": lambda: torch.ones([1] * 64),
    "asks_for_gradients": lambda: torch.ones(3, requires_grad=True),
    "result_of_a_graph": lambda: torch.ones(3, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(BASE),
    "frozen_parameter": lambda: torch.nn.Parameter(BASE, requires_grad=False),
    "int_parameter": lambda: torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "parameter_of_float8": lambda: torch.nn.Parameter(torch.ones(3).to(torch.float8_e5m2), requires_grad=False),
    "parameter_of_a_view": lambda: torch.nn.Parameter(BASE.t()),
    "tied": lambda: [BASE, BASE, {"again": BASE}],
    "views_of_one_storage": lambda: [BASE, BASE.view(-1), BASE[2], BASE.t()],
    "parameter_and_its_data": lambda: (lambda p: [p, p.data, p.detach()])(torch.nn.Parameter(BASE)),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "conjugate_of_half": lambda: (lambda t: [t, t.conj()])(torch_base("complex32", (3,), random.Random(0))),
    "conjugate_beside_its_base": lambda: (lambda t: [t, t.conj(), t])(torch.randn(3, dtype=torch.complex128)),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "conjugate_parameter": lambda: torch.nn.Parameter(torch.randn(3, dtype=torch.complex64).conj()),
    "real_part": lambda: torch.randn(3, dtype=torch.complex64).real,
    "buffer": lambda: torch.nn.Buffer(torch.ones(3)),
    "storage_of_odd_size": lambda: torch.arange(7, dtype=torch.uint8)[:4].view(torch.float32),
    "small_part_of_a_large_base": lambda: torch.zeros(100_000)[5:7],
    "keys_like_storage_names": lambda: {"0": BASE, "1": torch.zeros(2), "2": [torch.zeros(1), "0"], "3": "storage"},
    "values_like_storage_words": lambda: ["cpu", torch.ones(2), "storage", "1", torch.zeros(1), "cpu"],
    "empty_storage_shared": lambda: empty_storage()[:3],
    "bytes_as_every_byte_type": bytes_as_every_byte_type,
    "byte_types_without_bytes_first": lambda: bytes_as_every_byte_type()[1:],
    "without_storage": without_storage,
    "large_shape_of_nothing": lambda: torch.empty(0, 1 << 31, 1 << 20),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_torch_tensor_is_byte_identical(make: Callable[[], Any]) -> None:
    obj = make()
    ours = saved(obj)
    assert_same_file(ours, saved_by_torch(obj))
    assert_sound(ours)
    if make not in (without_storage, TENSORS["storage_of_odd_size"]):  # neither holds a tensor to read back
        assert_equal(load(ours), obj)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch_dtype_is_byte_identical(dtype: str) -> None:
    rng = random.Random(dtype)
    base = torch_base(dtype, (6, 4), rng)
    obj = {"base": base, "view": base[1:4, ::2], "transposed": base.t(), "zero_dim": torch_base(dtype, (), rng),
           "empty": torch_base(dtype, (0, 2), rng), "wide": base[:1].expand(3, 4)}  # fmt: skip
    assert_saves_like_torch(obj)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch_dtype_in_a_file_maps_equal(dtype: str, tmp_path: Path) -> None:
    base = torch_base(dtype, (6, 4), random.Random(dtype))
    tensorio.save({"base": base, "t": base.t()}, tmp_path / "x.pt", durable=False)
    assert_equal(torch.load(tmp_path / "x.pt", weights_only=True, mmap=True), {"base": base, "t": base.t()})


class Subclass(torch.Tensor):  # type: ignore[misc]
    """A tensor class of the user's own."""


RARE: dict[str, Callable[[], Any]] = {
    "attribute": with_attribute,
    "parameter_with_attribute": parameter_with_attribute,
    "subclass": lambda: torch.ones(3).as_subclass(Subclass),
    "untyped_storage": lambda: BASE.untyped_storage(),
    "typed_storage": lambda: BASE.storage(),
    "storage_then_tensor": lambda: [BASE.storage(), BASE],
    "tensor_then_storage": lambda: [BASE, BASE.storage()],
    "bytes_tensor_then_storage": lambda: (lambda t: [t, t.untyped_storage(), t])(torch.ones(3, dtype=torch.uint8)),
    "bytes_storage_then_tensor": lambda: (lambda t: [t.untyped_storage(), t])(torch.ones(3, dtype=torch.uint8)),
    "float8_tensor_and_storage": lambda: (lambda t: [t, t.untyped_storage()])(torch.ones(3).to(torch.float8_e5m2)),
    "empty_storage_as_two_types": empty_storage,
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "meta_parameter": lambda: torch.nn.Parameter(torch.empty(3, device="meta")),
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "sparse_csc": lambda: torch.eye(3).to_sparse_csc(),
    "sparse_bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "quantized_per_tensor": lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 2, torch.qint8),
    "quantized_per_channel": lambda: torch.quantize_per_channel(
        torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
    ),
    "quantized_4_bits": lambda: torch.quantize_per_channel(
        torch.randn(2, 4), torch.tensor([0.1, 0.2]), torch.tensor([0.0, 1.0]), 0, torch.quint4x2
    ),
    "size_device_dtype": lambda: [BASE.shape, torch.device("cpu"), torch.device("cuda:1"), torch.float32, BASE.shape],
    "layouts": lambda: [torch.strided, torch.per_tensor_affine],
    "random_state": torch.get_rng_state,
    "numpy_scalars": lambda: {"s": np.float32(2), "i": np.int64(3), "b": np.bool_(True), "f": ml_dtypes.bfloat16(1.5)},
    "numpy_types": lambda: [np.dtype("f4"), np.dtype("<i8"), np.float32],
    "array_of_strings": lambda: np.array(["a", "\u00e9"]),
    "array_of_objects": lambda: np.array([1, "x", None], dtype=object),
    "array_of_fields": lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "array_of_dates": lambda: np.array(["2020-01-01"], dtype="M8[D]"),
}


@pytest.mark.parametrize("make", RARE.values(), ids=RARE.keys())
def test_rare_kind_is_byte_identical(make: Callable[[], Any]) -> None:
    obj = {"it": make(), "twice": [1]}
    ours = saved(obj)
    assert_same_file(ours, saved_by_torch(obj))
    assert_sound(ours)
    load(ours, weights_only=False)


def test_arrays_of_no_tensor_type_share_the_file_with_tensors() -> None:
    names, weight = np.array(["a", "b"]), np.ones((2, 3), "f4")
    obj = {"names": names, "weight": weight, "again": names}
    assert_same_file(saved(obj), saved_by_torch({"names": names, "weight": torch.from_numpy(weight), "again": names}))


@pytest.mark.parametrize("dtype", ["int4", "uint7", "int1"])
def test_type_that_torch_cannot_save_is_refused(dtype: str) -> None:
    obj = torch.arange(4, dtype=torch.uint8).view(getattr(torch, dtype))
    with pytest.raises(KeyError):
        saved_by_torch(obj)
    with pytest.raises(tensorio.UnsupportedError, match=dtype):
        saved(obj)


def test_meta_storage_is_refused(in_child: Any) -> None:
    storage = torch.empty(1 << 20, device="meta").untyped_storage()
    with pytest.raises((tensorio.UnsupportedError, NotImplementedError)):
        in_child(saved, [storage])


@pytest.mark.parametrize("left", [0, 8])
@pytest.mark.parametrize("compact", [False, True])
def test_tensor_larger_than_its_storage_reads_no_other_memory(left: int, compact: bool, in_child: Any) -> None:
    """As torch.save: what the storage has is stored; there is no part of it that the tensor could reach."""
    tensor = torch.ones(1 << 20)
    tensor.untyped_storage().resize_(left)
    if compact:
        with pytest.raises(tensorio.UnsupportedError):
            in_child(lambda: saved([tensor], compact=True))
        return
    data = in_child(lambda: saved([tensor]))
    assert [len(s) for s in storages(data)] == [left]
    assert_same_file(data, saved_by_torch([tensor]))


# ------------------------------------------------------------------ checkpoints


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 5),
        torch.nn.BatchNorm1d(5),
        torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.GRU(4, 4)),
    )


def stepped(kind: Any, **options: Any) -> tuple[Any, Any]:
    """A model and its optimizer after one step."""
    net = model()
    optimizer = kind(net.parameters(), **options)
    for p in net.parameters():
        p.grad = torch.full_like(p, 0.5)
    optimizer.step()
    return net, optimizer


def test_state_dict_with_metadata_is_byte_identical() -> None:
    state = model().state_dict()
    assert state._metadata
    assert_saves_like_torch(state)


def test_tied_weights_are_byte_identical_and_stay_tied() -> None:
    net = torch.nn.ModuleDict({"embed": torch.nn.Embedding(7, 3), "head": torch.nn.Linear(3, 7, bias=False)})
    net["head"].weight = net["embed"].weight
    state = net.state_dict()
    assert_saves_like_torch(state)
    back = load(saved(state))
    assert back["embed.weight"].data_ptr() == back["head.weight"].data_ptr()


def test_whole_module_is_byte_identical() -> None:
    net = model()
    assert_same_file(saved(net), saved_by_torch(net))
    assert_equal(load(saved(net), weights_only=False).state_dict(), net.state_dict())


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {}),
    "adam_amsgrad": (torch.optim.Adam, {"amsgrad": True, "lr": torch.tensor(1e-3)}),
    "adagrad": (torch.optim.Adagrad, {}),
    "lbfgs": (torch.optim.LBFGS, {}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_checkpoint_is_byte_identical(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    if name == "lbfgs":
        net = model()
        optimizer = kind(net.parameters())
    else:
        net, optimizer = stepped(kind, **options)
    obj = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "loss": 0.1, "best": math.inf,
           "args": {"lr": 1e-3, "name": "x", "layers": [1, 2], "flag": None}, "rng": torch.get_rng_state()}  # fmt: skip
    assert_saves_like_torch(obj)


def schedulers(optimizer: Any) -> dict[str, Any]:
    s = torch.optim.lr_scheduler
    return {
        "one_cycle": s.OneCycleLR(optimizer, 0.1, total_steps=10), "multi_step": s.MultiStepLR(optimizer, [1, 2, 2]),
        "plateau": s.ReduceLROnPlateau(optimizer), "cosine": s.CosineAnnealingLR(optimizer, 5),
        "sequential": s.SequentialLR(optimizer, [s.ConstantLR(optimizer), s.StepLR(optimizer, 2)], [3]),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize("name", ["one_cycle", "multi_step", "plateau", "cosine", "sequential"])
def test_scheduler_state_is_byte_identical(name: str) -> None:
    _, optimizer = stepped(torch.optim.SGD, lr=0.1, momentum=0.9)
    state = {k: v for k, v in schedulers(optimizer)[name].state_dict().items() if not callable(v)}
    assert_same_file(saved(state), saved_by_torch(state))
    assert_sound(saved(state))


# ----------------------------------------------------------------- plain values


class Color(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: Any


def recursive_list() -> Any:
    made: list[Any] = [1]
    made.append(made)
    return made


def recursive_dict() -> Any:
    made: dict[str, Any] = {"w": torch.ones(2)}
    made["self"] = made
    return made


def recursive_tuple() -> Any:
    made: tuple[list[Any], int] = ([], 1)
    made[0].append(made)
    return made


def recursive_long_tuple() -> Any:
    made: tuple[Any, ...] = ([], 1, 2, 3)
    made[0].append(made)
    return made


VALUES: dict[str, Callable[[], Any]] = {
    "ints": lambda: [0, 1, 255, 256, 65535, 65536, -1, -128, -129, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63],
    "big_ints": lambda: [2**70, -(2**70), 2**2031, 2**2040, -(2**2039), -(2**2040), 1 << 10_000],
    "floats": lambda: [
        0.0,
        -0.0,
        1e-310,
        math.inf,
        -math.inf,
        math.nan,
        struct.unpack("<d", b"\1\0\0\0\0\0\xf8\xff")[0],
    ],
    "strings": lambda: ["", "a", "a", "\u00e9", "\u2028\u2029", "\U0001f600", "\x00", "x" * 100_000],
    "bytes": lambda: [b"", b"a", b"\xff" * 300, b"a", bytearray(), bytearray(b"xy")],
    "complex": lambda: [1 + 2j, complex(math.nan, -0.0)],
    "tuples": lambda: [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((),))],
    "sets": lambda: [set(), {1}, frozenset(), frozenset(["a"])],
    "counter": lambda: Counter("abracadabra"),
    "defaultdict": lambda: defaultdict(list, a=[1]),
    "deque": lambda: deque([1, 2, 3], maxlen=5),
    "enum": lambda: [Color.RED, Color.RED],
    "namedtuple": lambda: Point(1, [2]),
    "fraction": lambda: fractions.Fraction(1, 3),
    "functions": lambda: [math.sqrt, os.path.join, len, collections.OrderedDict.fromkeys],
    "types": lambda: [int, dict, type(None), Point, OrderedDict],
    "singletons": lambda: [None, True, False, ..., NotImplemented],
    "ordered_dict_with_attribute": lambda: (lambda d: (setattr(d, "note", 1), d)[1])(OrderedDict(a=1)),
    "recursive_list": recursive_list,
    "recursive_dict": recursive_dict,
    "recursive_tuple": recursive_tuple,
    "recursive_long_tuple": recursive_long_tuple,
    "equal_but_not_identical": lambda: [[1], [1], "".join(["a", "b"]), "".join(["a", "b"])],
    "more_than_256_memo_slots": lambda: [[str(i) for i in range(300)], [[i] for i in range(300)]],
}


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES.keys())
def test_value_is_byte_identical(make: Callable[[], Any]) -> None:
    obj = make()
    assert_same_file(saved(obj), saved_by_torch(obj))
    assert_sound(saved(obj))


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 1999, 2000, 2001])
def test_batches_are_byte_identical(count: int) -> None:
    obj = {
        "list": list(range(count)), "dict": {i: i for i in range(count)}, "strings": {str(i): i for i in range(count)},
        "ordered": OrderedDict((i, i) for i in range(count)), "deque": deque(range(count)),
        "counter": Counter(range(count)), "tuple": tuple(range(count)),
    }  # fmt: skip
    assert_same_file(saved(obj), saved_by_torch(obj))
    assert_sound(saved(obj))


@pytest.mark.parametrize("count", [300, 2001])
def test_many_tensors_are_byte_identical(count: int) -> None:
    rng = random.Random(0)
    obj = {f"layers.{i}.weight": np.full((rng.randrange(4), 3), i, "f4") for i in range(count)}
    assert_same_file(saved(obj), saved_by_torch(through_torch(obj)))
    with_torch = {k: torch.from_numpy(v.copy()) for k, v in obj.items()}
    assert_same_file(saved(with_torch), saved_by_torch(with_torch))
    assert_equal(load(saved(obj)), obj)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4095, 65535, 65536, 65537, 524287, 524288, 524289, 3_000_001])
def test_payload_of_any_size_is_byte_identical(size: int) -> None:
    """Around the sizes at which payloads are joined or cut into pieces."""
    raw = np.frombuffer(random.Random(size).randbytes(size), np.uint8).copy()
    obj = {"before": np.ones(3, "f4"), "raw": raw, "behind": np.zeros(5, "i2")}
    assert_saves_like_torch(obj)


# ------------------------------------------------------------ names, alignment

NAMES = ["x.pt", "x.tar.gz", "a.b.c.pth", "noext", "ends.", "sp ace.pt", ".hid.pt", "sub.dir/y.pt", "sub.dir/noext",
         "\u00e9trange.pt", "dossi\u00e9/x.pt", "UPPER.PT", "model.bin", "x" * 200 + ".pt",
         "a-b_c(1).ckpt"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_prefix_follows_the_file_name(name: str, tmp_path: Path) -> None:
    obj = {"w": torch.ones(3)}
    ours, theirs = tmp_path / "ours" / name, tmp_path / "theirs" / name
    for path in (ours, theirs):
        path.parent.mkdir(parents=True)
    tensorio.save(obj, ours, format="torch_zip", durable=False)
    torch.save(obj, theirs)
    assert_same_file(ours.read_bytes(), theirs.read_bytes())
    assert_equal(torch.load(ours, weights_only=True, mmap=True), obj)


def test_prefix_follows_the_path_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "\u00e9"
    folder.mkdir()
    monkeypatch.chdir(folder)
    torch.save([1], "x.pt")
    theirs = Path("x.pt").read_bytes()
    tensorio.save([1], "x.pt", durable=False)
    assert_same_file(Path("x.pt").read_bytes(), theirs)


def test_prefix_of_a_file_object_is_archive(tmp_path: Path) -> None:
    obj = {"w": torch.ones(3)}
    with (tmp_path / "named.pt").open("wb") as f:
        tensorio.save(obj, f, format="torch_zip")
    assert_same_file((tmp_path / "named.pt").read_bytes(), saved_by_torch(obj))
    with zipfile.ZipFile(tmp_path / "named.pt") as archive:
        assert archive.namelist()[0] == "archive/data.pkl"


@pytest.mark.parametrize("name", [".hidden", ".pt"])
def test_name_without_stem_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        torch.save([1], tmp_path / name)
    with pytest.raises(ValueError, match="invalid file name"):
        tensorio.save([1], tmp_path / name, format="torch_zip")
    assert not list(tmp_path.glob("*tmp*"))


def test_name_of_dots_gives_a_file_that_opens(tmp_path: Path) -> None:
    try:
        tensorio.save({"w": np.ones(3)}, tmp_path / "...pt", durable=False)
    except ValueError:
        return
    assert np.array_equal(tensorio.load(tmp_path / "...pt")["w"], np.ones(3))


@pytest.mark.parametrize("align", [1, 2, 3, 8, 16, 48, 64, 100, 128, 256, 4096, 32768])
def test_alignment_is_byte_identical(align: int, tmp_path: Path) -> None:
    obj = {"a": torch.ones(3), "b": torch.zeros(0), "c": torch.arange(5, dtype=torch.int8), "d": torch.ones(40, 50)}
    with config.patch({"save.storage_alignment": align}):
        theirs = saved_by_torch(obj)
    ours = saved(obj, align=align)
    assert_same_file(ours, theirs)
    assert_sound(ours)
    (tmp_path / "x.pt").write_bytes(ours)
    assert_equal(torch.load(tmp_path / "x.pt", weights_only=True, mmap=True), obj)
    with tensorio.open(tmp_path / "x.pt", strict=True) as checkpoint:
        assert all(i.chunks[0].extent.offset % align == 0 for i in checkpoint.infos.values())


@pytest.mark.parametrize("align", [0, -1, 32769, 65536])
def test_alignment_out_of_range_is_refused(align: int) -> None:
    with pytest.raises(ValueError, match="align"):
        saved({"a": np.ones(3)}, align=align)


def test_strict_accepts_every_tree() -> None:
    for seed in range(3000, 3040):
        tensorio.load(saved(Trees(seed, "numpy").tree()), strict=True, unknown="opaque")


def test_offsets_computed_without_directory_agree(tmp_path: Path) -> None:
    """torch's own short cut takes the place of each storage from the sizes alone."""
    tree = {str(i): torch.full((i % 7,), float(i)) for i in range(50)}
    tensorio.save(tree, tmp_path / "x.pt", durable=False)
    with config.patch({"load.calculate_storage_offsets": True}):
        assert_equal(torch.load(tmp_path / "x.pt", weights_only=True, mmap=True), tree)


# ----------------------------------------------------------------- the id


def test_id_is_the_same_for_the_same_object(tmp_path: Path) -> None:
    obj = {"w": np.arange(12.0).reshape(3, 4), "n": [1, "x"]}
    assert saved(obj) == saved(obj) == saved({"w": np.arange(12.0).reshape(3, 4), "n": [1, "x"]})
    with_torch = {"w": torch.from_numpy(obj["w"]), "n": [1, "x"]}
    assert saved(obj) == saved(with_torch)


@pytest.mark.parametrize(
    "other",
    [
        lambda: {"w": np.arange(1, 13.0).reshape(3, 4), "n": 1},
        lambda: {"w": np.arange(12.0).reshape(4, 3), "n": 1},
        lambda: {"w": np.arange(12.0).reshape(3, 4), "n": 2},
        lambda: {"v": np.arange(12.0).reshape(3, 4), "n": 1},
        lambda: {"w": np.arange(12).reshape(3, 4), "n": 1},
    ],
    ids=["payload", "shape", "value", "name", "dtype"],
)
def test_id_changes_with_the_content(other: Callable[[], Any]) -> None:
    a, b = id_of(saved({"w": np.arange(12.0).reshape(3, 4), "n": 1})), id_of(saved(other()))
    assert a != b
    assert a.isdigit()
    assert len(a) == 40


def test_second_half_of_the_id_is_the_fold_of_the_checksums() -> None:
    for seed in range(100):
        tree = Trees(seed, "numpy").tree()
        assert id_of(saved(tree))[20:] == id_of(saved_by_torch(through_torch(tree)))[20:]


# ------------------------------------------------------- arrays that share memory


def pointers(*tensors: Any) -> list[int]:
    """Where tensors start, from the first one, in bytes."""
    return [t.data_ptr() - tensors[0].data_ptr() for t in tensors]


def test_overlapping_arrays_share_one_storage() -> None:
    base = np.arange(60.0).reshape(6, 10)
    obj = {"rows": base[1:4], "all": base, "column": base[:, 3], "transposed": base.T}
    obj["other"] = np.ones(3)
    data = saved(obj)
    assert [len(s) for s in storages(data)] == [base.nbytes, 24]
    back = load(data)
    assert_equal(back, obj)
    parts = [back[k] for k in ("all", "rows", "column", "transposed")]
    assert pointers(*parts) == [0, 80, 24, 0]
    assert len({t.untyped_storage()._cdata for t in parts}) == 1
    back["all"][3, 3] = -7
    assert back["rows"][2, 3] == back["column"][3] == back["transposed"][3, 3] == -7


def test_overlapping_parts_make_a_storage_from_the_lowest_to_the_highest_byte() -> None:
    base = np.arange(100, dtype=np.int32)
    obj = [base[30:50], base[10:31], base[49:60], base[70:80]]
    data = saved(obj)
    assert [len(s) for s in storages(data)] == [50 * 4, 10 * 4]
    back = load(data)
    assert_equal(back, obj)
    assert pointers(back[1], back[0], back[2]) == [0, 80, 156]


def test_neighbours_that_do_not_overlap_stay_apart() -> None:
    base = np.arange(10, dtype=np.int64)
    obj = {"a": base[:5], "b": base[5:]}
    assert_saves_like_torch(obj)
    assert [len(s) for s in storages(saved(obj))] == [40, 40]


def test_same_bytes_in_two_array_objects_share_one_storage() -> None:
    base = np.arange(12, dtype=np.float32)
    obj = [base, base.view(), base.reshape(3, 4), base]
    data = saved(obj)
    assert len(storages(data)) == 1
    back = load(data)
    assert_equal(back, obj)
    assert back[0] is back[3]
    assert pointers(*back) == [0, 0, 0, 0]


def test_same_bytes_as_other_types_have_storages_of_their_own() -> None:
    base = np.arange(16, dtype=np.float32)
    obj = {"f4": base, "i4": base.view("i4"), "u1": base.view("u1"), "i2": base.view("i2")[4:], "f4_part": base[3:5]}
    data = saved(obj)
    assert [len(s) for s in storages(data)] == [64, 64, 64, 56]
    back = load(data)
    assert_equal(back, obj)
    assert pointers(back["f4"], back["f4_part"]) == [0, 12]


def test_overlapping_views_off_the_element_grid_have_the_right_values() -> None:
    raw = np.arange(64, dtype=np.uint8)
    obj = [raw[0:32].view("f4"), raw[2:34].view("f4"), raw[1:33].view("f4"), raw[4:36].view("f4")]
    back = load(saved(obj))
    assert_equal(back, obj)
    assert pointers(back[0], back[3]) == [0, 4]


def test_overlapping_stride_tricks_share_one_storage() -> None:
    base = np.arange(10.0)
    windows = np.lib.stride_tricks.sliding_window_view(base, 4)
    obj = {"windows": windows, "base": base}
    data = saved(obj)
    assert [len(s) for s in storages(data)] == [80]
    assert_equal(load(data), obj)


def test_empty_views_share_nothing() -> None:
    base = np.arange(10.0)
    obj = {"base": base, "none": base[4:4], "none_2d": base.reshape(2, 5)[:, 2:2]}
    data = saved(obj)
    assert sorted(len(s) for s in storages(data)) == [0, 0, 80]
    assert_equal(load(data), obj)


@pytest.mark.parametrize("seed", range(0, 300, 100))
def test_random_views_share_as_they_do_in_memory(seed: int) -> None:
    """Any views of a few bases: values right, and two of one type overlap in the file as they do in memory."""
    for number in range(seed, seed + 100):
        rng = random.Random(number)
        bases = [np.arange(rng.randrange(1, 60), dtype=rng.choice(("f4", "i8", "u1"))) for _ in range(3)]
        views = []
        for _ in range(rng.randrange(2, 8)):
            base = rng.choice(bases)
            lo, hi = sorted((rng.randrange(len(base) + 1), rng.randrange(len(base) + 1)))
            view = base[lo : hi : rng.choice((1, 1, 2, 3))]
            if rng.random() < 0.3 and len(view) % 2 == 0:
                view = view.reshape(2, -1).T
            views.append(view)
        back = load(saved(views))
        for got, want in zip(back, views, strict=True):
            assert_equal(got, want)
        for i, a in enumerate(views):
            for j, b in enumerate(views[:i]):
                if np.may_share_memory(a, b) and a.size and b.size:
                    apart = a.__array_interface__["data"][0] - b.__array_interface__["data"][0]
                    assert back[i].data_ptr() - back[j].data_ptr() == apart, number


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "reversed": lambda a: a[::-1],
    "reversed_columns": lambda a: a[:, ::-2],
    "fortran": lambda a: np.asfortranarray(a),
    "transposed": lambda a: a.T,
    "one_field": lambda a: a.view([("x", a.dtype), ("y", a.dtype)])["y"],
    "big_endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "big_endian_transposed": lambda a: a.astype(a.dtype.newbyteorder(">")).T,
    "big_endian_reversed": lambda a: a.astype(a.dtype.newbyteorder(">"))[::-1],
    "broadcast": lambda a: np.broadcast_to(a, (3, *a.shape)),
    "broadcast_reversed": lambda a: np.broadcast_to(a[::-1], (3, *a.shape)),
    "read_only": lambda a: np.frombuffer(a.tobytes(), a.dtype),
    "subclass_matrix": lambda a: a.view(Tagged),
}


class Tagged(np.ndarray):  # type: ignore[type-arg]
    """An array class of the user's own."""


def off_grid(a: Array) -> Array:
    """Elements at strides that are no multiple of their size."""
    packed = np.zeros(a.shape, dtype=[("pad", "u1"), ("x", a.dtype)])
    packed["x"] = a
    return packed["x"]


LAYOUTS["off_grid"] = off_grid


@pytest.mark.parametrize("layout", [k for k in LAYOUTS if k != "subclass_matrix"])
@pytest.mark.parametrize("dtype", ["f4", "i2", "c16", "u4"])
def test_array_in_any_layout_has_the_right_values(layout: str, dtype: str) -> None:
    array = LAYOUTS[layout](np.arange(24).reshape(6, 4).astype(dtype))
    data = saved({"a": array, "again": array, "b": np.ones(2)})
    back = load(data)
    native = array.astype(array.dtype.newbyteorder("="))
    assert np.array_equal(back["a"].numpy(), native)
    assert back["a"].numpy().dtype == native.dtype
    assert back["a"] is back["again"]
    assert len(storages(data)) == 2
    assert_sound(data)
    ours = tensorio.load(data)
    assert np.array_equal(ours["a"], native)
    assert ours["a"].dtype == native.dtype


def test_copied_arrays_do_not_share_with_their_base() -> None:
    base = np.arange(10.0)
    obj = {"base": base, "reversed": base[::-1], "part": base[2:5]}
    data = saved(obj)
    assert [len(s) for s in storages(data)] == [80, 80]
    back = load(data)
    assert np.array_equal(back["reversed"].numpy(), base[::-1])
    assert pointers(back["base"], back["part"]) == [0, 16]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES + ML_DTYPES)
def test_numpy_dtype_is_byte_identical(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype)) if dtype in ML_DTYPES else np.dtype(dtype)
    array = np.arange(12).astype(kind).reshape(3, 4)
    assert_saves_like_torch({"a": array, "t": array.T.copy().T, "zero_dim": np.array(array[1, 2])})


def test_wide_floats_are_written_as_numpy_writes_them() -> None:
    array = np.arange(3, dtype=np.longdouble)
    assert_same_file(saved([array]), saved_by_torch([array]))


# ------------------------------------------------------------------- compact


def test_compact_stores_what_the_views_reach() -> None:
    base = torch.arange(1 << 20, dtype=torch.float32)
    obj = {"a": base[1000:1010], "b": base[1005:1030], "c": base[500_000:500_004], "whole": torch.ones(3)}
    full, compact = saved(obj), saved(obj, compact=True)
    assert [len(s) for s in storages(full)] == [base.nbytes, 12]
    assert [len(s) for s in storages(compact)] == [30 * 4, 4 * 4, 12]
    back = load(compact)
    assert_equal(back, obj)
    assert pointers(back["a"], back["b"]) == [0, 20]


@pytest.mark.parametrize("view", [
    lambda t: t[3:9:2, 5], lambda t: t[4:6].t(), lambda t: t[2, 3], lambda t: t[1:1], lambda t: t[0, :1].expand(4, 7),
    lambda t: torch.nn.Parameter(t[5:7, 1:3]), lambda t: t.unfold(0, 3, 2)[1:],
], ids=["column", "transposed", "zero_dim", "empty", "expanded", "parameter", "windows"])  # fmt: skip
def test_compact_view_reads_equal(view: Callable[[Any], Any]) -> None:
    tensor = view(torch.arange(100.0).reshape(10, 10))
    data = saved({"x": tensor}, compact=True)
    assert_equal(load(data), {"x": tensor})
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
    assert [len(s) for s in storages(data)] == [min(reach, tensor.numel()) * 4]


def test_compact_of_whole_storages_is_byte_identical() -> None:
    state = model().state_dict()
    assert saved(state, compact=True) == saved(state)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_compact_works_for_every_type(dtype: str) -> None:
    base = torch_base(dtype, (50, 4), random.Random(dtype))
    data = saved([base[10:12], base[11:13, 1:]], compact=True)
    assert len(storages(data)) == 1
    assert len(storages(data)[0]) == 12 * base.itemsize
    assert_equal(load(data), [base[10:12], base[11:13, 1:]])


def test_compact_keeps_lazy_bits() -> None:
    z = torch.randn(1000, dtype=torch.complex64)
    obj = {"conj": z[3:5].conj(), "neg": z.clone().conj().imag[3:5]}
    data = saved(obj, compact=True)
    assert_equal(load(data), obj)


def test_compact_float8_and_bytes_of_one_storage() -> None:
    obj = bytes_as_every_byte_type()
    assert_equal(load(saved(obj, compact=True)), obj)


def test_same_torch_bytes_as_other_types_have_the_right_values() -> None:
    base = torch.arange(8.0)
    obj = {"float": base, "int": base.view(torch.int32), "half": base.view(torch.float16)[4:]}
    for compact in (False, True):
        back = load(saved(obj, compact=compact))
        assert_equal(back, obj)


# ------------------------------------------------------------------- refusals


@pytest.mark.parametrize("bad", [lambda: 0, (i for i in ()), threading.Lock()], ids=["lambda", "generator", "lock"])
def test_object_that_cannot_be_pickled_leaves_the_old_file(bad: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    tensorio.save({"w": np.ones(3)}, path, durable=False)
    before = path.read_bytes()
    with pytest.raises((pickle.PicklingError, TypeError), match=r"can't|cannot"):
        tensorio.save({"w": np.zeros(3), "bad": bad}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_metadata_has_no_place() -> None:
    with pytest.raises(tensorio.UnsupportedError, match="metadata"):
        saved({"a": np.ones(1)}, metadata={"k": "v"})


# -------------------------------------------------------- records beyond 4 GiB


class Sparse:
    """A file object that leaves holes where zeros are written."""

    ZEROS = bytes(1 << 19)

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb", buffering=0)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), len(self.ZEROS)):
            piece = view[at : at + len(self.ZEROS)]
            if len(piece) == len(self.ZEROS) and not np.frombuffer(piece, np.uint64).any():
                self.file.seek(len(piece), os.SEEK_CUR)
            else:
                while len(piece):
                    piece = piece[self.file.write(piece) :]
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self.file.truncate(self.file.tell())
        self.file.close()


def data_runs(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of every block that is not all zeros."""
    with path.open("rb") as f:
        fd, at, end = f.fileno(), 0, path.stat().st_size
        while at < end:
            try:
                at = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:
                return
            hole = os.lseek(fd, at, os.SEEK_HOLE)
            for start in range(at, hole, 4096):
                block = os.pread(fd, 4096, start)
                if block.strip(b"\0"):
                    yield start, block
            at = hole


@pytest.fixture
def sparse_folder(tmp_path: Path) -> Iterator[Path]:
    probe = tmp_path / "probe"
    with probe.open("wb") as f:
        f.truncate(1 << 24)
    if probe.stat().st_blocks:
        pytest.skip("this file system has no sparse files")
    yield tmp_path
    for path in tmp_path.iterdir():
        path.unlink()


@pytest.mark.parametrize("sizes", [[(1 << 32) + 16, 24], [0xFFFFFFFE, 40], [1 << 31, 1 << 31, 0, 8]],
                         ids=["size_and_offset", "last_32_bit_size", "offset_only"])  # fmt: skip
def test_records_beyond_4_gib_are_byte_identical(sizes: list[int], sparse_folder: Path) -> None:
    arrays = {str(i): np.zeros(n, np.uint8) for i, n in enumerate(sizes)}  # zeros that were never touched cost nothing
    for i, array in enumerate(arrays.values(), 1):
        array[:1] = array[-1:] = i
    obj = {"tensors": arrays, "n": 3}
    ours, theirs = sparse_folder / "ours.pt", sparse_folder / "theirs.pt"
    for path, write in ((ours, lambda f: tensorio.save(obj, f, format="torch_zip")),
                        (theirs, lambda f: torch.save(through_torch(obj), f))):  # fmt: skip
        with contextlib.closing(Sparse(path)) as f:
            write(f)
    assert ours.stat().st_size == theirs.stat().st_size > 1 << 32
    id_at = id_places(ours)
    assert id_at == id_places(theirs)
    assert without(dict(data_runs(ours)), id_at) == without(dict(data_runs(theirs)), id_at)
    assert_reads_at_both_ends(ours, arrays)


def id_places(path: Path) -> list[tuple[int, int]]:
    """Offset and length of the serialization id and of the CRC over it, twice."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as f:
        last = archive.infolist()[-1]
        f.seek(last.header_offset + 26)
        name, extra = struct.unpack("<HH", f.read(4))
        start = last.header_offset + 30 + name + extra
        f.seek(archive.start_dir)
        entry = archive.start_dir + f.read().rindex(b"PK\1\2")
    return [(start, 40), (start + 44, 4), (entry + 16, 4)]


def without(blocks: dict[int, bytes], places: list[tuple[int, int]]) -> dict[int, bytes]:
    """Blocks with some bytes zeroed."""
    out = {at: bytearray(block) for at, block in blocks.items()}
    for place, count in places:
        for at in range(place, place + count):
            block = at - at % 4096
            if block in out:
                out[block][at - block] = 0
    return {at: bytes(block) for at, block in out.items()}


def assert_reads_at_both_ends(path: Path, arrays: dict[str, Array]) -> None:
    back = torch.load(path, weights_only=True, mmap=True)["tensors"]
    with zipfile.ZipFile(path) as archive:
        sizes = [i.file_size for i in archive.infolist() if "/data/" in i.filename]
        assert sizes == [a.nbytes for a in arrays.values()]
        assert archive.read(archive.infolist()[-2]) == b"3\n"
    with tensorio.open(path, strict=True) as ours:
        for name, array in arrays.items():
            assert back[name].shape == array.shape == ours[f"tensors.{name}"].shape
            for part in (slice(0, 2), slice(-2, None)):
                assert np.array_equal(back[name][part].numpy(), array[part])
                assert np.array_equal(ours[f"tensors.{name}"][part], array[part])
    del back


def test_views_beyond_4_gib_share_their_storage(sparse_folder: Path) -> None:
    base = np.zeros(5 << 27, np.float64)
    base[0], base[-1] = 1, 2
    target = sparse_folder / "target.pt"
    with contextlib.closing(Sparse(target)) as f:
        tensorio.save({"w": base, "tail": base[-3:], "n": np.ones(2)}, f, format="torch_zip")
    back = torch.load(target, weights_only=True, mmap=True)
    assert back["w"].shape == base.shape
    assert pointers(back["w"], back["tail"]) == [0, (5 << 30) - 24]
    assert bits(back["w"][:2]) == base[:2].tobytes()
    assert bits(back["tail"]) == base[-3:].tobytes()
    assert bits(back["n"]) == np.ones(2).tobytes()
    with zipfile.ZipFile(target) as archive:
        assert archive.getinfo("archive/data/0").file_size == 5 << 30
    assert target.stat().st_blocks * 512 < 1 << 27


def test_more_than_65535_records_are_byte_identical() -> None:
    obj = [np.zeros(0, "u1")] + [np.full(1, i % 256, "u1") for i in range(65_600)]
    ours = saved(obj)
    assert masked(ours) == masked(saved_by_torch(through_torch(obj)))
    with zipfile.ZipFile(io.BytesIO(ours)) as archive:
        assert len(archive.namelist()) == 65_601 + 6
