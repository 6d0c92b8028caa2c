"""What a scan lists, against CPython's own readers, the corpora, and torch's writers."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import random
import struct
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import tensorio
from tensorio import _unpickler
from tensorio.allowlist import ALLOWED
from tensorio.scanning._walk import Walk, walk

ENTRIES = cases.corpus_entries()


def walked(data: bytes) -> Walk:
    return walk(memoryview(data), 0, lambda module, name: ("unknown", ""), lambda opcodes, at: True)


def named(data: bytes) -> set[tuple[str, str]]:
    return {(ref.module, ref.name) for ref in walked(data).refs}


def found(report: tensorio.ScanReport) -> set[str]:
    return {f"{f.module}.{f.name}" for f in report.findings if f.module}


def verdict(data: bytes) -> str:
    return tensorio.scan(data).verdict


# ------------------------------------------------------------------- CPython


class Stub:
    """Stands for every class and function: takes anything, does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> Stub:
        return self

    append = extend = add = __setitem__ = __setstate__ = __call__


def asked_for(reader: Any, data: bytes) -> tuple[list[tuple[str, str]], int | None]:
    """The names that one of CPython's readers looks up, and where it ended if it did well."""
    asked: list[tuple[str, str]] = []

    class Reader(reader):  # type: ignore[misc]
        def find_class(self, module: str, name: str) -> Any:
            asked.append((module, name))
            return type("Stub", (Stub,), {})

        def persistent_load(self, pid: object) -> Any:
            return Stub()

        def get_extension(self, code: int) -> Any:
            return Stub

    f = io.BytesIO(data)
    try:
        Reader(f).load()
    except Exception:
        return asked, None
    return asked, f.tell()


WORDS = (b"os", b"system", b"a", b"b.c", b"builtins", b"x")


def opcode(rng: random.Random) -> bytes:
    """One opcode with its operand, of those that names are made with more often than others."""
    word, other = rng.choice(WORDS), rng.choice(WORDS)
    short = b"\x8c" + bytes([len(word)]) + word
    return rng.choice([
        b"c" + word + b"\n" + other + b"\n", b"(i" + word + b"\n" + other + b"\n", short, short, short + b"\x94",
        short + b"q\5", b"X" + struct.pack("<I", len(word)) + word, b"V" + word + b"\n", b"S'" + word + b"'\n",
        b"U" + bytes([len(word)]) + word, short + b"\x8c\1z\x93", b"\x93", b"\x93",
        b"q" + bytes([rng.randrange(6)]), b"h" + bytes([rng.randrange(6)]), b"p%d\n" % rng.randrange(8),
        b"g%d\n" % rng.randrange(8), b"r" + struct.pack("<I", rng.randrange(8)),
        b"j" + struct.pack("<I", rng.randrange(8)), b"\x94", b"\x94", b"K\1", b"M\1\2", b"J\1\2\3\4", b"I1\n", b"L5L\n",
        b"\x8a\1\5", b"G" + b"\0" * 8, b"B\1\0\0\0z", b"C\2zz", b"\x8e\1" + b"\0" * 7 + b"z",
        b"\x96\1" + b"\0" * 7 + b"z", b"\x8d\2" + b"\0" * 7 + b"os",
        *(bytes([b]) for b in b"((((0012NRRbdd}}aelt]])oQsuutt\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92"),
    ])  # fmt: skip


@pytest.mark.parametrize("reader", [pickle.Unpickler, pickle._Unpickler], ids=["c", "python"])  # type: ignore[attr-defined]
@pytest.mark.parametrize("seed", range(3))
def test_every_name_that_cpython_looks_up_is_listed(reader: Any, seed: int) -> None:
    rng = random.Random(seed)
    ended = 0
    for _ in range(4000):
        data = b"".join(opcode(rng) for _ in range(rng.randrange(2, 20))) + b"."
        if rng.random() < 0.3:
            data = b"\x80" + bytes([rng.randrange(6)]) + data
        asked, end = asked_for(reader, data)
        found = walked(data)
        assert set(asked) <= {(ref.module, ref.name) for ref in found.refs} or found.odd, data
        if end is not None:
            ended += 1
            assert (found.end, found.error) == (end, None), data
    assert ended > 100


FRAMED = [b"cos\nsystem\n", b"\x8c\2os\x8c\6system\x93", b"X\2\0\0\0os\x8c\1x\x93", b"(ios\nx\n", b"N" * 5]


@pytest.mark.parametrize("reader", [pickle.Unpickler, pickle._Unpickler], ids=["c", "python"])  # type: ignore[attr-defined]
def test_frames_that_readers_understand_differently_are_errors(reader: Any) -> None:
    """What is in a frame is read at once or not; an operand that reaches over its end is not the same for both."""
    rng = random.Random(0)
    for _ in range(3000):
        body = b"".join(rng.choice(FRAMED) for _ in range(3))
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(body))
            body = body[:at] + b"\x95" + struct.pack("<Q", rng.randrange(len(body) - at + 9)) + body[at:]
        data = b"\x80\4" + body + b"."
        asked, _ = asked_for(reader, data)
        found = walked(data)
        assert set(asked) <= {(ref.module, ref.name) for ref in found.refs} or found.error is not None, data


OBJECTS = [
    {"a": [1, 2.5, "x", None, True], "b": (1, 2), 3: {4, 5}, "c": b"bytes", "d": 1 << 90},
    [io.StringIO, struct.Struct, Path, OSError, pickle.PickleError], np.float64(3), np.arange(5), np.dtype("f8"),
    np.array([None, OSError], object), Path("a/b"), range(5), slice(1, 2), complex(1, 2), type(None), Ellipsis, len,
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("number", range(len(OBJECTS)))
def test_names_and_offsets_are_those_of_pickletools(number: int, protocol: int) -> None:
    for data in (
        pickle.dumps(OBJECTS[number], protocol),
        pickletools.optimize(pickle.dumps(OBJECTS[number], protocol)),
    ):
        expected = names_by_pickletools(data)
        found = walked(data)
        assert found.error is None
        assert found.end == len(data)
        assert {(r.module, r.name): r.offset for r in found.refs} == expected
        assert sum(r.count for r in found.refs) == sum(
            op.name in ("GLOBAL", "INST", "STACK_GLOBAL") for op, _, _ in pickletools.genops(data)
        )


def names_by_pickletools(data: bytes) -> dict[tuple[str, str], int]:
    """First offset of each name: GLOBAL as it stands, STACK_GLOBAL by the last two strings pushed or fetched."""
    out: dict[tuple[str, str], int] = {}
    memo: dict[int, Any] = {}
    texts: list[Any] = []
    for op, arg, at in pickletools.genops(data):
        if op.name in ("GLOBAL", "INST"):
            module, _, name = arg.partition(" ")
            out.setdefault((module, name), at)
            texts.append(None)
        elif op.name == "STACK_GLOBAL":
            out.setdefault((texts[-2], texts[-1]), at)
            texts.append(None)
        elif op.name == "MEMOIZE":
            memo[len(memo)] = texts[-1]
        elif op.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[arg] = texts[-1]
        elif op.name in ("GET", "BINGET", "LONG_BINGET"):
            texts.append(memo[arg])
        elif op.name not in ("PROTO", "FRAME"):
            texts.append(arg if isinstance(arg, str) else None)
    return out


# ------------------------------------------------------------------- the corpus

# Files with pickles that the manifest's lister did not reach: in an array of objects of joblib's, packed, in bytes.
MORE = {
    "pytorch_1_13_1_dfsg_orig--conv_test_test_1x1_conv_zip", "joblib_joblib--joblib_0_11_0_pickle_py36_np111_pkl",
    "joblib_joblib--joblib_0_9_2_compressed_pickle_py34_np19_gz", "fizz_ml_pytorch_aux_reward_rl--ddpg_critic_t7",
    "methods_group_drdmannturb--EddyLifetimeType_CUSTOMMLP_DataType_KAIMAL_pkl",
}  # fmt: skip
SEALED = ("hdf5", "keras_v3_zip")
BROKEN = {"tracel_ai_burn--broken_pt"}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: str(e["id"]))
def test_the_corpus_names_what_its_manifest_says(entry: dict[str, Any], corpus: Path) -> None:
    report = tensorio.scan(corpus / entry["path"])
    names, expected = found(report), set(entry["globals"] or ())
    assert names >= expected
    assert names == expected or entry["id"] in MORE
    if entry["id"] in BROKEN:
        assert report.verdict == "unreadable"
    elif entry["format"] in SEALED:
        assert report.verdict == "unknown"
    else:
        assert not [f for f in report.findings if not f.module]
        known = {f"{module}.{name}" for module, name in ALLOWED}
        unknown = {
            n for n in names if n not in known and n.replace("__builtin__.xrange", "builtins.range") not in known
        }
        assert report.verdict == ("unknown" if unknown else "clean")


def test_the_corpus_is_there_in_numbers(corpus: Path) -> None:
    verdicts = [tensorio.scan(corpus / e["path"]).verdict for e in ENTRIES]
    assert len(verdicts) > 150
    assert verdicts.count("clean") > 140
    assert "dangerous" not in verdicts


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e["format"] in ("pickle", "torch_legacy")],
                         ids=lambda e: str(e["id"]))  # fmt: skip
def test_the_pickle_machine_meets_no_other_name(entry: dict[str, Any], corpus: Path) -> None:
    data = (corpus / entry["path"]).read_bytes()
    listed = {(f.module, f.name): f.offset for f in tensorio.scan(data).findings if f.module}
    at, seen = 0, 0
    while at < len(data):
        met, end, error = _unpickler.names(data, at)
        seen += len(met)
        for one in met:
            assert listed[one.module, one.name] <= at + one.offset
        if end is None or error is not None:
            break
        at = end
    assert seen or not entry["globals"]


# ------------------------------------------------------------------- hostile files


def hostile_cases(shared: Path) -> list[dict[str, Any]]:
    manifest = shared / "hostile" / "manifest.json"
    if not manifest.is_file():
        pytest.skip("no hostile corpus in the shared folder")
    listed: list[dict[str, Any]] = json.loads(manifest.read_text())["cases"]
    return [case for case in listed if case["setup"] is None]


def scan_case(shared: Path, case: dict[str, Any]) -> tensorio.ScanReport:
    path = shared / "hostile" / "corpus" / case["file"]
    return tensorio.scan(path.parent if case["kind"] in ("dcp", "sharded_index") else path)


def test_no_canary_is_called_clean(shared: Path) -> None:
    canaries = [c for c in hostile_cases(shared) if c["canary"] and c["kind"] != "gguf"]  # that one is a chat template
    verdicts = {c["file"]: scan_case(shared, c).verdict for c in canaries}
    assert len(verdicts) == 67
    assert [file for file, verdict in verdicts.items() if verdict == "clean"] == []
    assert sum(verdict == "dangerous" for verdict in verdicts.values()) >= 61


def test_hostile_files_end_in_a_report(shared: Path) -> None:
    listed = hostile_cases(shared)
    controls = []
    for case in listed:
        start = time.process_time()
        report = scan_case(shared, case)
        assert time.process_time() - start < 10, case["file"]
        if case["expect"] == "load" and case["kind"] != "dcp":
            controls.append(report.verdict)
        for finding in report.findings:
            assert len(finding.reason) <= 400
            assert finding.reason.isprintable()
    assert len(listed) > 500
    assert set(controls) == {"clean"}
    assert len(controls) > 10


# ------------------------------------------------------------------- torch's writers


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="the files are made by torch")


def saved(torch: Any, obj: object, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(obj, out, **options)
    return out.getvalue()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_what_torch_saves_of_models_is_clean(torch: Any, zipped: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Embedding(5, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model[:2](torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "lr": 1e-3, "rng": None}
    for obj in (model.state_dict(), optimizer.state_dict(), state, torch.ones(3).bfloat16(), [torch.arange(3)] * 2):
        data = saved(torch, obj, _use_new_zipfile_serialization=zipped)
        report = tensorio.scan(data)
        assert report.verdict == "clean", report.findings
        assert report.notes == ()
        assert tensorio.scan(data + b"\xff" * 9).notes


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_whole_models_name_their_classes(torch: Any, zipped: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.save can't find the source of a class made here
        data = saved(torch, torch.nn.Sequential(torch.nn.Linear(3, 4)), _use_new_zipfile_serialization=zipped)
    unknown = {f.name for f in tensorio.scan(data).findings if f.group == "unknown"}
    assert unknown == {"Sequential", "Linear"}
    assert tensorio.scan(data, allow=["torch.nn.*"]).verdict == "clean"


def test_torchscript_names_nothing_unknown(torch: Any) -> None:
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 3), torch.ones(1, 2)), out)
    report = tensorio.scan(out.getvalue())
    assert {f.group for f in report.findings if f.module.startswith("__torch__")} == {"harmless"}
    assert report.verdict == "clean"
    assert any("TorchScript code" in note for note in report.notes)


def test_packages_are_unknown(torch: Any) -> None:
    package = pytest.importorskip("torch.package")
    out = io.BytesIO()
    with package.PackageExporter(out) as exporter:
        exporter.save_text("a", "b.txt", "hello")
    report = tensorio.scan(out.getvalue())
    assert report.verdict == "unknown"
    assert "torch.package" in report.findings[0].reason


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_tensors_in_plain_pickles(torch: Any, protocol: int) -> None:
    report = tensorio.scan(pickle.dumps({"w": torch.ones(3), "n": np.ones(3)}, protocol))
    assert report.verdict == ("unknown" if protocol < 3 else "clean")  # protocol 2 has no bytes: they are computed
    if protocol >= 3:
        assert any(f.record.startswith("bytes at") for f in report.findings)


def test_numpy_files_of_objects(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", plain=np.arange(3), objects=np.array([{}, None, [1]], object))
    assert tensorio.scan(tmp_path / "a.npz").verdict == "clean"
    np.save(tmp_path / "b.npy", np.array([OSError, len], object), allow_pickle=True)
    report = tensorio.scan(tmp_path / "b.npy")
    assert {"builtins.OSError", "builtins.len"} <= found(report)
    assert report.verdict == "unknown"
