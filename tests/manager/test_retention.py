"""Which steps stay: the rules as a table, and what holds for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorio.manager._retention import Best, Kept, Policy, best_of, superfluous

LOSSES = {10: 0.5, 20: 0.1, 30: 0.9, 40: 0.3, 50: 0.1, 60: math.nan}
THERE = [Kept(step, {"loss": loss}, pinned=step == 30) for step, loss in LOSSES.items()]


@pytest.mark.parametrize(("policy", "gone"), [
    (Policy(keep=None), []),
    (Policy(keep=1), [10, 20, 40, 50]),
    (Policy(keep=3), [10, 20]),
    (Policy(keep=100), []),
    (Policy(keep=1, every=20), [10, 50]),
    (Policy(keep=1, best=Best("loss")), [10, 20, 40]),
    (Policy(keep=1, best=Best("loss", "min", 2)), [10, 40]),
    (Policy(keep=1, best=Best("loss", "max")), [10, 20, 40, 50]),
    (Policy(keep=1, best=Best("accuracy")), [10, 20, 40, 50]),
    (Policy(keep=2, every=10), []),
])  # fmt: skip
def test_rules(policy: Policy, gone: list[int]) -> None:
    assert superfluous(THERE, policy, 60) == gone


def test_the_step_that_was_saved_stays_wherever_its_number_stands() -> None:
    assert superfluous(THERE, Policy(keep=1), 10) == [20, 40, 50]


def test_of_two_equal_steps_the_later_is_better_and_nan_never_is() -> None:
    assert best_of(THERE, Best("loss", "min", 6)) == [50, 20, 40, 10, 30]
    assert best_of([Kept(1, {"m": "text"}), Kept(2, {})], Best("m")) == []


@pytest.mark.parametrize("wrong", [
    lambda: Policy(keep=0), lambda: Policy(every=0), lambda: Best("loss", "least"), lambda: Best("loss", "min", 0),
])  # fmt: skip
def test_rules_that_keep_nothing_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        wrong()


kept = st.builds(
    Kept,
    st.integers(0, 60),
    st.fixed_dictionaries({"loss": st.floats(allow_nan=True) | st.integers(-3, 3)}),
    st.booleans(),
)
policies = st.builds(
    Policy,
    st.none() | st.integers(1, 6),
    st.none() | st.integers(1, 9),
    st.none() | st.builds(Best, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 4)),
)


@given(st.lists(kept, min_size=1, unique_by=lambda k: k.step), policies, st.data())
def test_what_holds_for_all_rules(there: list[Kept], policy: Policy, data: st.DataObject) -> None:
    saved = data.draw(st.sampled_from(there)).step
    gone = superfluous(there, policy, saved)
    stays = {k.step for k in there} - set(gone)
    assert gone == sorted(gone)
    assert {saved, max(k.step for k in there)} <= stays
    assert {k.step for k in there if k.pinned} <= stays
    assert policy.keep is not None or not gone
    if policy.every is not None:
        assert all(step % policy.every for step in gone)
    # What stays is not superfluous a moment later.
    assert superfluous([k for k in there if k.step in stays], policy, saved) == []
