"""Rules of tensor parallelism: patterns, arithmetic of cuts, presets.

A preset is right if the ranks' parts of a layer compute what the whole layer does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorio
from tensorio.errors import HeaderError, LimitError, TensorMismatchError, UnsupportedError
from tensorio.tp import Cut, Rule, Rules, config_of, cut_of, preset, presets, rules_of
from tensorio.tp._cuts import rows_of
from tensorio.tp._patterns import Pattern

Array = np.ndarray[Any, Any]

# ----------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("pattern", "fits", "fits_not"),
    [
        ("a.b", ["a.b"], ["a.c", "a.bb", "xa.b", "aXb", "a.b.c", ""]),
        ("layers.*.w", ["layers.0.w", "layers.31.w", "layers..w"], ["layers.w", "layers.0.1.w", "x.layers.0.w"]),
        ("layers.1*.w", ["layers.1.w", "layers.12.w"], ["layers.2.w", "layers.21.w"]),
        ("layers.?.w", ["layers.7.w"], ["layers.17.w", "layers...w"]),
        ("**.w", ["w", "a.w", "a.b.w"], ["aw", "a.w.b", "a.bw"]),
        ("a.**.w", ["a.w", "a.b.w", "a.b.c.w"], ["w", "b.a.w", "ab.w"]),
        ("a.**", ["a.b", "a.b.c"], ["a", "ab"]),
        ("**", ["", "a", "a.b", "a\nb"], []),
        ("{q,k}_p.{w,b}", ["q_p.w", "k_p.b"], ["v_p.w", "q_p.scale", "q,k_p.b"]),
        ("a.{b.c,d}", ["a.b.c", "a.d"], ["a.b", "a.bXc"]),
        ("x[0]+(1)$^|\\d", ["x[0]+(1)$^|\\d"], ["x0"]),
    ],
)  # fmt: skip
def test_pattern_fits_what_it_says(pattern: str, fits: list[str], fits_not: list[str]) -> None:
    rules = Rules({pattern: "replicate"})
    assert all(rules.match(name) is not None for name in fits)
    assert [name for name in fits_not if rules.match(name) is not None] == []


@pytest.mark.parametrize("pattern", ["a**", "**a", "a.b**.c", "{a", "{a,{b}}"])
def test_pattern_that_means_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"pattern '.*': "):
        Rule(pattern)


@given(st.lists(st.sampled_from(["a", "b", "ab", "layers", "0"]), min_size=1, max_size=6))
def test_double_star_is_any_number_of_levels(levels: list[str]) -> None:
    name = ".".join(levels)
    for i in range(len(levels) + 1):
        for j in range(i, len(levels) + 1):
            pattern = ".".join([*levels[:i], "**", *levels[j:]])
            rule = Rule(pattern)
            assert rule.matcher.fits(name) == (j < len(levels) or i < len(levels)), pattern


WORDS = st.sampled_from(["a", "b", ".", "*", "?", "**.", "{a,ab}", "{,.b}", "*a", "."])


@given(st.lists(WORDS, max_size=7), st.text("ab.", max_size=9), st.booleans())
def test_both_ways_of_matching_agree(words: list[str], name: str, open_end: bool) -> None:
    text = re.sub(r"(?<![.*])\*\*\.", ".**.", "".join(words)) + (".**" if open_end else "")
    try:
        pattern = Pattern(text)
    except ValueError:
        return
    pattern._regex = None
    assert pattern.fits(name) == (re.fullmatch(pattern._expression, name) is not None), text


def test_pattern_of_many_wildcards_does_not_hang() -> None:
    name = "a" * 999 + "c"
    assert not Rule("*a" * 50 + "b").matcher.fits(name)
    assert Rule("*a" * 50 + "*").matcher.fits(name)
    assert not Rule("{a,aa}" * 50 + "b").matcher.fits(name)
    assert not Rule("**." * 50 + "b").matcher.fits("a." * 499 + "c")


def test_name_longer_than_any_real_one_is_refused_at_once() -> None:
    with pytest.raises(TensorMismatchError, match="1024 characters"):
        Rules({"**.**.**.x": 0}).match("a." * 5000)


# --------------------------------------------------------------------- what rules say

TEXT = """
# comment
a = 0
b.* = -1 optional     # with a comment of its own
c = 0 sections=2,1,1
d = 1 heads=32,8,8
e = 0 sections=4,1 heads=8,2
f = 0 pad_to=64
g = replicate
h = rank0 optional
i = skip
"""

PARSED = [
    Rule("a"),
    Rule("b.*", dim=-1, optional=True),
    Rule("c", sections=(2, 1, 1)),
    Rule("d", dim=1, heads=(32, 8, 8)),
    Rule("e", sections=(4, 1), heads=(8, 2)),
    Rule("f", pad_to=64),
    Rule("g", "replicate"),
    Rule("h", "rank0", optional=True),
    Rule("i", "skip"),
]


def test_lines_of_a_rules_file() -> None:
    assert list(Rules.parse(TEXT)) == PARSED


def test_rules_as_text_are_read_as_the_same_rules() -> None:
    assert Rules.parse(str(Rules(PARSED))) == Rules(PARSED)
    assert Rules(PARSED).digest == Rules.parse(TEXT).digest != Rules(PARSED[1:]).digest


AS_JSON: list[Any] = [
    {
        "a": 0, "b.*": {"dim": -1, "optional": True}, "c": {"dim": 0, "sections": [2, 1, 1]}, "d": "1 heads=32,8,8",
        "e": {"sections": [4, 1], "heads": [8, 2]}, "f": {"dim": 0, "pad_to": 64}, "g": None,
        "h": {"action": "rank0", "optional": True}, "i": "skip",
    },
    [
        ["a", 0], {"pattern": "b.*", "dim": -1, "optional": True}, {"pattern": "c", "sections": [2, 1, 1]},
        ["d", {"dim": 1, "heads": [32, 8, 8]}], ["e", "0 sections=4,1 heads=8,2"], {"pattern": "f", "pad_to": 64},
        {"pattern": "g", "action": "replicate"}, ["h", "rank0 optional"], ["i", "skip"],
    ],
]  # fmt: skip


@pytest.mark.parametrize("value", [*AS_JSON, {"rules": AS_JSON[1]}], ids=["object", "list", "rules"])
def test_json_and_python_say_the_same(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(value))
    assert list(rules_of(path)) == PARSED
    assert list(rules_of(str(path))) == PARSED
    if not (isinstance(value, dict) and set(value) == {"rules"}):
        assert list(Rules(value)) == PARSED


def test_rules_are_a_sequence_that_can_be_a_key() -> None:
    rules = Rules(PARSED)
    assert len(rules) == 9
    assert rules[1] is PARSED[1]
    assert {rules: 1}[Rules(PARSED)] == 1
    assert rules_of(rules) is rules
    assert repr(rules).startswith("<9 rules, ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a", "line 1: expected 'pattern = dimension or word'"),
        ("= 0", "line 1: expected 'pattern"),
        ("a =", "line 1: expected 'pattern"),
        ("a = cut it", "found 'it'"),
        ("a = column", "expected one of cut, replicate, rank0, skip or a dimension, found 'column'"),
        ("a = 0 heads", "found 'heads'"),
        ("a = 0 heads=", "expected whole numbers, found ''"),
        ("a = 0 heads=x", "expected whole numbers, found 'x'"),
        ("a = 0 heads=0", "expected positive whole numbers"),
        ("a = 0 heads=2 heads=2", "found 'heads=2'"),
        ("a = 0 optional=1", "found 'optional=1'"),
        ("a = 0 pad_to=1,2", "expected positive whole numbers"),
        ("a = replicate heads=2", "for cuts only, not for replicate"),
        ("a = 0 pad_to=8 heads=2", "can't be padded"),
        ("a = 0 sections=1,1 heads=2", "2 sections and 1 numbers of heads"),
        ("a = 0\na = 1", "two rules have the pattern 'a'"),
        ("a = 0 heads=$n", "needs the number 'n' of the model's config.json, which is not given; give it as config="),
    ],
)
def test_line_that_is_wrong_says_why(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Rules.parse(line)
    path = tmp_path / "x.rules"
    path.write_text(line)
    with pytest.raises(HeaderError, match=re.escape(message)) as caught:
        rules_of(path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("value", [[1], [["a"]], [[1, 0]], {"a": 1.5}, {"a": {"dims": 1}}, [{"dim": 0}], {"a": True}])
def test_python_value_that_is_no_rule_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"rule|expected"):
        Rules(value)


def test_numbers_come_from_the_first_key_of_the_config_that_is_there() -> None:
    text = "a = 0 heads=$kv|n,$text_config.kv"
    assert Rules.parse(text, {"n": 8, "text_config": {"kv": 2}})[0].heads == (8, 2)
    assert Rules.parse(text, {"n": 8, "kv": 4, "text_config": {"kv": 2}})[0].heads == (4, 2)
    assert Rules.parse(text, {"n": 8, "kv": None, "text_config": {"kv": 2}})[0].heads == (8, 2)
    with pytest.raises(ValueError, match=r"'kv or n' of the model's config\.json, which has none"):
        Rules.parse(text, {"text_config": {"kv": 2}})


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"{", HeaderError, "JSON"),
        (b'{"a": 0, "a": 1}', HeaderError, "the key 'a' occurs twice"),
        (b"[" * 100_000, LimitError, "nested too deep"),
        (b"\xff", HeaderError, "UTF-8"),
        (b" " * (5 << 20), LimitError, "at most 4194304 bytes"),
    ],
    ids=["syntax", "twice", "deep", "bytes", "large"],
)
def test_file_that_is_no_rules_file_is_refused(
    data: bytes, error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(error, match=message):
        rules_of(path)
    with pytest.raises(error, match=message):
        config_of(path)


def test_config_is_an_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"n_head": 3}')
    assert config_of(path) == config_of({"n_head": 3}) == {"n_head": 3}
    path.write_text("[]")
    with pytest.raises(HeaderError, match="expected a JSON object"):
        config_of(path)


def test_word_that_is_neither_preset_nor_file_lists_the_presets() -> None:
    with pytest.raises(ValueError, match=r"no preset is called 'camel' \(bert, gpt2, .*llama.*\), and no file"):
        rules_of("camel")
    with pytest.raises(FileNotFoundError):
        rules_of("./camel")
    with pytest.raises(ValueError, match="no preset is called 'camel'"):
        preset("camel")


# ------------------------------------------------------------------------- resolving

NAMES = ["a.w", "a.b", "c.w"]


def test_first_rule_that_fits_counts() -> None:
    resolved = Rules([("a.*", 0), ("**.w", 1)]).resolve(NAMES)
    assert {name: rule.dim for name, rule in resolved.rules.items()} == {"a.w": 0, "a.b": 0, "c.w": 1}
    assert list(resolved.counts.values()) == [2, 1]
    assert resolved.unmatched == ()


def test_tensors_without_a_rule_are_listed() -> None:
    with pytest.raises(
        TensorMismatchError, match=r"no rule fits 2 of 3 tensors: 'a\.b', 'c\.w'; .*default='replicate'"
    ):
        Rules({"a.w": 0}).resolve(NAMES)
    many = [f"t{i}" for i in range(100)]
    with pytest.raises(TensorMismatchError, match=r"no rule fits 100 of 100 tensors: 't0', .* and 95 more"):
        Rules([]).resolve(many)


@pytest.mark.parametrize("default", ["replicate", "skip"])
def test_tensors_without_a_rule_are_left_to_the_default(default: str) -> None:
    resolved = Rules({"a.w": 0}).resolve(NAMES, default)
    assert {name: rule.action for name, rule in resolved.rules.items()} == {
        "a.w": "cut",
        "a.b": default,
        "c.w": default,
    }
    assert resolved.unmatched == ("a.b", "c.w")
    with pytest.raises(ValueError, match="default= is one of error, replicate, skip"):
        Rules({}).resolve(NAMES, "cut")


def test_rule_without_a_tensor_is_an_error_unless_optional() -> None:
    with pytest.raises(TensorMismatchError, match=r"1 of 2 rules match no tensor: 'd\.w'; correct them"):
        Rules({"**": 0, "d.w": 0}).resolve(NAMES)
    with pytest.raises(TensorMismatchError, match=r"\(earlier rules take what 'a\.w' fits\)"):
        Rules({"**": 0, "a.w": 1}).resolve(NAMES)
    assert Rules({"**": 0, "d.w": "0 optional"}).resolve(NAMES).counts[Rule("d.w", optional=True)] == 0


# ------------------------------------------------------------------------------ cuts


def taken(cut: Cut, whole: Array) -> Array:
    """What a cut takes, by NumPy's concatenation of NumPy's slices."""
    parts = [np.take(whole, range(lo, hi), axis=cut.dim) for lo, hi in cut.spans]
    shape = list(whole.shape)
    shape[cut.dim] = cut.pad
    return np.concatenate([*parts, np.zeros(shape, whole.dtype)], axis=cut.dim)


@given(st.data())
def test_even_cut_is_numpys_split(data: st.DataObject) -> None:
    tp = data.draw(st.integers(1, 5))
    shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] *= tp
    whole = np.arange(np.prod(shape)).reshape(shape)
    for rank, want in enumerate(np.split(whole, tp, axis=dim)):
        cut = cut_of(Rule("x", dim=dim), "x", whole.shape, rank, tp)
        assert cut is not None
        assert cut.shape == want.shape
        np.testing.assert_array_equal(taken(cut, whole), want)


@given(st.data())
def test_sections_are_cut_each_by_itself(data: st.DataObject) -> None:
    tp = data.draw(st.integers(1, 4))
    ratios = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    unit = data.draw(st.integers(1, 3)) * tp
    whole = np.arange(2 * sum(ratios) * unit).reshape(2, -1)
    sections = np.split(whole, np.cumsum([r * unit for r in ratios])[:-1], axis=1)
    for sizes in (ratios, [r * unit for r in ratios]):  # as ratios and as sizes
        rule = Rule("x", dim=1, sections=tuple(sizes))
        for rank in range(tp):
            cut = cut_of(rule, "x", whole.shape, rank, tp)
            assert cut is not None
            want = np.concatenate([np.split(section, tp, axis=1)[rank] for section in sections], axis=1)
            np.testing.assert_array_equal(taken(cut, whole), want)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_heads_are_never_cut_and_repeated_if_there_are_fewer_than_ranks(tp: int) -> None:
    heads, size = 4, 3
    whole = np.repeat(np.arange(heads), size)  # each element says whose head it is
    for rank in range(tp):
        cut = cut_of(Rule("x", heads=(heads,)), "x", whole.shape, rank, tp)
        assert cut is not None
        want = [rank * heads // tp] if tp > heads else list(range(rank * heads // tp, (rank + 1) * heads // tp))
        assert taken(cut, whole).tolist() == [h for h in want for _ in range(size)]


def test_fused_heads_with_fewer_keys_than_ranks() -> None:
    q, kv, size, tp = 8, 2, 2, 4
    whole = np.concatenate(
        [np.repeat([f"{kind}{i}" for i in range(n)], size) for kind, n in (("q", q), ("k", kv), ("v", kv))]
    )
    cuts = [cut_of(Rule("x", heads=(q, kv, kv)), "x", whole.shape, rank, tp) for rank in range(tp)]
    assert [taken(cut, whole).tolist()[::size] for cut in cuts if cut] == [
        ["q0", "q1", "k0", "v0"], ["q2", "q3", "k0", "v0"], ["q4", "q5", "k1", "v1"], ["q6", "q7", "k1", "v1"],
    ]  # fmt: skip


@given(st.integers(0, 40), st.integers(1, 7), st.integers(1, 12))
def test_padding_is_zeros_behind_the_last_row(size: int, tp: int, pad_to: int) -> None:
    whole = np.arange(1, size + 1)
    cuts = [cut_of(Rule("x", pad_to=pad_to), "x", whole.shape, rank, tp) for rank in range(tp)]
    parts = [taken(cut, whole) for cut in cuts if cut is not None]
    assert len({part.shape for part in parts}) == 1
    together = np.concatenate(parts)
    assert together[:size].tolist() == whole.tolist()
    assert not together[size:].any()
    assert len(together) % pad_to == len(together) % tp == 0
    assert len(together) - size < pad_to * tp


@pytest.mark.parametrize(
    ("action", "ranks"), [("replicate", [0, 1, 2]), ("rank0", [0]), ("skip", [])]
)  # fmt: skip
def test_whole_tensors_are_where_the_rule_says(action: str, ranks: list[int]) -> None:
    cuts = [cut_of(Rule("x", action), "x", (), rank, 3) for rank in range(3)]
    assert [rank for rank, cut in enumerate(cuts) if cut is not None] == ranks
    assert all(cut.whole and cut.shape == () for cut in cuts if cut is not None)


@pytest.mark.parametrize(
    ("rule", "shape", "tp", "message"),
    [
        (Rule("x", dim=2), (4, 4), 2, "there is no dimension 2 in a tensor of shape [4, 4]"),
        (Rule("x", dim=-3), (4, 4), 2, "there is no dimension -3"),
        (Rule("x"), (), 1, "there is no dimension 0 in a tensor of shape []"),
        (Rule("x"), (5,), 2, "5 elements along dimension 0 can't be cut into 2 equal parts"),
        (Rule("x", sections=(2, 1)), (10,), 2, "10 elements along dimension 0 are not sections of 2 + 1"),
        (Rule("x", sections=(2, 1)), (9,), 2, "3 elements along dimension 0 can't be cut"),
        (Rule("x", sections=(1, 1), heads=(3, 1)), (8,), 1, "4 elements along dimension 0 are not 3 heads"),
        (Rule("x", heads=(4, 2)), (8,), 1, "8 elements along dimension 0 are not 4 + 2 heads"),
        (Rule("x", heads=(4,)), (8,), 3, "4 heads can be neither cut into 3 equal parts nor repeated on 3 ranks"),
    ],
)
def test_cut_that_is_impossible_names_rule_and_tensor(
    rule: Rule, shape: tuple[int, ...], tp: int, message: str
) -> None:
    with pytest.raises(TensorMismatchError, match=re.escape(message)) as caught:
        cut_of(rule, "a.b", shape, 0, tp)
    assert caught.value.record == "a.b"
    assert "rule 'x'" in str(caught.value)


def test_rank_that_is_none_of_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a rank from 0 to 1, found 2"):
        cut_of(Rule("x"), "x", (4,), 2, 2)


@pytest.mark.parametrize(
    ("shape", "dim", "bits", "right"),
    [((4, 6), 0, 4, True), ((4, 8), 1, 4, True), ((4, 6), 1, 4, False), ((2, 4), 1, 6, False), ((2, 8), 1, 6, True),
     ((2, 3), 0, 4, False), ((2, 3), 1, 8, False)],
)  # fmt: skip
def test_packed_elements_are_cut_between_bytes_only(shape: tuple[int, ...], dim: int, bits: int, right: bool) -> None:
    cut = cut_of(Rule("x", dim=dim, pad_to=1 if bits == 8 else 0), "x", shape, 1, 2)
    assert cut is not None
    if right:
        rows = rows_of(cut, "x", shape, bits)
        assert rows.height * sum(hi - lo for lo, hi in rows.spans) * 8 == np.prod(cut.shape) * bits
    elif bits == 8:
        assert rows_of(cut, "x", shape, bits).pad
    else:
        with pytest.raises(UnsupportedError, match=f"elements of {bits} bits share bytes"):
            rows_of(cut, "x", shape, bits)


# --------------------------------------------------------------------------- presets

RNG = np.random.default_rng(4)
HIDDEN, HEADS, KV, SIZE, INNER = 24, 4, 2, 6, 16
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KV, "n_head": HEADS, "num_heads": HEADS}


def weight(*shape: int) -> Array:
    return RNG.standard_normal(shape)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def attention(q: Array, k: Array, v: Array, bias: Array | float = 0.0) -> Array:
    """Attention of [token, heads * SIZE] queries over keys and values that may have fewer heads."""
    q, k, v = (x.reshape(len(x), -1, SIZE).swapaxes(0, 1) for x in (q, k, v))
    k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
    scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(SIZE) + bias)
    return ((scores / scores.sum(-1, keepdims=True)) @ v).swapaxes(0, 1).reshape(q.shape[1], -1)


Weights = dict[str, Array]


def llama_attention(x: Array, w: Weights, p: str = "model.layers.0.self_attn.") -> Array:
    q, k, v = (x @ w[f"{p}{n}_proj.weight"].T + w[f"{p}{n}_proj.bias"] for n in "qkv")
    return attention(q, k, v) @ w[p + "o_proj.weight"].T


def fused_attention(x: Array, w: Weights) -> Array:
    qkv = x @ w["model.layers.0.self_attn.qkv_proj.weight"].T
    heads = qkv.shape[1] // SIZE
    kv = heads * KV // (HEADS + 2 * KV) or 1
    q, k, v = np.split(qkv, [(heads - 2 * kv) * SIZE, (heads - kv) * SIZE], axis=1)
    return attention(q, k, v) @ w["model.layers.0.self_attn.o_proj.weight"].T


def llama_mlp(x: Array, w: Weights, p: str = "model.layers.0.mlp.") -> Array:
    return silu(x @ w[p + "gate_proj.weight"].T) * (x @ w[p + "up_proj.weight"].T) @ w[p + "down_proj.weight"].T


def fused_mlp(x: Array, w: Weights) -> Array:
    gate, up = np.split(x @ w["model.layers.0.mlp.gate_up_proj.weight"].T, 2, axis=1)
    return silu(gate) * up @ w["model.layers.0.mlp.down_proj.weight"].T


def mixtral_experts(x: Array, w: Weights) -> Array:
    p = "model.layers.0.block_sparse_moe."
    router = x @ w[p + "gate.weight"].T
    share = np.exp(router) / np.exp(router).sum(-1, keepdims=True)
    experts = [
        silu(x @ w[f"{p}experts.{e}.w1.weight"].T)
        * (x @ w[f"{p}experts.{e}.w3.weight"].T)
        @ w[f"{p}experts.{e}.w2.weight"].T
        for e in range(3)
    ]
    return sum(share[:, e : e + 1] * y for e, y in enumerate(experts))


def fused_experts(x: Array, w: Weights) -> Array:
    p = "model.layers.0.mlp.experts."
    total = np.zeros((len(x), HIDDEN))
    for gate_up, down in zip(w[p + "gate_up_proj"], w[p + "down_proj"], strict=True):
        gate, up = np.split(x @ gate_up.T, 2, axis=1)
        total += silu(gate) * up @ down.T
    return total


def gpt2_attention(x: Array, w: Weights) -> Array:
    p = "transformer.h.0.attn."
    q, k, v = np.split(x @ w[p + "c_attn.weight"] + w[p + "c_attn.bias"], 3, axis=1)
    return attention(q, k, v) @ w[p + "c_proj.weight"]


def gpt2_mlp(x: Array, w: Weights) -> Array:
    p = "transformer.h.0.mlp."
    return np.tanh(x @ w[p + "c_fc.weight"] + w[p + "c_fc.bias"]) @ w[p + "c_proj.weight"]


def gpt_neox_attention(x: Array, w: Weights) -> Array:
    p = "gpt_neox.layers.0.attention."
    qkv = (x @ w[p + "query_key_value.weight"].T + w[p + "query_key_value.bias"]).reshape(len(x), -1, 3, SIZE)
    q, k, v = (qkv[:, :, i].reshape(len(x), -1) for i in range(3))
    return attention(q, k, v) @ w[p + "dense.weight"].T


def gpt_neox_mlp(x: Array, w: Weights) -> Array:
    p = "gpt_neox.layers.0.mlp."
    return np.tanh(x @ w[p + "dense_h_to_4h.weight"].T + w[p + "dense_h_to_4h.bias"]) @ w[p + "dense_4h_to_h.weight"].T


def bert_attention(x: Array, w: Weights) -> Array:
    p = "bert.encoder.layer.0.attention."
    q, k, v = (x @ w[f"{p}self.{n}.weight"].T + w[f"{p}self.{n}.bias"] for n in ("query", "key", "value"))
    return attention(q, k, v) @ w[p + "output.dense.weight"].T


def bert_mlp(x: Array, w: Weights) -> Array:
    p = "bert.encoder.layer.0."
    return (
        np.tanh(x @ w[p + "intermediate.dense.weight"].T + w[p + "intermediate.dense.bias"])
        @ w[p + "output.dense.weight"].T
    )


def t5_attention(x: Array, w: Weights) -> Array:
    p = "encoder.block.0.layer.0.SelfAttention."
    q, k, v = (x @ w[f"{p}{n}.weight"].T for n in "qkv")
    buckets = np.abs(np.subtract.outer(range(len(x)), range(len(x)))) % 5
    bias = w[p + "relative_attention_bias.weight"][buckets].transpose(2, 0, 1)
    return attention(q, k, v, bias) @ w[p + "o.weight"].T


def t5_mlp(x: Array, w: Weights) -> Array:
    p = "encoder.block.0.layer.1.DenseReluDense."
    return np.tanh(x @ w[p + "wi_0.weight"].T) * (x @ w[p + "wi_1.weight"].T) @ w[p + "wo.weight"].T


INSIDE = HEADS * SIZE
MODELS: dict[str, tuple[str, Weights, list[Callable[[Array, Weights], Array]]]] = {
    "llama": (
        "llama",
        {
            "model.embed_tokens.weight": weight(31, HIDDEN), "lm_head.weight": weight(31, HIDDEN),
            "model.norm.weight": weight(HIDDEN), "model.layers.0.input_layernorm.weight": weight(HIDDEN),
            "model.layers.0.post_attention_layernorm.weight": weight(HIDDEN),
            **{f"model.layers.0.self_attn.{n}_proj.{what}": weight(*shape)
               for n, heads in (("q", HEADS), ("k", KV), ("v", KV))
               for what, shape in (("weight", (heads * SIZE, HIDDEN)), ("bias", (heads * SIZE,)))},
            "model.layers.0.self_attn.o_proj.weight": weight(HIDDEN, INSIDE),
            "model.layers.0.self_attn.q_norm.weight": weight(SIZE),
            "model.layers.0.self_attn.rotary_emb.inv_freq": weight(SIZE // 2),
            "model.layers.0.mlp.gate_proj.weight": weight(INNER, HIDDEN),
            "model.layers.0.mlp.up_proj.weight": weight(INNER, HIDDEN),
            "model.layers.0.mlp.down_proj.weight": weight(HIDDEN, INNER),
        },
        [llama_attention, llama_mlp],
    ),
    "llama, fused": (
        "llama",
        {
            "model.layers.0.self_attn.qkv_proj.weight": weight((HEADS + 2 * KV) * SIZE, HIDDEN),
            "model.layers.0.self_attn.o_proj.weight": weight(HIDDEN, INSIDE),
            "model.layers.0.mlp.gate_up_proj.weight": weight(2 * INNER, HIDDEN),
            "model.layers.0.mlp.down_proj.weight": weight(HIDDEN, INNER),
        },
        [fused_attention, fused_mlp],
    ),
    "mixtral": (
        "mixtral",
        {
            "model.layers.0.block_sparse_moe.gate.weight": weight(3, HIDDEN),
            **{f"model.layers.0.block_sparse_moe.experts.{e}.{n}.weight": weight(*shape) for e in range(3)
               for n, shape in (("w1", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER)), ("w3", (INNER, HIDDEN)))},
        },
        [mixtral_experts],
    ),
    "mixtral, fused": (
        "mixtral",
        {
            "model.layers.0.mlp.experts.gate_up_proj": weight(3, 2 * INNER, HIDDEN),
            "model.layers.0.mlp.experts.down_proj": weight(3, HIDDEN, INNER),
            "model.layers.0.mlp.gate.weight": weight(3, HIDDEN),
        },
        [fused_experts],
    ),
    "gpt2": (
        "gpt2",
        {
            "transformer.wte.weight": weight(31, HIDDEN), "transformer.wpe.weight": weight(9, HIDDEN),
            "transformer.h.0.ln_1.weight": weight(HIDDEN), "transformer.ln_f.bias": weight(HIDDEN),
            "transformer.h.0.attn.c_attn.weight": weight(HIDDEN, 3 * INSIDE),
            "transformer.h.0.attn.c_attn.bias": weight(3 * INSIDE),
            "transformer.h.0.attn.c_proj.weight": weight(INSIDE, HIDDEN),
            "transformer.h.0.attn.c_proj.bias": weight(HIDDEN), "transformer.h.0.attn.bias": weight(1, 1, 9, 9),
            "transformer.h.0.mlp.c_fc.weight": weight(HIDDEN, INNER), "transformer.h.0.mlp.c_fc.bias": weight(INNER),
            "transformer.h.0.mlp.c_proj.weight": weight(INNER, HIDDEN),
            "transformer.h.0.mlp.c_proj.bias": weight(HIDDEN),
        },
        [gpt2_attention, gpt2_mlp],
    ),
    "gpt_neox": (
        "gpt_neox",
        {
            "gpt_neox.embed_in.weight": weight(31, HIDDEN), "embed_out.weight": weight(31, HIDDEN),
            "gpt_neox.layers.0.input_layernorm.weight": weight(HIDDEN),
            "gpt_neox.final_layer_norm.bias": weight(HIDDEN),
            "gpt_neox.layers.0.attention.query_key_value.weight": weight(3 * INSIDE, HIDDEN),
            "gpt_neox.layers.0.attention.query_key_value.bias": weight(3 * INSIDE),
            "gpt_neox.layers.0.attention.dense.weight": weight(HIDDEN, INSIDE),
            "gpt_neox.layers.0.attention.dense.bias": weight(HIDDEN),
            "gpt_neox.layers.0.mlp.dense_h_to_4h.weight": weight(INNER, HIDDEN),
            "gpt_neox.layers.0.mlp.dense_h_to_4h.bias": weight(INNER),
            "gpt_neox.layers.0.mlp.dense_4h_to_h.weight": weight(HIDDEN, INNER),
            "gpt_neox.layers.0.mlp.dense_4h_to_h.bias": weight(HIDDEN),
        },
        [gpt_neox_attention, gpt_neox_mlp],
    ),
    "bert": (
        "bert",
        {
            "bert.embeddings.word_embeddings.weight": weight(31, HIDDEN),
            "bert.embeddings.position_embeddings.weight": weight(9, HIDDEN),
            "bert.embeddings.LayerNorm.weight": weight(HIDDEN), "bert.pooler.dense.weight": weight(HIDDEN, HIDDEN),
            **{f"bert.encoder.layer.0.attention.self.{n}.{what}": weight(*shape) for n in ("query", "key", "value")
               for what, shape in (("weight", (INSIDE, HIDDEN)), ("bias", (INSIDE,)))},
            "bert.encoder.layer.0.attention.output.dense.weight": weight(HIDDEN, INSIDE),
            "bert.encoder.layer.0.attention.output.dense.bias": weight(HIDDEN),
            "bert.encoder.layer.0.attention.output.LayerNorm.weight": weight(HIDDEN),
            "bert.encoder.layer.0.intermediate.dense.weight": weight(INNER, HIDDEN),
            "bert.encoder.layer.0.intermediate.dense.bias": weight(INNER),
            "bert.encoder.layer.0.output.dense.weight": weight(HIDDEN, INNER),
            "bert.encoder.layer.0.output.dense.bias": weight(HIDDEN),
            "cls.predictions.bias": weight(31), "cls.predictions.decoder.weight": weight(31, HIDDEN),
            "cls.predictions.transform.dense.weight": weight(HIDDEN, HIDDEN),
            "cls.predictions.transform.LayerNorm.bias": weight(HIDDEN),
        },
        [bert_attention, bert_mlp],
    ),
    "t5": (
        "t5",
        {
            "shared.weight": weight(31, HIDDEN), "encoder.final_layer_norm.weight": weight(HIDDEN),
            "encoder.block.0.layer.0.layer_norm.weight": weight(HIDDEN),
            **{f"encoder.block.0.layer.0.SelfAttention.{n}.weight": weight(INSIDE, HIDDEN) for n in "qkv"},
            "encoder.block.0.layer.0.SelfAttention.o.weight": weight(HIDDEN, INSIDE),
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": weight(5, HEADS),
            "encoder.block.0.layer.1.DenseReluDense.wi_0.weight": weight(INNER, HIDDEN),
            "encoder.block.0.layer.1.DenseReluDense.wi_1.weight": weight(INNER, HIDDEN),
            "encoder.block.0.layer.1.DenseReluDense.wo.weight": weight(HIDDEN, INNER),
        },
        [t5_attention, t5_mlp],
    ),
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_ranks_of_a_preset_compute_what_the_whole_layer_does(model: str, tp: int) -> None:
    name, weights, layers = MODELS[model]
    rules = preset(name, CONFIG).resolve(weights)
    x = RNG.standard_normal((7, HIDDEN))
    for layer in layers:
        total = np.zeros((7, HIDDEN))
        for rank in range(tp):
            cuts = {fqn: cut_of(rule, fqn, weights[fqn].shape, rank, tp) for fqn, rule in rules.rules.items()}
            part = {
                f: weights[f] if cut.whole else taken(cut, weights[f]) for f, cut in cuts.items() if cut is not None
            }
            total += layer(x, part)  # row-parallel biases are added once, behind the sum
        np.testing.assert_allclose(total, layer(x, weights), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_presets_cut_vocabularies_and_keep_norms_and_row_biases(model: str) -> None:
    name, weights, _ = MODELS[model]
    rules = preset(name, CONFIG).resolve(weights).rules
    for fqn, rule in rules.items():
        if re.search(
            r"embed_tokens|lm_head|wte|embed_in|embed_out|word_embeddings|shared|cls\.predictions\.(bias|dec)", fqn
        ):
            assert (rule.action, rule.dim, rule.pad_to) == ("cut", 0, 1), fqn
        elif re.search(r"norm|ln_|LayerNorm|router|moe\.gate|inv_freq|(c_proj|dense_4h_to_h|output\.dense)\.bias", fqn):
            assert rule.action == "replicate", fqn


def test_presets_need_heads_and_say_so() -> None:
    for name in presets():
        with pytest.raises(ValueError, match=r"config\.json"):
            preset(name)
        assert all(rule.optional for rule in preset(name, CONFIG))


def test_preset_uses_all_heads_where_there_are_no_groups() -> None:
    rules = preset("llama", {"num_attention_heads": 16})
    rule = rules.match("model.layers.3.self_attn.k_proj.weight")
    assert rule is not None
    assert rule.heads == (16,)


def test_presets_are_no_way_around_heads() -> None:
    """Two heads on four ranks of a preset: repeated; on three: refused."""
    rule = preset("llama", CONFIG).match("model.layers.0.self_attn.v_proj.weight")
    assert rule is not None
    with pytest.raises(TensorMismatchError, match="2 heads can be neither cut"):
        cut_of(rule, "v", (KV * SIZE, HIDDEN), 0, 3)


def test_tp_is_a_part_of_the_package() -> None:
    assert tensorio.tp.Rules is Rules
    assert all(inspected.__doc__ for inspected in (Rule, Rules, Cut, cut_of, preset, presets, rules_of, config_of))
