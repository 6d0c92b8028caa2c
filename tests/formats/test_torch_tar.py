"""What is peculiar to tar torch files: the archive, storages inside others, tensors described beside the object."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import hexfile
import tensorio
from hexfile import mapping, name, number, numbers, pickled, text
from oldfiles import (
    BLOCK,
    INFO,
    pax_header,
    pax_line,
    tar_file,
    tar_header,
    tar_id,
    tar_member,
    tar_storages,
    tar_tensors,
    torch_tar,
)
from tensorio import HeaderError, TruncatedError, UnsafePickleError, UnsupportedError

W = np.arange(12, dtype="<f4")
STORAGES = tar_storages([(100, "FloatStorage", 12, W.tobytes())])
TENSORS = tar_tensors([(1, 100, "FloatTensor", (3, 4), (4, 1), 0)])
BODY = mapping({"w": tar_id(1)})
GOOD = torch_tar(BODY, STORAGES, TENSORS)
PARTS = {"sys_info": INFO, "pickle": pickled(BODY), "tensors": TENSORS, "storages": STORAGES}


def archive(parts: dict[str, bytes] | None = None, **members: bytes) -> bytes:
    """The good file with some members replaced."""
    return tar_file(*(tar_member(n, d) for n, d in ((parts or PARTS) | members).items()))


def by_tarfile(parts: dict[str, bytes], **options: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", **options) as tar:
        for member, data in parts.items():
            info = tarfile.TarInfo(member)
            info.size, info.mtime, info.uname, info.uid = len(data), 1487716561.25, "cheng", 1000  # type: ignore[assignment]
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


# ------------------------------------------------------------------- against torch


@pytest.mark.parametrize("case", cases.cases_of("torch_tar"))
def test_cases_are_what_torch_reads(case: str, tmp_path: Path) -> None:
    """It reads such files from a path only, and not as weights only; these were made here."""
    torch = pytest.importorskip("torch")
    made = cases.CASES[case]()
    path = tmp_path / "x.tar"
    path.write_bytes(made.data)
    tree = torch.load(path, weights_only=False)
    assert list(tree) == list(made.tensors)
    for key, want in made.tensors.items():
        if isinstance(tree[key], torch.Tensor):
            assert tree[key].tolist() == want.tolist()
            assert tree[key].stride() == tuple(s // want.itemsize for s in tensorio.load(path)[key].strides)
        else:  # a storage by itself
            assert tree[key]._untyped_storage.tolist() == list(want.tobytes())


def test_views_and_tied_tensors_share_their_bytes() -> None:
    tree = tensorio.load(cases.CASES["torch_tar_by_hand"]().data)
    assert np.shares_memory(tree["w"], tree["part"])
    twice = torch_tar(mapping({"a": tar_id(1), "b": tar_id(1), "c": tar_id(100)}), STORAGES, TENSORS)
    tree = tensorio.load(twice)
    assert tree["a"] is tree["b"]
    assert np.shares_memory(tree["a"], tree["c"])
    assert tree["c"].shape == (12,)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_archives_of_pythons_tarfile_read(format: int, tmp_path: Path) -> None:
    data = by_tarfile(PARTS, format=format)
    assert tensorio.identify(data) == "torch_tar"
    assert tensorio.load(data)["w"].tolist() == W.reshape(3, 4).tolist()


def test_arrays_are_views_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.t7"
    path.write_bytes(GOOD)
    with tensorio.open(path) as checkpoint:
        extent = checkpoint.infos["w"].chunks[0].extent
        assert extent.storage == 0
        assert GOOD[extent.offset : extent.offset + 48] == W.tobytes()
        array = checkpoint["w"]
        assert not array.flags.owndata
        assert array.flags.aligned == (array.__array_interface__["data"][0] % 4 == 0)


def test_big_endian_machine_swaps_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorio.formats import torch_tar as module

    monkeypatch.setattr(module, "BIG_ENDIAN_HOST", True)
    with tensorio.open(GOOD) as checkpoint:
        assert checkpoint["w"].tobytes() == tensorio.load(GOOD)["w"].tobytes() == W.byteswap().tobytes()


# --------------------------------------------------------------------------- tensors


def test_tensors_without_a_storage_or_without_elements_read() -> None:
    """A rank of 0 was no scalar then."""
    table = tar_tensors([(1, None, "FloatTensor", (), (), 0), (2, None, "cuda.LongTensor", (0,), (1,), 0),
                         (3, 100, "DoubleTensor", (), (), 0), (4, 100, "DoubleTensor", (2, 0), (3, 7), 0)])  # fmt: skip
    table = table.replace(b"ctorch\ncuda.", b"ctorch.cuda\n")
    storages = tar_storages([(100, "DoubleStorage", 0, b"")])
    tree = tensorio.load(torch_tar(b"](" + b"".join(map(tar_id, (1, 2, 3, 4))) + b"e", storages, table))
    assert [(a.shape, a.dtype.name) for a in tree] == [
        ((0,), "float32"), ((0,), "int64"), ((0,), "float64"), ((2, 0), "float64")
    ]  # fmt: skip


WRONG_TENSORS = {
    "too_long": ([(1, 100, "FloatTensor", (13,), (1,), 0)], "leaves its storage"),
    "offset": ([(1, 100, "FloatTensor", (12,), (1,), 1)], "leaves its storage"),
    "stride": ([(1, 100, "FloatTensor", (3, 4), (5, 1), 0)], "leaves its storage"),
    "negative_size": ([(1, 100, "FloatTensor", (-3, 4), (4, 1), 0)], "not negative"),
    "negative_stride": ([(1, 100, "FloatTensor", (3, 4), (4, -1), 0)], "not negative"),
    "negative_offset": ([(1, 100, "FloatTensor", (3, 4), (4, 1), -1)], "not negative"),
    "huge": ([(1, 100, "FloatTensor", (1 << 62, 1 << 62), (1, 1), 0)], "overflow|leaves"),
    "storage": ([(1, 101, "FloatTensor", (3,), (1,), 0)], "storage '101', which is not there"),
    "no_storage": ([(1, None, "FloatTensor", (3,), (1,), 0)], "leaves its storage"),
    "type": ([(1, 100, "DoubleTensor", (3,), (1,), 0)], "float64 is in a storage of float32"),
    "class": ([(1, 100, "FloatStorage", (3,), (1,), 0)], "class of a tensor"),
    "other_class": ([(1, 100, "WhateverTensor", (3,), (1,), 0)], "class of a tensor"),
    "twice": ([(1, 100, "FloatTensor", (3,), (1,), 0)] * 2, "have the key '1'"),
    "as_storage": ([(100, 100, "FloatTensor", (3,), (1,), 0)], "have the key '100'"),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "words"), WRONG_TENSORS.values(), ids=WRONG_TENSORS.keys())
def test_wrong_tensors_are_refused(tensors: Any, words: str) -> None:
    for read in (tensorio.open, tensorio.load):
        with pytest.raises(HeaderError, match=words):
            read(torch_tar(BODY, STORAGES, tar_tensors(tensors)))


WRONG_STORAGES = {
    "twice": (tar_storages([(1, "FloatStorage", 1, bytes(4))] * 2), "have the key '1'"),
    "short": (tar_storages([(1, "FloatStorage", 4, bytes(4))]), "expected 16 bytes, found 8"),
    "negative": (tar_storages([(1, "FloatStorage", -1, b"")]), "found -1"),
    "huge": (tar_storages([(1, "DoubleStorage", 1 << 62, b"")]), "found"),
    "class": (tar_storages([(1, "FloatParameter", 1, bytes(4))]), "FloatParameter"),
    "count": (tar_storages([], number_of=1), "expected [(]key"),
    "negative_count": (pickled(number(-1)), "the number of storages"),
    "text_count": (pickled(text("1")), "the number of storages"),
    "views": (tar_storages([], b"}"), "list of storages inside others"),
    "behind": (tar_storages([]) + b".", "found 1 more bytes"),
    "root": (tar_storages([(1, "FloatStorage", 4, bytes(16))], b"](" + numbers([2, 3, 0, 1]) + b"e"), "'3', which is"),
    "view_key": (tar_storages([(1, "FloatStorage", 4, bytes(16))], b"](" + numbers([1, 1, 0, 1]) + b"e"), "key '1'"),
    "outside": (tar_storages([(1, "FloatStorage", 4, bytes(16))], b"](" + numbers([2, 1, 3, 2]) + b"e"), "leaves"),
    "before": (tar_storages([(1, "FloatStorage", 4, bytes(16))], b"](" + numbers([2, 1, -1, 2]) + b"e"), "found '-1'"),
    "parts": (tar_storages([(1, "FloatStorage", 4, bytes(16))], b"](" + numbers([2, 1, 3]) + b"e"), "expected [(]key"),
}  # fmt: skip


@pytest.mark.parametrize(("storages", "words"), WRONG_STORAGES.values(), ids=WRONG_STORAGES.keys())
def test_wrong_storages_are_refused(storages: bytes, words: str) -> None:
    for read in (tensorio.open, tensorio.load):
        with pytest.raises((tensorio.FormatError, UnsafePickleError), match=words):
            read(torch_tar(b"}", storages, tar_tensors([])))


def test_storage_cut_short_says_what_is_there() -> None:
    with pytest.raises(TruncatedError, match="expected 48 bytes, found 40") as caught:
        tensorio.load(torch_tar(BODY, STORAGES[: STORAGES.index(W.tobytes()) + 40], TENSORS))
    assert caught.value.record == "storages"


@pytest.mark.parametrize("rank", [-1, 65, 1 << 30])
def test_rank_beyond_reason_is_refused(rank: int) -> None:
    table = bytearray(TENSORS)
    table[-48:-44] = rank.to_bytes(4, "little", signed=True)
    with pytest.raises(HeaderError, match=f"found {rank}"):
        tensorio.load(torch_tar(BODY, STORAGES, bytes(table)))


def test_unknown_persistent_id_is_refused() -> None:
    with pytest.raises(HeaderError, match="'77'"):
        tensorio.load(torch_tar(mapping({"w": tar_id(77)}), STORAGES, TENSORS))


# ------------------------------------------------------------------- the saved object


def test_whole_module_opens_as_inert_data() -> None:
    """Its persistent id tells the class, its file and its source."""
    pid = b"(" + name("models", "Net") + text("/home/x/models.py") + text("class Net:\n    raise SystemExit\n") + b"tQ"
    body = pid + b")\x81}" + text("weight") + tar_id(1) + b"sb"
    with pytest.raises(UnsafePickleError) as caught:
        tensorio.load(torch_tar(body, STORAGES, TENSORS))
    assert list(caught.value.globals) == ["models.Net"]
    tree = tensorio.load(torch_tar(body, STORAGES, TENSORS), unknown="opaque")
    assert (tree.module, tree.name) == ("models", "Net")
    assert tree.state["weight"].tolist() == W.reshape(3, 4).tolist()


def test_parameter_of_its_time_is_a_parameter() -> None:
    """``Parameter(tensor)``, and the flags as its state."""
    cls = name("torch.nn.parameter", "Parameter")
    body = mapping({"w": cls + tar_id(1) + b"\x85R\x88\x89N\x87b"})
    with tensorio.open(torch_tar(body, STORAGES, TENSORS)) as checkpoint:
        info = checkpoint.infos["w"]
        assert info.flags == tensorio.tensors.PARAMETER | tensorio.tensors.REQUIRES_GRAD
        assert checkpoint["w"].tolist() == W.reshape(3, 4).tolist()


def test_writers_of_storages_only_read() -> None:
    """No tensors beside the object, no list behind the storages: the object mentions them as later pickles do."""
    storage = b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + number(12) + b"t"
    tensor = name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + b"K\0" + numbers([3, 4]) + numbers([4, 1])
    body = mapping({"w": tensor + b"\x89" + hexfile.HOOKS + b"tR"})
    data = torch_tar(body, tar_storages([("0", "FloatStorage", 12, W.tobytes())], views=None))
    assert tensorio.load(data)["w"].tolist() == W.reshape(3, 4).tolist()


# ------------------------------------------------------------------------ the archive


def test_members_in_any_order_and_others_besides_read() -> None:
    data = tar_file(tar_member("storages", STORAGES), tar_member("notes/", b"", type=b"5"),
                    tar_member("notes/a.txt", b"hello"), tar_member("./pickle", pickled(BODY)),
                    tar_member("tensors", TENSORS))  # fmt: skip
    assert tensorio.load(data)["w"].shape == (3, 4)


@pytest.mark.parametrize("member", ["pickle", "storages"])
def test_missing_member_is_named(member: str) -> None:
    parts = {n: d for n, d in PARTS.items() if n != member}
    with pytest.raises(HeaderError, match=f"expected a member '{member}'"):
        tensorio.load(archive(parts))


def test_sizes_of_other_spellings_read() -> None:
    sizes = (b"%o" % len(STORAGES), b"%11o" % len(STORAGES), b"%o \0" % len(STORAGES),
             b"\x80" + len(STORAGES).to_bytes(11, "big"))  # fmt: skip
    for size in sizes:
        header = tar_header("storages", 0, size=size + bytes(12 - len(size)))
        data = tar_file(
            *(tar_member(n, PARTS[n]) for n in ("pickle", "tensors")), header + STORAGES.ljust(BLOCK, b"\0")
        )
        assert tensorio.load(data, format="torch_tar")["w"].shape == (3, 4)


def test_size_in_an_extended_header_counts() -> None:
    """How a member of over 8 GiB says so; both readings of a smaller one must not differ in silence."""
    line = pax_line("size", str(len(STORAGES)))
    header = tar_header("storages", 0)
    data = tar_file(*(tar_member(n, PARTS[n]) for n in ("pickle", "tensors")), pax_header(line), header,
                    STORAGES.ljust(BLOCK, b"\0"))  # fmt: skip
    assert tensorio.load(data)["w"].shape == (3, 4)


def more(*parts: bytes) -> bytes:
    """The good file with more members at its end."""
    return torch_tar(BODY, STORAGES, TENSORS, *parts)


REFUSED: dict[str, tuple[bytes, type, str]] = {
    "twice": (more(tar_member("pickle", pickled(b"}"))), HeaderError, "two members of one name"),
    "twice_with_dot": (more(tar_member("./pickle", pickled(b"}"))), HeaderError, "two members of one name"),
    "hard_link": (more(tar_member("x", b"", type=b"1", link=b"/etc/passwd")), UnsupportedError, "hard link"),
    "symbolic_link": (more(tar_member("x", b"", type=b"2", link=b"/etc")), UnsupportedError, "symbolic link"),
    "device": (more(tar_member("x", b"", type=b"3")), UnsupportedError, "device"),
    "fifo": (more(tar_member("x", b"", type=b"6")), UnsupportedError, "FIFO"),
    "sparse": (more(tar_member("x", b"", type=b"S")), UnsupportedError, "sparse"),
    "long_name": (more(tar_member("././@LongLink", b"pickle\0", type=b"L")), UnsupportedError, "long name"),
    "global_header": (more(tar_member("g", pax_line("path", "pickle"), type=b"g")), UnsupportedError, "all"),
    "other_type": (more(tar_member("x", b"", type=b"?")), UnsupportedError, "type '[?]'"),
    "absolute": (more(tar_member("/pickle", b"")), HeaderError, "relative name"),
    "upwards": (more(tar_member("a/../../pickle", b"")), HeaderError, "relative name"),
    "upwards_prefix": (more(tar_member("pickle", b"", prefix=b"..")), HeaderError, "relative name"),
    "no_name": (more(tar_member("", b"")), HeaderError, "relative name"),
    "renamed": (more(pax_header(pax_line("path", "pickle")), tar_member("x", b"")), UnsupportedError, "'path'"),
    "pax_sparse": (more(pax_header(pax_line("GNU.sparse.map", "0,1")), tar_member("x", b"")), UnsupportedError,
                   "GNU.sparse"),
    "pax_twice": (more(pax_header(pax_line("mtime", "1")) * 2, tar_member("x", b"")), HeaderError, "two ext"),
    "pax_alone": (more(pax_header(pax_line("mtime", "1"))), HeaderError, "without a member"),
    "pax_garbage": (more(pax_header(b"9 mtime=1\n"), tar_member("x", b"")), HeaderError, "lines of"),
    "pax_zero": (more(pax_header(b"0 a=b\n"), tar_member("x", b"")), HeaderError, "lines of"),
    "pax_long": (more(pax_header(b"99999 mtime=1\n"), tar_member("x", b"")), HeaderError, "lines of"),
    "pax_big": (more(pax_header(pax_line("comment", "x" * 70_000))), tensorio.LimitError, "at most 65536"),
    "pax_size_twice": (more(pax_header(pax_line("size", "0") * 2), tar_member("x", b"")), UnsupportedError, "size"),
    "checksum": (more(tar_member("x", b"", sum=b"012345\0 ")), HeaderError, "checksum"),
    "magic": (more(tar_member("x", b"", magic=b"ustaR")), HeaderError, "checksum"),
    "size_text": (more(tar_member("x", b"", size=b"12x")), HeaderError, "expected a number"),
    "size_negative": (more(tar_member("x", b"", size=b"\xff" * 12)), HeaderError, "expected a number"),
    "size_huge": (more(tar_member("x", b"", size=b"\x80" + b"\xff" * 11)), HeaderError, "over 2"),
    "size_beyond": (more(tar_member("x", b"", size=b"77777777777")), TruncatedError, "found 1024"),
    "one_zero_block": (torch_tar(BODY, STORAGES, TENSORS, end=bytes(BLOCK)), TruncatedError, "end of the archive"),
    "no_end": (torch_tar(BODY, STORAGES, TENSORS, end=b""), TruncatedError, "end of the archive"),
    "half_an_end": (torch_tar(BODY, STORAGES, TENSORS, end=bytes(BLOCK) + tar_member("x", b"")), HeaderError, "two "),
}  # fmt: skip


@pytest.mark.parametrize(("data", "error", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_archives_that_could_be_read_differently_are_refused(data: bytes, error: type, words: str) -> None:
    for read in (tensorio.open, tensorio.load):
        with pytest.raises(error, match=words) as caught:
            read(data)
        assert caught.value.offset is not None  # type: ignore[attr-defined]


def test_bytes_behind_the_end_are_harmless() -> None:
    assert tensorio.load(GOOD + bytes(8192) + b"anything")["w"].shape == (3, 4)


def test_many_members_are_refused_in_time() -> None:
    data = tar_file(*(tar_member(f"sys_info{i}" if i else "sys_info", b"") for i in range(5000)))
    with pytest.raises(tensorio.LimitError, match="over 4096 members"):
        tensorio.load(data)


def test_other_tar_archives_are_refused_by_name() -> None:
    for data in (by_tarfile({"hello.txt": b"x"}), by_tarfile({"hello.txt": b"x"}, format=tarfile.PAX_FORMAT)):
        with pytest.raises(tensorio.UnknownFormatError, match="tar archive"):
            tensorio.load(data)


# ---------------------------------------------------------------------------- the rest


def test_strict_refuses_what_nothing_writes_today() -> None:
    for read in (tensorio.open, tensorio.load):
        with pytest.raises(HeaderError, match="strict"):
            read(GOOD, strict=True)


def test_verify_says_that_there_is_nothing_to_check() -> None:
    report = tensorio.verify(GOOD)
    assert report.ok
    assert (report.records, report.checked, report.unchecked) == (1, 0, 48)


def test_converts_to_safetensors_and_to_zip(tmp_path: Path) -> None:
    for case in map(cases.CASES.__getitem__, cases.cases_of("torch_tar")):
        made = case()
        for suffix in (".safetensors", ".pt"):
            tensorio.convert(made.data, tmp_path / f"out{suffix}")
            with tensorio.open(tmp_path / f"out{suffix}", strict=True) as checkpoint:
                assert {k: a.tolist() for k, a in checkpoint.items()} == {
                    k: a.tolist() for k, a in made.tensors.items()
                }


def test_nothing_writes_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="read only"):
        tensorio.save({"a": np.ones(3)}, tmp_path / "x.tar", format="torch_tar")


def test_flips_anywhere_give_an_error_or_a_result() -> None:
    for at in range(len(GOOD)):
        for flip in (1, 0x80, 0xFF):
            data = bytearray(GOOD)
            data[at] ^= flip
            message = "a result, as far as that goes"
            try:
                tree = tensorio.load(bytes(data), format="torch_tar")
                assert all(isinstance(a, np.ndarray) and a.nbytes <= 48 for a in tree.values()), at
            except tensorio.TensorIOError as error:
                message = str(error)
            assert re.fullmatch(r"[\x20-\x7e]{10,500}", message), at
