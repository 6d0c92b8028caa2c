"""Seeds for the fuzz targets: small healthy and hostile files, made or copied when the fuzzing starts.

``seeds.py TARGET FOLDER`` fills the folder; nothing of it belongs into the repository.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import fractions
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import struct
import sys
import uuid
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import cases
import hexfile

LONGEST = {"json": 4096, "st_header": 4096, "zip_read": 32768, "tensor_ops": 1024}  # as run.sh has them


def files(*kinds: str, most: int = 1 << 16) -> Iterator[bytes]:
    """Small files of the shared folder, where there is one, whose path names one of these kinds."""
    shared = cases.shared_folder()
    if shared is None:
        return
    for part in ("corpus", "hostile/corpus"):
        for path in sorted((shared / part).rglob("*")):
            if not path.is_symlink() and path.is_file() and 0 < path.stat().st_size <= most:
                name = str(path.relative_to(shared))
                if any(kind in name for kind in kinds):
                    yield path.read_bytes()


def torch_objects() -> Iterator[Any]:
    """Objects in all the shapes that state dicts come in."""
    torch: Any
    try:
        import torch
    except ImportError:
        return
    base = torch.arange(24.0).reshape(4, 6)
    yield {"a": torch.arange(6.0), "b": base, "c": base.t(), "d": base[1:, ::2], "e": torch.tensor(3)}
    yield OrderedDict([("w", torch.nn.Parameter(base.clone())), ("x", torch.zeros(0, 3)),
                       ("y", torch.ones(2, dtype=torch.bfloat16))])  # fmt: skip
    yield [torch.zeros(4, dtype=torch.complex64).conj(), torch.zeros(3, dtype=torch.bool), base.half()]
    yield {"u16": torch.zeros(4, dtype=torch.uint16), "f8": torch.zeros(4).to(torch.float8_e4m3fn)}
    yield {"size": torch.Size([1, 2]), "device": torch.device("cuda:0"), "dtype": torch.float16, "set": {1, 2},
           "tuple": (1, (2, (3,))), "big": 1 << 80, "bytes": b"abc", "complex": 1j, "n": None, "f": 0.5}  # fmt: skip
    yield {"array": np.arange(5), "scalar": np.float64(3.5), "strings": np.array(["a", "bc"])}
    yield {f"layers.{i}.weight": torch.full((2,), float(i)) for i in range(60)}
    yield {f"view.{i}": base[i % 4] for i in range(40)}
    yield torch.zeros(2, 1, 3, 1, 2)
    yield from rare_tensors(torch, base)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    adam.step()
    yield {"model": model.state_dict(), "optimizer": adam.state_dict(), "epoch": 3}


def rare_tensors(torch: Any, base: Any) -> Iterator[Any]:
    """Tensors that are more than one block of numbers; kinds that this torch can't make are left out."""
    parts = [torch.ones(2, 3), torch.zeros(1, 3)]
    makers: list[Callable[[], Any]] = [
        base.to_sparse, base.to_sparse_csr, base.to_sparse_csc, lambda: base.to_sparse_bsr((2, 3)),
        lambda: torch.quantize_per_tensor(base, 0.5, 3, torch.quint8),
        lambda: torch.quantize_per_channel(base, torch.ones(4), torch.zeros(4), 0, torch.qint8),
        lambda: torch.nested.nested_tensor(parts), lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
        lambda: torch.empty(2, 3, device="meta"), lambda: torch.nn.parameter.UninitializedParameter(),
        lambda: torch.nn.Buffer(base), lambda: base.untyped_storage(), lambda: torch.zeros(2, dtype=torch.complex32),
        lambda: torch._neg_view(base), lambda: torch.nn.Linear(2, 2), lambda: np.array([(1, 2.0)], "i4,f8"),
        lambda: np.array([[1], None], object), lambda: np.asfortranarray(np.ones((2, 3))), lambda: np.ma.ones(2),
    ]  # fmt: skip
    for make in makers:
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            yield {"value": make()}


def plain_pickles() -> Iterator[bytes]:
    """Plain values of the standard library and arrays, by every protocol."""
    values = [
        datetime.datetime(2024, 5, 6, 7, 8, 9, 10, datetime.timezone.utc), datetime.timedelta(1, 2), datetime.date.min,
        decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.UUID(int=5), Path("a/b"), range(1, 9, 2), slice(1, 2),
        collections.deque([1, 2], 5), collections.defaultdict(list, a=[1]), collections.Counter("aab"), 1j, {1}, b"x",
        frozenset("ab"), argparse.Namespace(lr=0.5), bytearray(b"yz"), 1 << 2000, -(1 << 70), "\u20ac\n\x00", [[], ()],
        np.arange(6.0).reshape(2, 3), np.float32(2), np.dtype("f8"), np.array(["ab", "c"]), np.array([1, 2], ">i4"),
        {"model": {"w": np.zeros(3)}, "epoch": 3, "lr": 1e-3, "none": None, "flag": True},
    ]  # fmt: skip
    for value, protocol in itertools.product([*values, values], range(6)):
        with contextlib.suppress(Exception):
            yield pickle.dumps(value, protocol)


def torch_files() -> Iterator[bytes]:
    """What torch.save makes of them, by protocol and container; nothing without torch."""
    torch: Any
    for obj in torch_objects():
        import torch

        for protocol, zipped in itertools.product((2, 4), (True, False)):
            out = io.BytesIO()
            with warnings.catch_warnings(), contextlib.suppress(Exception):
                warnings.simplefilter("ignore")
                torch.save(obj, out, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
                yield out.getvalue()


def made_files(format: str) -> Iterator[bytes]:
    """The cases of a format that the tests know."""
    for name in cases.cases_of(format):
        try:
            yield cases.CASES[name]().data
        except BaseException as error:  # pytest's Skipped, where torch is not installed
            print(f"no seed {name}: {error}", file=sys.stderr)


def pickles() -> Iterator[bytes]:
    """The pickles in torch files of any kind."""
    for data in itertools.chain(torch_files(), made_files("torch"), files(".pt", ".pth", ".bin", ".ckpt")):
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                for name in archive.namelist():
                    if name.endswith(".pkl"):
                        yield archive.read(name)
        except Exception:
            if data[:1] == b"\x80":
                yield data  # a legacy stream, or a plain pickle


# --------------------------------------------------------------- by target


def zip_read() -> Iterator[bytes]:
    """Archives: torch's, zip tools', with every optional part."""
    yield from (data for data in torch_files() if data[:2] == b"PK")
    yield from made_files("torch_zip")
    yield from files("hostile/corpus/pt", ".npz", ".pt2", ".pte", most=LONGEST["zip_read"])
    yield from (d for d in files(".pt", ".pth", ".bin", most=LONGEST["zip_read"]) if d[:2] == b"PK")
    records = [hexfile.Rec("a", b"abc"), hexfile.Rec("b/", b""), hexfile.Rec("c", b"d" * 90, method=8)]
    for zip64, descriptor in itertools.product((True, False), repeat=2):
        for record in records:
            record.descriptor = record.pad = descriptor
        yield hexfile.zip_file(records, zip64=zip64, comment=b"note" * zip64, tail=b"tail" * descriptor)
    many = [hexfile.Rec(chr(33 + i % 90), bytes(i % 3), pad=False, descriptor=False) for i in range(300)]
    yield hexfile.zip_file(many)  # more than the reader passes at once
    wide = {"csize": 0xFFFFFFFF, "usize": 0xFFFFFFFF, "extra": struct.pack("<HHQQ", 1, 16, 3, 3)}
    yield hexfile.zip_file([hexfile.Rec("w", b"abc", central=wide, local=wide)])
    order = io.BytesIO()
    with zipfile.ZipFile(order, "w") as archive:
        for name in ("x", "y", "z"):
            archive.writestr(name, name * 9)
        archive.filelist.reverse()
        archive.comment = b"edited"
    yield order.getvalue()


def json_texts() -> Iterator[bytes]:
    """Headers of safetensors files, and a text for each rule."""
    for data in st_header():
        yield data[8 : 8 + int.from_bytes(data[:8], "little")]
    yield from files(".json", most=LONGEST["json"])
    yield from (json.dumps(value).encode() for value in (None, True, "", "é€😀\n\x01", [[[]]], {"a": {"b": [0]}}))
    yield from (b"1e308", b"-0.5E-3", b"[18446744073709551615,1.7976931348623157e308]", b'"\\ud83d\\ude00\\/\\b"')
    yield b"[" * 127 + b"]" * 127
    yield b'{"a":1,"a":[true,false,null]} '
    yield b"1" + b"0" * 400 + b"e-200"
    yield b"1.79769313486231581e308"  # rounds beyond a double, but not by serde_json's arithmetic


def st_header() -> Iterator[bytes]:
    """Safetensors files: healthy, hostile, and in the other spellings that the reference reads."""
    yield from made_files("safetensors")
    yield from files(".safetensors", most=LONGEST["st_header"])
    every = {code: hexfile.st_entry(code, (8,), i * 8, i * 8 + 8) for i, code in enumerate(cases.ST_CODES)}
    yield hexfile.st_file(every)
    yield hexfile.st_file('{"t":["U8",[1],[0,1]],"u":{"dtype":{"F32":null},"shape":[],"data_offsets":[1,5]}}', bytes(5))
    yield hexfile.st_file('{"__metadata__":null,"t":{"x":[{}],"shape":[0,2],"data_offsets":[0,0],"dtype":"I8"}}')
    yield hexfile.st_file('{"__metadata__":{},"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},'
                          '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', bytes(2))  # fmt: skip
    yield hexfile.st_file({"r": hexfile.st_entry("U8", (1,) * 64, 0, 1)}, b"x")


def tensor_ops() -> Iterator[bytes]:
    """Where the matcher is called in pickles by torch: behind the MARK of a tensor's arguments."""
    seen = 0
    for data in pickles():
        for spelling in {data, *respellings(data)}:
            at = spelling.find(b"((")
            for _ in range(20):
                if at >= 0:
                    yield spelling[at + 1 : at + 1 + 300]
                    seen += 1
                    at = spelling.find(b"((", at + 2)
    for rank in (64, 65):  # at the limit and beyond
        dims = b"(" + b"K\x01" * rank + b"tq\x07"
        yield b"(h\x01h\x02h\x05h\x03K\x0ctq\x06QK\x00" + dims * 2 + b"\x89h\x04)Rq\x09tq\x0aR"
    print(f"{seen} tensors", file=sys.stderr)


def respellings(data: bytes) -> Iterator[bytes]:
    """The same pickle with long memo opcodes, if it is one."""
    try:
        yield hexfile.respelled(data, memo="long")
    except Exception:
        return


def choices() -> Iterator[bytes]:
    """For targets that take their input as a list of choices."""
    rng = random.Random(0)
    yield from (rng.randbytes(n) for n in (8, 16, 32, 64, 128, 200) for _ in range(4))
    yield from (bytes([fill]) * 100 for fill in (0, 1, 0x7F, 0x80, 0xC3, 0xFF))


TARGETS: dict[str, Callable[[], Iterator[bytes]]] = {
    "json": json_texts, "st_header": st_header, "zip_read": zip_read, "tensor_ops": tensor_ops,
    "zip_write": choices, "crc32": choices,
}  # fmt: skip


def main(target: str, folder: str) -> None:
    """Write the seeds of a target, each under the digest of its bytes."""
    os.makedirs(folder, exist_ok=True)
    written = set()
    for data in TARGETS[target]():
        if len(data) <= LONGEST.get(target, 1024):
            name = hashlib.sha1(data).hexdigest()
            written.add(name)
            Path(folder, name).write_bytes(data)
    print(f"{target}: {len(written)} seeds", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
