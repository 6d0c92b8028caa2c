"""Which steps stay: pure arithmetic over what is there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["Best", "Kept", "Policy", "best_of", "superfluous"]


@dataclass(frozen=True)
class Best:
    """The `count` steps with the best value of a metric.

    Attributes
    ----------
    metric : str
    mode : {"min", "max"}
    count : int
    """

    metric: str
    mode: str = "min"
    count: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f"best=: expected the mode 'min' or 'max', found {self.mode!r}")
        if self.count < 1:
            raise ValueError(f"best=: expected to keep at least 1 step, found {self.count}")


@dataclass(frozen=True)
class Policy:
    """What stays: the last `keep` (None: all), every step that `every` divides, the best."""

    keep: int | None = 3
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep=: expected to keep at least 1 step, or None for all, found {self.keep}")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every=: expected a positive number of steps, found {self.every}")


@dataclass(frozen=True)
class Kept:
    """A step that is there, and what matters of it."""

    step: int
    metrics: Mapping[str, object] = field(default_factory=dict)
    pinned: bool = False


def superfluous(there: Iterable[Kept], policy: Policy, saved: int) -> list[int]:
    """Return the steps that no rule keeps, oldest first.

    Parameters
    ----------
    saved : int
        The step that was saved just now: it stays, wherever its number stands.
    """
    if policy.keep is None:
        return []
    there = sorted(there, key=lambda kept: kept.step)
    stays = {saved, *(kept.step for kept in there[-policy.keep :]), *(kept.step for kept in there if kept.pinned)}
    if policy.every is not None:
        stays |= {kept.step for kept in there if kept.step % policy.every == 0}
    if policy.best is not None:
        stays |= set(best_of(there, policy.best))
    return [kept.step for kept in there if kept.step not in stays]


def best_of(there: Iterable[Kept], best: Best) -> list[int]:
    """Return the best steps, the best one first; of two equal ones the later. NaN and no value are never best."""
    sign = 1 if best.mode == "min" else -1
    scored = []
    for kept in there:
        value = kept.metrics.get(best.metric)
        if isinstance(value, int | float) and not math.isnan(value):
            scored.append((sign * value, -kept.step))
    return [-step for _, step in sorted(scored)[: best.count]]
