"""The pickle machine: every opcode and every rule, on pickles written out by hand.

A failing pickle is written in caret style: one opcode per line with its note, and ``^`` at
the line whose offset the error must carry. Opcodes are those of ``Lib/pickletools.py``;
harmless pickles are compared with what `pickle.loads` makes of them.
"""

from __future__ import annotations

import collections
import contextlib
import pickle
import sys
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hexfile
import tensorio
from hexfile import annotated, caret
from tensorio import HeaderError, LimitError, TruncatedError, UnsafePickleError, UnsupportedError


def read(data: bytes, storages: dict[str, bytes] | None = None, **options: Any) -> Any:
    """Load a pickle as the object of a torch file."""
    return tensorio.load(hexfile.torch_file(data, storages), **options)


# ------------------------------------------------------------------ good ones

GOOD = {
    "none": '80 02 "N."',
    "bools": '80 02 88 89 86 "."',
    "binint1": '80 02 "K\\xff."',
    "binint2": '80 02 "M\\xff\\xff."',
    "binint_negative": '80 02 "J\\xff\\xff\\xff\\xff."',
    "long1_empty": '80 02 8a 00 "."',
    "long1_negative": '80 02 8a 02 00 80 "."',
    "long1_of_255_bytes": "80 02 8a ff" + " 11" * 255 + ' "."',
    "long4": '80 02 8b 09 00 00 00 01 02 03 04 05 06 07 08 09 "."',
    "binfloat": '80 02 "G" 3f f8 00 00 00 00 00 00 "."',
    "binunicode": '80 02 "X" 02 00 00 00 c3 a9 "."',
    "binunicode_empty": '80 02 "X" 00 00 00 00 "."',
    "short_binunicode": '80 04 8c 01 "a."',
    "binunicode8": '80 04 8d 01 00 00 00 00 00 00 00 "a."',
    "short_binstring": '80 02 "U" 01 "a."',
    "short_binbytes": '80 03 "C" 02 ff 00 "."',
    "binbytes": '80 03 "B" 01 00 00 00 ff "."',
    "binbytes8": '80 04 8e 01 00 00 00 00 00 00 00 ff "."',
    "empty_tuple": '80 02 ")."',
    "tuples": '80 02 "K" 01 85 "K" 02 86 "K" 03 "K" 04 87 "."',
    "tuple_of_a_mark": '80 02 "(K" 01 "K" 02 "t."',
    "empty_list_append_appends": '80 02 "]K" 01 "a(K" 02 "K" 03 "e."',
    "list_of_a_mark": '80 02 "(K" 01 "l."',
    "dict_setitem_setitems": '80 02 "}K" 01 "Ns(K" 02 "NK" 03 "Nu."',
    "empty_setitems": '80 02 "}(u."',
    "set_additems": '80 04 8f "(K" 01 "K" 02 90 "."',
    "pop": '80 02 "NK" 01 "0."',
    "pop_of_a_mark": '80 02 "N(0."',
    "pop_mark": '80 02 "N(K" 01 "K" 02 "1."',
    "dup": '80 02 "]2" 86 "."',
    "binput_binget": '80 02 "]q" 00 "h" 00 86 "."',
    "long_binput_binget": '80 02 "]r" 03 00 00 00 "j" 03 00 00 00 86 "."',
    "memoize": '80 04 "]" 94 "h" 00 86 "."',
    "memo_slot_set_twice": '80 02 "]q" 00 "0}q" 00 "h" 00 86 "."',
    "list_in_itself": '80 02 "]q" 00 "K" 01 "ah" 00 "a."',
    "frame": '80 04 95 02 00 00 00 00 00 00 00 "N."',
    "two_frames": '80 04 95 01 00 00 00 00 00 00 00 "N" 95 02 00 00 00 00 00 00 00 "0N" "."',
    "no_proto": '"N."',
    "protocol_5": '80 05 "N."',
    "bytes_behind_stop": '80 02 "N." "more"',
}


@pytest.mark.parametrize("source", GOOD.values(), ids=GOOD.keys())
def test_pickle_reads_like_the_standard_library(source: str) -> None:
    data = annotated(source)
    want = pickle.loads(data, encoding="utf-8")
    got = read(data)
    assert type(got) is type(want)
    assert repr(got) == repr(want)  # also where a list contains itself


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(max_size=300) | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.integers(-9, 9), inner,
                      max_size=4)
    | st.dictionaries(st.text("ab", max_size=4), inner, max_size=4).map(collections.OrderedDict)
    | st.sets(st.integers(-9, 9)) | st.dictionaries(st.text("ab"), st.integers(0, 9)).map(collections.Counter),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(values, st.integers(2, 5))
def test_pickle_of_plain_values_reads_like_the_standard_library(value: Any, protocol: int) -> None:
    assert shown(read(pickle.dumps(value, protocol))) == shown(value)


def shown(value: Any) -> Any:
    """Types and values all the way down (NaN equal to itself, sets in any order)."""
    if isinstance(value, dict):
        return type(value), [(shown(k), shown(v)) for k, v in value.items()]
    if isinstance(value, set):
        return type(value), sorted(map(repr, value))
    if isinstance(value, list | tuple):
        return type(value), [shown(v) for v in value]
    return repr(value)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("value", [b"", b"abc\xff", bytearray(b"xyz"), bytearray(), {1, "a"}, 1j, {"s": {1.5, None}},
                                   collections.OrderedDict(a=1), collections.Counter("hello")], ids=type)  # fmt: skip
def test_pickle_of_allowed_classes_reads_like_the_standard_library(value: Any, protocol: int) -> None:
    got = read(pickle.dumps(value, protocol))
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("value", [frozenset([1, 2]), frozenset()], ids=repr)
def test_pickle_of_frozenset_reads_like_the_standard_library(value: frozenset[int]) -> None:
    assert read(pickle.dumps(value, 2)) == value


def test_pickle_of_python2_ordered_dict_reads_its_pairs() -> None:
    pairs = b"](" + hexfile.numbers([1, 2]) + b"]" + b"(K\x03K\x04ee"
    got = read(hexfile.pickled(hexfile.name("collections", "OrderedDict") + pairs + b"\x85R"))
    assert got == collections.OrderedDict([(1, 2), (3, 4)])


def test_pickle_attributes_of_an_ordered_dict_are_kept() -> None:
    value = collections.OrderedDict(a=1)
    value._metadata = {"version": 2}  # type: ignore[attr-defined]
    assert vars(read(pickle.dumps(value, 2))) == {"_metadata": {"version": 2}}


def test_pickle_dtype_device_and_size_become_plain_words() -> None:
    body = b"(" + hexfile.name("torch", "float32") + hexfile.name("torch", "long")
    body += hexfile.name("torch", "device") + hexfile.text("cuda:1") + b"\x85R"
    body += hexfile.name("torch", "Size") + hexfile.numbers([2, 3]) + b"\x85Rt"
    f32, i64, device, size = read(hexfile.pickled(body))
    assert (f32, i64, device, size) == ("float32", "int64", ("cuda", 1), (2, 3))
    assert type(f32) is tensorio.TorchDType
    assert type(i64) is tensorio.TorchDType
    assert type(device) is tensorio.Device
    assert type(size) is tensorio.Size


F16 = hexfile.name("torch", "float16")


@pytest.mark.parametrize("body", [b"]" + F16 + b"a", F16 + b"\x85", b"(" + F16 + b"l", b"}(K\x01" + F16 + b"u",
                                  b"}" + F16 + b"Ns", b"\x8f(" + F16 + b"\x90"],
                         ids=["list", "tuple", "list_of_a_mark", "value", "key", "set"])  # fmt: skip
def test_pickle_dtype_in_a_container_is_a_plain_word(body: bytes) -> None:
    tree = read(hexfile.pickled(body, 4))
    (inner,) = [x for x in (*tree, *getattr(tree, "values", tuple)()) if x not in (1, None)]
    assert type(inner) is tensorio.TorchDType
    assert inner == "float16"


@pytest.mark.parametrize("body", [b"%s", b"]%sa", b"}K\x01%ss", b"%s\x85"], ids=["root", "list", "value", "tuple"])
def test_pickle_storage_without_a_tensor_is_no_private_object(body: bytes) -> None:
    """torch.save of a bare storage: what comes back is public, or it is refused with words."""
    data = hexfile.torch_file(
        hexfile.pickled(body.replace(b"%s", hexfile.storage("FloatStorage", "0", 4))), {"0": bytes(16)}
    )
    try:
        tree = tensorio.load(data)
    except (HeaderError, UnsupportedError) as error:
        assert "storage" in str(error)  # noqa: PT017
        return
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else [tree]:
        assert not type(part).__module__.startswith("tensorio._")


# ---------------------------------------------------------------- damaged ones

BAD = [
    # the stack
    ("tuple1_of_nothing", "80 02          ; PROTO\n^ 85  ; TUPLE1", HeaderError, "too few items"),
    ("tuple2_of_one", '80 02 "N"      ; one item\n^ 86', HeaderError, "too few items"),
    ("tuple3_of_two", '80 02 "NN"\n^ 87', HeaderError, "too few items"),
    ("tuple1_below_a_mark", '80 02 "N("     ; the item is below the mark\n^ 85', HeaderError, "too few items"),
    ("reduce_of_nothing", '80 02\n^ "R"', HeaderError, "too few items"),
    ("reduce_without_callee", '80 02 ")"\n^ "R"', HeaderError, "too few items"),
    ("build_of_one", '80 02 "}"\n^ "b"', HeaderError, "too few items"),
    ("newobj_of_one", '80 02 ")"\n^ 81', HeaderError, "too few items"),
    ("append_to_nothing", '80 02 "N"\n^ "a"', HeaderError, "too few items"),
    ("setitem_of_two", '80 02 "NN"\n^ "s"', HeaderError, "too few items"),
    ("binpersid_of_nothing", '80 02\n^ "Q"', HeaderError, "too few items"),
    ("dup_of_nothing", '80 02\n^ "2"', HeaderError, "too few items"),
    ("pop_of_nothing", '80 02\n^ "0"', HeaderError, "too few items"),
    ("binput_of_nothing", '80 02\n^ "q" 00', HeaderError, "too few items"),
    ("memoize_of_nothing", "80 04\n^ 94", HeaderError, "too few items"),
    ("stack_global_of_one", '80 04 8c 01 "a"\n^ 93', HeaderError, "too few items"),
    # marks
    ("tuple_without_mark", '80 02 "N"\n^ "t"', HeaderError, "no open mark"),
    ("list_without_mark", '80 02\n^ "l"', HeaderError, "no open mark"),
    ("appends_without_mark", '80 02 "]"\n^ "e"', HeaderError, "no open mark"),
    ("setitems_without_mark", '80 02 "}"\n^ "u"', HeaderError, "no open mark"),
    ("additems_without_mark", "80 04 8f\n^ 90", HeaderError, "no open mark"),
    ("pop_mark_without_mark", '80 02 "N"\n^ "1"', HeaderError, "no open mark"),
    ("setitems_with_nothing_below", '80 02 "(NN"\n^ "u"', HeaderError, "no mapping below"),
    ("appends_with_nothing_below", '80 02 "(N"\n^ "e"', HeaderError, "no list below"),
    ("additems_with_nothing_below", '80 04 "(N"\n^ 90', HeaderError, "no set below"),
    ("appends_past_an_outer_mark", '80 02 "]((N"\n^ "e"', HeaderError, "no list below"),
    ("stop_within_a_mark", '80 02 "N("\n^ "."', HeaderError, "more or less than one object"),
    ("stop_of_nothing", '80 02\n^ "."', HeaderError, "more or less than one object"),
    ("stop_of_two", '80 02 "NN"\n^ "."', HeaderError, "more or less than one object"),
    # targets
    ("append_to_a_tuple", '80 02 ")N"\n^ "a"', HeaderError, "expected a list, found tuple"),
    ("append_to_a_dict", '80 02 "}N"\n^ "a"', HeaderError, "expected a list, found dict"),
    ("appends_to_none", '80 02 "N(N"\n^ "e"', HeaderError, "expected a list"),
    ("setitem_on_a_list", '80 02 "]NN"\n^ "s"', HeaderError, "expected a dict, found list"),
    ("setitems_on_a_set", '80 04 8f "(NN"\n^ "u"', HeaderError, "expected a dict, found set"),
    ("setitems_of_three", '80 02 "}(NNN"\n^ "u"', HeaderError, "in pairs"),
    ("additems_to_a_list", '80 04 "](N"\n^ 90', HeaderError, "expected a set, found list"),
    ("reduce_of_an_int", '80 02 "K" 01 ")"\n^ "R"', HeaderError, "something to call, found int"),
    ("reduce_with_a_list", '80 02 "ccollections\\nOrderedDict\\n" "]"\n^ "R"', HeaderError, "tuple of arguments"),
    ("build_on_a_dict", '80 02 "}}"\n^ "b"', HeaderError, "takes a state"),
    ("build_on_a_name", '80 02 "ccollections\\nOrderedDict\\n" "}"\n^ "b"', HeaderError, "takes a state"),
    ("build_with_a_tuple", '80 02 "ccollections\\nOrderedDict\\n" ")R" ")"\n^ "b"', HeaderError, "dict of attributes"),
    (
        "build_hides_a_method",
        '80 02 "ccollections\\nOrderedDict\\n" ")R" "}X" 05 00 00 00 "itemsNs"\n^ "b"',
        HeaderError,
        "attribute 'items'",
    ),
    (
        "build_sets_the_class",
        '80 02 "ccollections\\nOrderedDict\\n" ")R" "}X" 09 00 00 00 "__class__Ns"\n^ "b"',
        HeaderError,
        "attribute '__class__'",
    ),
    ("stack_global_of_ints", '80 04 "K" 01 "K" 02\n^ 93', HeaderError, "two strings"),
    ("stack_global_of_bytes", '80 04 "C" 01 "aC" 01 "b"\n^ 93', HeaderError, "two strings"),
    # the memo
    ("binget_never_set", '80 02\n^ "h" 00 "."', HeaderError, "never set"),
    ("long_binget_never_set", '80 02\n^ "j" ff ff ff ff "."', HeaderError, "never set"),
    ("binget_of_a_hole", '80 02 "Nr" 05 00 00 00\n^ "h" 04 "."', HeaderError, "never set"),
    ("long_binput_too_far", '80 02 "N"\n^ "r" ff ff ff 7f "."', LimitError, "memo slot 2147483647"),
    ("long_binput_just_too_far", '80 02 "N"\n^ "r" 0a 00 00 00 "."', LimitError, "memo slot 10 in a pickle of 9 bytes"),
    # lengths
    ("binunicode_too_long", '80 02\n^ "X" 05 00 00 00 "abc."', TruncatedError, "runs past the end"),
    ("binunicode_of_4_gib", '80 02\n^ "X" ff ff ff ff "abc."', TruncatedError, "runs past the end"),
    ("short_binunicode_too_long", '80 04\n^ 8c 05 "abc."', TruncatedError, "runs past the end"),
    ("binunicode8_of_2_63", '80 04\n^ 8d 00 00 00 00 00 00 00 80 "."', TruncatedError, "runs past the end"),
    ("binunicode8_of_2_64", '80 04\n^ 8d ff ff ff ff ff ff ff ff "."', TruncatedError, "runs past the end"),
    ("short_binstring_too_long", '80 02\n^ "U" 05 "abc."', TruncatedError, "runs past the end"),
    ("short_binbytes_too_long", '80 03\n^ "C" ff "abc."', TruncatedError, "runs past the end"),
    ("binbytes_of_2_gib", '80 03\n^ "B" 00 00 00 80 "."', TruncatedError, "runs past the end"),
    ("binbytes8_of_2_64", '80 04\n^ 8e ff ff ff ff ff ff ff ff "."', TruncatedError, "runs past the end"),
    ("long1_too_long", "80 02\n^ 8a 08 01 02 03", TruncatedError, "runs past the end"),
    ("long4_over_255_bytes", "80 02\n^ 8b 00 01 00 00" + " 01" * 256 + ' "."', LimitError, "integer of 256 bytes"),
    ("long4_negative", '80 02\n^ 8b ff ff ff ff "."', LimitError, "integer of"),
    ("binfloat_cut", '80 02\n^ "G" 3f f8', TruncatedError, "runs past the end"),
    ("binint_cut", '80 02\n^ "J" 01 02', TruncatedError, "runs past the end"),
    ("binint2_cut", '80 02\n^ "M" 01', TruncatedError, "runs past the end"),
    ("binint1_cut", '80 02\n^ "K"', TruncatedError, "runs past the end"),
    ("binput_cut", '80 02 "N"\n^ "q"', TruncatedError, "runs past the end"),
    ("global_without_newline", '80 02\n^ "ccollections OrderedDict"', TruncatedError, "runs past the end"),
    ("global_with_one_line", '80 02\n^ "ccollections\\nOrderedDict"', TruncatedError, "runs past the end"),
    ("proto_cut", "^ 80", TruncatedError, "runs past the end"),
    ("frame_past_the_end", '80 04\n^ 95 03 00 00 00 00 00 00 00 "N."', TruncatedError, "runs past the end"),
    ("frame_of_2_64", '80 04\n^ 95 ff ff ff ff ff ff ff ff "N."', TruncatedError, "runs past the end"),
    ("frame_ends_in_an_opcode", '80 04 95 01 00 00 00 00 00 00 00\n^ "K" 01 "."', HeaderError, "frame ends inside"),
    ("no_stop", '80 02 "N"\n^', TruncatedError, "ends before its STOP"),
    ("empty", "^", TruncatedError, "ends before its STOP"),
    # text
    ("binunicode_not_utf8", '80 02\n^ "X" 01 00 00 00 ff "."', HeaderError, "expected UTF-8"),
    ("binunicode_surrogate", '80 02\n^ "X" 03 00 00 00 ed a0 80 "."', HeaderError, "expected UTF-8"),
    ("short_binunicode_overlong", '80 04\n^ 8c 02 c0 80 "."', HeaderError, "expected UTF-8"),
    ("global_not_utf8", '80 02\n^ "cos" ff "\\nsystem\\n."', HeaderError, "not UTF-8"),
    ("stack_global_with_a_newline", '80 04 8c 05 "os\\nos" 8c 01 "x"\n^ 93 "."', HeaderError, "newline"),
    # keys
    ("key_list", '80 02 "}]N"\n^ "s"', HeaderError, "key of a plain type, found list"),
    ("key_dict", '80 02 "}}N"\n^ "s"', HeaderError, "key of a plain type, found dict"),
    ("key_tuple_with_a_list", '80 02 "}(]tN"\n^ "s"', HeaderError, "key of a plain type, found list"),
    ("key_set", '80 04 "}" 8f "N"\n^ "s"', HeaderError, "key of a plain type"),
    ("key_int_of_61_bits", '80 02 "}" 8a 08 ff ff ff ff ff ff ff 1f "N"\n^ "s."', LimitError, "61 bits"),
    ("key_int_of_minus_61_bits", '80 02 "}" 8a 08 01 00 00 00 00 00 00 e0 "N"\n^ "s."', LimitError, "61 bits"),
    ("key_int_of_100_bytes", "80 02 8f 8a 64" + " 11" * 100 + '\n^ "a"', HeaderError, "expected a list"),
    ("set_element_int_of_100_bytes", '80 04 8f "(" 8a 64' + " 11" * 100 + "\n^ 90", LimitError, "61 bits"),
    ("key_tuple_10_deep", '80 02 "})' + '" 85 "' * 10 + 'N"\n^ "s"', LimitError, "8 levels"),
    ("key_tuple_of_70", '80 02 "}(' + "N" * 70 + 'tN"\n^ "s"', LimitError, "64 parts"),
    ("key_twice", '80 02 "}(K" 01 "NK" 01 "N"\n^ "u"', HeaderError, "occurs twice"),
    ("key_twice_in_two_batches", '80 02 "}K" 01 "NsK" 01 "N"\n^ "s"', HeaderError, "occurs twice"),
    ("key_twice_by_equality", '80 02 "}(K" 01 "N" 88 "N"\n^ "u"', HeaderError, "occurs twice"),
    ("key_twice_text", '80 02 "}(X" 01 00 00 00 "aNX" 01 00 00 00 "aN"\n^ "u"', HeaderError, "occurs twice"),
    # protocol
    ("protocol_6", '^ 80 06 "N."', HeaderError, "protocol 5 or less, found 6"),
    ("protocol_255", '^ 80 ff "N."', HeaderError, "protocol 5 or less, found 255"),
]


@pytest.mark.parametrize(("source", "kind", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_pickle_damaged_is_refused_at_its_byte(source: str, kind: type[Exception], words: str) -> None:
    data, offset = caret(source)
    with pytest.raises(kind) as caught:
        read(data)
    error = caught.value
    assert words in str(error)
    assert (error.offset, error.record) == (offset, "archive/data.pkl")  # type: ignore[attr-defined]


@pytest.mark.parametrize("op", [b"\x97", b"\x98"], ids=["NEXT_BUFFER", "READONLY_BUFFER"])
def test_pickle_with_buffers_outside_of_the_file_is_refused(op: bytes) -> None:
    with pytest.raises(UnsupportedError, match=f"0x{op[0]:02x}") as caught:
        read(b"\x80\x05N" + op + b".")
    assert caught.value.offset == 3


@pytest.mark.parametrize("op", [b"\xff", b"\0", b"A", b"\x99"])
def test_pickle_opcode_that_is_none_is_named(op: bytes) -> None:
    with pytest.raises(HeaderError, match=f"0x{op[0]:02x}: no pickle has such an opcode") as caught:
        read(b"\x80\x02N" + op + b".")
    assert caught.value.offset == 3


def test_pickle_many_tuple_keys_are_refused() -> None:
    items = b"".join(hexfile.number(i) + b"\x85N" for i in range(5000))
    with pytest.raises(LimitError, match="tuples as keys"):
        read(hexfile.pickled(b"}(" + items + b"u"))


def test_pickle_cut_anywhere_is_refused() -> None:
    value = {"a": [1, 2.5, "text", (None, True, 1 << 70)], "b": collections.OrderedDict(x=b"bytes"), "c": {1, 2}}
    for protocol in (2, 4):
        data = pickle.dumps(value, protocol)
        for n in range(len(data)):
            with pytest.raises((TruncatedError, UnsafePickleError)):
                read(data[:n])


# --------------------------------------------------------------- refused names


@pytest.fixture
def canary(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A module whose every function leaves a trace; what it hands out is empty as long as nothing ran."""
    ran: list[str] = []

    class Meta(type):
        def __call__(cls, *args: Any) -> Any:
            ran.append("called")
            return super().__call__(*args)

    class Bird(metaclass=Meta):
        def __setstate__(self, state: Any) -> None:
            ran.append("state")

        def __reduce__(self) -> Any:
            return (Bird, (1,), {"x": 2}, iter([3]), iter([(4, 5)]))

    module = types.ModuleType("canary")
    module.Bird, Bird.__module__, Bird.__qualname__ = Bird, "canary", "Bird"  # type: ignore[attr-defined]
    module.sing = lambda *a: ran.append("sang")  # type: ignore[attr-defined]
    module.__getattr__ = lambda name: ran.append(f"asked for {name}")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "canary", module)
    return ran


CALLS = {
    "reduce": hexfile.name("canary", "sing") + b"K\x01\x85R",
    "newobj": hexfile.name("canary", "Bird") + b")\x81",
    "stack_global": b"\x8c\x06canary\x8c\x04sing\x93)R",
    "dotted": b"\x8c\x06canary\x8c\x0dBird.__init__\x93)R",
    "build": hexfile.name("canary", "Bird") + b")\x81}b",
    "popped": hexfile.name("canary", "sing") + b")R0N",
    "never_used": hexfile.name("canary", "sing") + b"0N",
    "key": b"}" + hexfile.name("canary", "sing") + b")RNs",
}


@pytest.mark.parametrize("body", CALLS.values(), ids=CALLS.keys())
def test_pickle_of_a_foreign_name_is_refused_and_nothing_runs(canary: list[str], body: bytes) -> None:
    with pytest.raises(UnsafePickleError, match="canary"):
        read(hexfile.pickled(body, 4))
    assert canary == []


@pytest.mark.parametrize("body", CALLS.values(), ids=CALLS.keys())
def test_pickle_of_a_foreign_name_runs_nothing_as_opaque(canary: list[str], body: bytes) -> None:
    before = set(sys.modules)
    read(hexfile.pickled(body, 4), unknown="opaque")
    assert canary == []
    assert set(sys.modules) == before


@pytest.mark.parametrize("module", ["antigravity", "this", "idlelib.pyshell", "no.such.module"])
def test_pickle_imports_no_module(module: str) -> None:
    sys.modules.pop(module, None)
    for unknown in ("error", "opaque"):
        with contextlib.suppress(UnsafePickleError):
            read(hexfile.pickled(hexfile.name(module, "x") + b")R"), unknown=unknown)
        assert module not in sys.modules


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("torch._utils", "_rebuild_tensor_v2 "),
        ("torch._utils", "_Rebuild_tensor_v2"),
        (" torch._utils", "_rebuild_tensor_v2"),
        ("torch", "_utils._rebuild_tensor_v2"),
        ("torch._utils._rebuild_tensor_v2", ""),
        ("", "OrderedDict"),
        ("collections.OrderedDict", "OrderedDict"),
        ("collections", "OrderedDict.fromkeys"),
        ("collections", "OrderedDict\0"),
        ("collections\0", "OrderedDict"),
        ("os\0x", "system"),
        ("torch", "XStorage"),
        ("torch.evil", "FloatStorage"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("__builtin__", "exec"),
        ("torch.storage", "_load_from_byte"),
        ("numpy", "load"),
        ("numpy.dtypes", "Float64DType"),
        ("_codecs", "decode"),
    ],
)
def test_pickle_names_are_matched_exactly(module: str, attribute: str) -> None:
    stack = hexfile._short(module) + hexfile._short(attribute) + b"\x93"
    for name in (hexfile.name(module, attribute), stack):
        with pytest.raises(UnsafePickleError) as caught:
            read(hexfile.pickled(name, 4))
        assert caught.value.globals == (f"{module}.{attribute}",)
        assert str(caught.value).isprintable()


def test_pickle_refusal_lists_all_names_once_and_in_order() -> None:
    body = b"".join(hexfile.name("evil", n) + b"0" for n in ("one", "two", "one", "three", "two")) + b"N"
    with pytest.raises(UnsafePickleError) as caught:
        read(hexfile.pickled(body))
    assert caught.value.globals == ("evil.one", "evil.two", "evil.three")


def test_pickle_refusal_comes_before_the_damage_behind_it() -> None:
    with pytest.raises(UnsafePickleError) as caught:
        read(hexfile.pickled(hexfile.name("evil", "one") + b"0\xff"))
    assert caught.value.globals == ("evil.one",)


def test_pickle_refusal_is_one_short_line_whatever_the_names() -> None:
    body = b"".join(hexfile.name("m" * 5000 + "\x1b[31m", f"n{i}") + b"0" for i in range(50)) + b"N"
    with pytest.raises(UnsafePickleError) as caught:
        read(hexfile.pickled(body))
    assert len(str(caught.value)) <= 500
    assert str(caught.value).isprintable()
    assert len(caught.value.globals) == 50


# --------------------------------------------------------------------- opaque


def test_opaque_keeps_what_the_pickle_says() -> None:
    body = annotated('"cm\\nC\\n"  ; GLOBAL\n "K" 01 85 "R" ; C(1)\n "}X" 01 00 00 00 "aK" 02 "sb" ; its state\n'
                     ' "K" 03 "a(K" 04 "K" 05 "e" ; appended\n "K" 06 "K" 07 "s" ; an item set')  # fmt: skip
    got = read(hexfile.pickled(body), unknown="opaque")
    assert type(got) is tensorio.Opaque
    assert (got.module, got.name, got.args, got.state) == ("m", "C", (1,), {"a": 2})
    assert got.items == [3, 4, 5, (6, 7)]


def test_opaque_name_without_a_call_has_no_args() -> None:
    got = read(hexfile.pickled(hexfile.name("m", "C")), unknown="opaque")
    assert (got.module, got.name, got.args) == ("m", "C", None)


def test_opaque_calls_of_one_class_are_separate_objects() -> None:
    body = b"(" + (hexfile.name("m", "C") + b")R") * 2 + b"t"
    one, two = read(hexfile.pickled(body), unknown="opaque")
    assert one is not two


def test_opaque_tensors_inside_are_tensors() -> None:
    body = hexfile.name("m", "C") + b")\x81" + hexfile.mapping({"w": hexfile.tensor()}) + b"b"
    data = hexfile.torch_file(hexfile.pickled(body), {"0": np.arange(4, dtype="f4").tobytes()})
    with tensorio.open(data, unknown="opaque") as checkpoint:
        assert dict(checkpoint.paths) == {"w": ("state", "w")}
        assert checkpoint["w"].tolist() == [0, 1, 2, 3]
    assert tensorio.load(data, unknown="opaque").state["w"].tolist() == [0, 1, 2, 3]


def test_opaque_storage_class_makes_an_opaque_tensor() -> None:
    data = hexfile.torch_file(hexfile.pickled(hexfile.tensor(cls="NovelStorage", numel=16)), {"0": bytes(16)})
    with pytest.raises(UnsafePickleError, match="NovelStorage"):
        tensorio.load(data)
    assert type(tensorio.load(data, unknown="opaque")) is tensorio.Opaque


# ------------------------------------------------------------- allowed callables


def call(module: str, attribute: str, *args: bytes) -> bytes:
    return hexfile.name(module, attribute) + b"(" + b"".join(args) + b"tR"


MISUSED = {
    "bytearray_of_a_size": call("builtins", "bytearray", hexfile.number(1 << 40)),
    "bytearray_of_a_list": call("builtins", "bytearray", b"]"),
    "bytearray_of_another_codec": call("builtins", "bytearray", hexfile.text("a"), hexfile.text("utf-16")),
    "bytes_of_a_size": call("builtins", "bytes", hexfile.number(1 << 40)),
    "counter_of_text": call("collections", "Counter", hexfile.text("aaa")),
    "counter_of_two": call("collections", "Counter", b"}", b"}"),
    "ordered_dict_of_a_dict": call("collections", "OrderedDict", b"}"),
    "ordered_dict_of_triples": call("collections", "OrderedDict", b"](" + hexfile.numbers([1, 2, 3]) + b"e"),
    "ordered_dict_of_equal_keys": call("collections", "OrderedDict", b"](" + hexfile.numbers([1, 2]) * 2 + b"e"),
    "ordered_dict_of_bad_keys": call("collections", "OrderedDict", b"]((]Nte"),
    "set_of_a_dict": call("builtins", "set", b"}"),
    "set_of_lists": call("builtins", "set", b"](]e"),
    "set_of_two": call("builtins", "set", b"]", b"]"),
    "frozenset_of_dicts": call("builtins", "frozenset", b"](}e"),
    "complex_of_text": call("builtins", "complex", hexfile.text("1j")),
    "complex_of_ints": call("builtins", "complex", hexfile.number(1), hexfile.number(2)),
    "encode_hex": call("_codecs", "encode", b"C\x01a", hexfile.text("hex")),
    "encode_bz2": call("_codecs", "encode", hexfile.text("a"), hexfile.text("bz2")),
    "encode_without_codec": call("_codecs", "encode", hexfile.text("a")),
    "encode_beyond_latin1": call("_codecs", "encode", hexfile.text("\u20ac"), hexfile.text("latin1")),
    "size_of_floats": call("torch", "Size", b"(G" + bytes(8) + b"t"),
    "size_of_a_number": call("torch", "Size", hexfile.number(3)),
    "device_of_a_number": call("torch", "device", hexfile.number(3)),
    "device_of_three": call("torch", "device", hexfile.text("cuda"), hexfile.number(3), hexfile.number(3)),
    "dtype_called": call("torch", "float32"),
    "storage_class_called": call("torch", "FloatStorage", hexfile.number(1 << 40)),
    "untyped_storage_called": call("torch.storage", "UntypedStorage", hexfile.number(1 << 40)),
    "ndarray_called": call("numpy", "ndarray", hexfile.number(1 << 40)),
}  # fmt: skip


@pytest.mark.parametrize("body", MISUSED.values(), ids=MISUSED.keys())
def test_pickle_allowed_name_with_other_arguments_is_refused(body: bytes) -> None:
    with pytest.raises((HeaderError, LimitError, UnsupportedError)) as caught:
        read(hexfile.pickled(body, 3))
    assert caught.value.offset == 2 + len(body) - 1  # at the REDUCE


# ------------------------------------------------------------ NumPy's own pickles

NUMPY = [np.arange(6).reshape(2, 3), np.arange(6.0, dtype=">f4"), np.zeros((0, 3), "i2"), np.asfortranarray(np.eye(3)),
         np.array(["ab", "c"]), np.array([b"x"]), np.array([True]), np.array([1j]), np.array([None, 3, "x"], object),
         np.array(5, "u1")]  # fmt: skip


@pytest.mark.parametrize("value", NUMPY, ids=lambda a: f"{a.dtype.str}{list(a.shape)}")
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_numpy_array_in_a_pickle_reads_the_same(value: Any, protocol: int) -> None:
    got, want = read(pickle.dumps(value, protocol)), pickle.loads(pickle.dumps(value, protocol))
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.tolist() == value.tolist()


@pytest.mark.parametrize("value", [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex128(1j), np.str_("ab")],
                         ids=repr)  # fmt: skip
def test_numpy_scalar_in_a_pickle_reads_the_same(value: Any) -> None:
    got = read(pickle.dumps(value, 2))
    assert got == value
    assert type(got) is type(value)


def np_dtype(letter: bytes) -> bytes:
    return hexfile.name("numpy", "dtype") + b"(" + hexfile.text(letter.decode()) + b"\x89\x88tR"


def np_array(state: bytes) -> bytes:
    shell = hexfile.name("numpy.core.multiarray", "_reconstruct") + b"(" + hexfile.name("numpy", "ndarray")
    return shell + b"K\x00\x85C\x01btR" + state + b"b"


NUMPY_BAD = {
    "too_few_bytes": np_array(b"(K\x01K\x02\x85" + np_dtype(b"f8") + b"\x89C\x08" + bytes(8) + b"t"),
    "too_many_bytes": np_array(b"(K\x01)" + np_dtype(b"f4") + b"\x89C\x08" + bytes(8) + b"t"),
    "huge_shape": np_array(b"(K\x01" + hexfile.numbers([1 << 62, 4]) + np_dtype(b"f4") + b"\x89C\x00t"),
    "shape_beyond_2_63": np_array(b"(K\x01" + hexfile.numbers([1 << 63]) + np_dtype(b"V0") + b"\x89C\x00t"),
    "negative_shape": np_array(b"(K\x01" + hexfile.numbers([-1]) + np_dtype(b"f4") + b"\x89C\x00t"),
    "objects_as_bytes": np_array(b"(K\x01K\x01\x85" + np_dtype(b"O8") + b"\x89C\x08" + bytes(8) + b"t"),
    "no_dtype": np_array(b"(K\x01K\x01\x85N\x89C\x01at"),
    "wide_text_as_bytes": np_array(b"(K\x01K\x01\x85" + np_dtype(b"u1") + b"\x89" + hexfile.text("\u20ac") + b"t"),
    "filled_twice": np_array(b"(K\x01K\x01\x85" + np_dtype(b"u1") + b"\x89C\x01at")
    + b"(K\x01K\x01\x85"
    + np_dtype(b"u1")
    + b"\x89C\x01atb",
    "dtype_of_records": np_dtype(b"f4,i8"),
    "dtype_by_name": np_dtype(b"float64"),
    "dtype_of_4_gib": np_dtype(b"V4000000000"),
    "dtype_state_of_text": np_dtype(b"f8") + hexfile.text("<") + b"b",
    "dtype_state_with_fields": np_dtype(b"V4")
    + b"(K\x03X\x01\x00\x00\x00|NX\x01\x00\x00\x00a}J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
    "scalar_of_objects": hexfile.name("numpy.core.multiarray", "scalar")
    + b"("
    + np_dtype(b"O8")
    + b"C\x08"
    + bytes(8)
    + b"tR",
    "scalar_of_too_few_bytes": hexfile.name("numpy.core.multiarray", "scalar")
    + b"("
    + np_dtype(b"f8")
    + b"C\x04"
    + bytes(4)
    + b"tR",
    "scalar_of_no_bytes": hexfile.name("numpy.core.multiarray", "scalar") + b"(" + np_dtype(b"S0") + b"C\x00tR",
    "scalar_of_wide_text": hexfile.name("numpy.core.multiarray", "scalar")
    + b"("
    + np_dtype(b"u1")
    + hexfile.text("\u20ac")
    + b"tR",
}


@pytest.mark.parametrize("body", NUMPY_BAD.values(), ids=NUMPY_BAD.keys())
def test_numpy_pickle_that_does_not_fit_is_refused(body: bytes) -> None:
    with pytest.raises((HeaderError, LimitError, UnsupportedError)):
        read(hexfile.pickled(body, 3))


ODD_PLACES = {
    "reconstruct_shape": hexfile.name("numpy.core.multiarray", "_reconstruct") + b"(" + hexfile.name("numpy", "ndarray")
                         + b"%sC\x01btR",
    "dtype_state": np_dtype(b"f8") + b"(%sX\x01\x00\x00\x00<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
    "dtype_order": np_dtype(b"f8") + b"(K\x03%sNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
    "dtype_letter": hexfile.name("numpy", "dtype") + b"(%s\x89\x88tR",
    "array_version": np_array(b"(%sK\x01\x85" + np_dtype(b"u1") + b"\x89C\x01at"),
    "array_order": np_array(b"(K\x01K\x01\x85" + np_dtype(b"u1") + b"%sC\x01at"),
    "encode_codec": call("_codecs", "encode", hexfile.text("a"), b"%s"),
    "bytearray_codec": call("builtins", "bytearray", hexfile.text("a"), b"%s"),
    "key": b"}%sNs",
    "set_element": call("builtins", "set", b"](%se"),
    "size": call("torch", "Size", b"%s"),
    "called": b"%s)R",
    "built": b"%s}b",
    "persistent_id": b"%sQ",
    "persistent_word": b"(%sNNNNtQ",
}  # fmt: skip


@pytest.mark.parametrize("body", ODD_PLACES.values(), ids=ODD_PLACES.keys())
def test_pickle_with_a_tensor_in_an_odd_place_is_refused_in_every_mode(body: bytes) -> None:
    """A tensor of several elements has no truth value: comparing it with a word must not be what decides."""
    data = hexfile.torch_file(hexfile.pickled(body.replace(b"%s", hexfile.tensor()), 3), {"0": bytes(16)})
    for reader in (tensorio.open, tensorio.load):
        with pytest.raises((HeaderError, LimitError, UnsupportedError)):
            reader(data)
