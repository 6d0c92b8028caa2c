"""Small files that ask for much memory or time: refused, or read in proportion to their size.

DESIGN.md P3: opening costs at most 64 MiB plus 32 times the pickle's bytes; P4: time is
linear in the file's size. Each file here goes to a child with little more than that.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import cases
import hexfile
import tensorio
from hexfile import Rec, name, number, pickled, tensor, text, torch_records, zip_file

MIB = 1 << 20
RAW = {"0": bytes(16)}

pytestmark = pytest.mark.plain_build
SECONDS = 10  # of CPU; each takes under 1, and minutes where cost grows with the square of the size


def high_water() -> int:
    """The most memory this process had resident so far, in bytes."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))


def reset_high_water() -> None:
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")


def look(data: bytes, act: str) -> tuple[str, int, float]:
    """What became of it, how much memory it took, and how much CPU."""
    reset_high_water()
    before, start = high_water(), time.process_time()
    try:
        if act == "load":
            tensorio.load(data, unknown="opaque")
        else:
            checkpoint = tensorio.open(data, unknown="opaque")
            if act == "names":
                len(checkpoint)
        verdict = "read"
    except tensorio.TensorIOError as error:
        assert len(str(error)) <= 500  # noqa: PT017
        verdict = type(error).__name__
    return verdict, high_water() - before, time.process_time() - start


def billion_laughs() -> bytes:
    """Ten references to a list of ten references to ... a tensor, forty levels."""
    body = b"(" + tensor() + b"q\x00" + b"1"
    for i in range(40):
        body += b"](" + (b"h" + bytes([i])) * 10 + b"eq" + bytes([i + 1]) + b"0"
    return pickled(body + b"h\x28")


def deep_names(depth: int, key: str) -> bytes:
    """A dict in a dict in a dict, with a tensor at every level: the names add up to depth squared."""
    start = tensor() + b"q\x00" + text(key) + b"q\x01" + text("t") + b"q\x02"
    level = b"}(h\x02h\x00h\x01"
    return pickled(b"(" + start + b"1" + level * depth + b"N" + b"u" * depth)


def long_names(key: int, levels: int, leaves: int) -> bytes:
    """One long key, used at each level of a short chain, over many leaves."""
    body = b"(" + tensor() + b"q\x00" + text("k" * key) + b"q\x01" + b"1"
    for _ in range(levels):
        body += b"}h\x01"
    body += b"](" + b"h\x00" * leaves + b"e" + b"s" * levels
    return pickled(body)


def key_bomb(levels: int) -> bytes:
    return pickled(b"}" + b")" + b"2\x86" * levels + b"Ns")


def complex_keys(count: int) -> bytes:
    """Keys that all have one hash: the hash of a complex number is that of its parts, added up."""
    cls = name("builtins", "complex") + b"q\x00"
    items = b"".join(
        b"h\x00" + _float(-sys.hash_info.imag * float(i)) + _float(float(i)) + b"\x86RN" for i in range(1, count)
    )
    return pickled(b"(" + cls + b"1}(" + items + b"u")


def _float(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def integer_keys(count: int) -> bytes:
    items = b"".join(number(i << 44) + b"N" for i in range(count))
    return pickled(b"}(" + items + b"u")


BOMBS: dict[str, Callable[[], bytes]] = {
    "nested_lists": lambda: pickled(b"]" * 200_000 + b"a" * 199_999),
    "nested_tuples": lambda: pickled(b")" + b"\x85" * 300_000),
    "nested_dicts": lambda: pickled(b"}" + b"K\x01}" * 100_000 + b"s" * 100_000),
    "marks": lambda: pickled(b"(" * 500_000),
    "doubled_tuples": lambda: pickled(b")" + b"2\x86" * 5000),
    "doubled_tuple_as_a_key": lambda: key_bomb(60),
    "deep_tuple_as_a_key": lambda: pickled(b"})" + b"\x85" * 200_000 + b"Ns"),
    "billion_laughs": lambda: billion_laughs(),
    "many_names": lambda: pickled(b"(" + b"".join(name("m", f"n{i}") + b"0" for i in range(50_000)) + b"t"),
    "long_name": lambda: pickled(name("m" * 3_000_000, "n")),
    "long_refused_line": lambda: pickled(name("m" * 300_000, "n must be x to load " * 10_000)),
    "text_of_one_mebibyte_a_thousand_times": lambda: pickled(
        b"(" + text("k" * MIB) + b"q\x00" + b"h\x00" * 1000 + b"t"
    ),
    "memo_slots": lambda: pickled(
        b"(" + b"".join(b"Nr" + i.to_bytes(4, "little") + b"0" for i in range(50_000)) + b"t"
    ),
    "integer_keys_of_one_low_half": lambda: integer_keys(60_000),
    "complex_keys_of_one_hash": lambda: complex_keys(30_000),
    "deep_names": lambda: deep_names(20_000, "k"),
    "long_names": lambda: long_names(60_000, 10, 20_000),
}


@pytest.mark.parametrize("act", ["open", "names", "load"])
@pytest.mark.parametrize("bomb", BOMBS)
def test_pickle_bomb_costs_no_more_than_its_size(bomb: str, act: str, in_child: Any) -> None:
    pickle = BOMBS[bomb]()
    data = hexfile.torch_file(pickle, RAW)
    allowed = 64 * MIB + 32 * len(pickle)
    verdict, memory, seconds = in_child(look, data, act, wall=60, memory=allowed + 512 * MIB)
    assert memory <= allowed, f"{verdict}: {memory >> 20} MiB for a pickle of {len(pickle) >> 10} KiB"
    assert seconds < SECONDS, f"{verdict}: {seconds:.1f} s for a pickle of {len(pickle) >> 10} KiB"


def test_deflated_bomb_is_refused_before_it_is_unpacked(in_child: Any) -> None:
    big = 1 << 30
    records = torch_records(pickled(tensor("0", big, (big,), cls="ByteStorage")), {"0": b""})
    records[4] = Rec("archive/data/0", bytes(4096), method=8, descriptor=False,
                     local={"usize": big}, central={"usize": big})  # fmt: skip
    verdict, memory, _ = in_child(look, zip_file(records), "load", memory=512 * MIB)
    assert (verdict, memory < 64 * MIB) == ("LimitError", True)


def test_deflated_pickle_bomb_is_refused(in_child: Any) -> None:
    records = torch_records(pickled(b"N"), RAW)
    records[0] = Rec("archive/data.pkl", pickled(b"(" + b"N" * (100 * MIB) + b"t"), method=8)
    verdict, memory, _ = in_child(look, zip_file(records), "load", memory=512 * MIB)
    assert (verdict, memory < 64 * MIB) == ("LimitError", True)


def test_opening_deflated_tensors_unpacks_none(in_child: Any) -> None:
    """64 MiB of zeros in 64 KiB: known when opened, unpacked when asked for."""
    big = 64 * MIB
    records = torch_records(pickled(tensor("0", big, (big,), cls="ByteStorage")), {"0": b""})
    records[4] = Rec("archive/data/0", bytes(big), method=8)
    verdict, memory, _ = in_child(look, zip_file(records), "names", memory=512 * MIB)
    assert (verdict, memory < 16 * MIB) == ("read", True)


@pytest.mark.parametrize("what", ["tensors", "metadata", "spaces", "escapes"])
def test_safetensors_header_costs_no_more_than_its_size(what: str, in_child: Any) -> None:
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = {
        "tensors": "{" + ",".join(f'"{i:x}":{entry}' for i in range(150_000)) + "}",
        "metadata": '{"__metadata__":{' + ",".join(f'"{i:x}":""' for i in range(500_000)) + "}}",
        "spaces": "{}" + " " * (20 * MIB),
        "escapes": '{"' + "\\u00e9" * MIB + f'":{entry}' + "}",
    }[what]
    data = hexfile.st_file(header)
    verdict, memory, seconds = in_child(look, data, "open", memory=1024 * MIB)
    # Half a million notes of six bytes each can't be had for twice their size.
    assert verdict == ("LimitError" if what == "metadata" else "read")
    assert memory < 64 * MIB + 2 * len(header)
    assert seconds < SECONDS


def test_view_of_2_40_elements_over_one_costs_nothing(in_child: Any) -> None:
    data = hexfile.torch_file(pickled(tensor(size=(1 << 40,), stride=(0,))), RAW)
    verdict, memory, _ = in_child(look, data, "load", memory=512 * MIB)
    assert (verdict, memory < 8 * MIB) == ("read", True)


def _prune(depth: int) -> Any:
    data = hexfile.torch_file(deep_names(depth, "k"), RAW)
    with tensorio.open(data) as checkpoint:
        last = list(checkpoint)[-1]
    return type(tensorio.load(data, names=[last])).__name__


def test_names_of_a_deep_tree_can_be_selected(in_child: Any) -> None:
    """Deeper than Python's own recursion goes."""
    assert in_child(_prune, 2000, memory=1024 * MIB) == "dict"


def test_control_healthy_file_passes_the_same_gate(in_child: Any) -> None:
    data = cases.plain_torch_bytes(cases.state_dict(2000))
    for act in ("open", "names", "load"):
        verdict, memory, seconds = in_child(look, data, act, memory=512 * MIB)
        assert verdict == "read"
        assert memory < 32 * MIB
        assert seconds < SECONDS
