"""Run ours and its peers in turn, in one process, and keep what each cost.

A busy machine slows whatever runs at the moment, so that figures taken one after
the other compare moments, not code. Here every round runs every implementation once
and the next round does so again; what is compared are the minima over all rounds.
CPU time (this process with all its threads, and the children it waited for) hardly
depends on the neighbours, wall time does: both are kept.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import repeat
from typing import Any, Literal

Clock = Literal["cpu", "wall"]
Check = Callable[[Any], object]

# A target missed by less than this is within what the same code scatters from run to run.
NOISE = 0.05


@dataclass
class Entry:
    """One implementation of an act.

    Attributes
    ----------
    name : str
    run : callable
        What is timed; returns the result.
    at_most : float, optional
        For a peer: the most that ours may cost, as a multiple of it.
    clock : "cpu" or "wall"
        Which of the two the target is about.
    needs : str
        Module without which the entry is left out.
    check : callable, optional
        Takes a result and raises if it is wrong; that of the race if not given.
    """

    name: str
    run: Callable[[], Any]
    at_most: float | None = None
    clock: Clock = "cpu"
    needs: str = ""
    check: Check | None = None
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    @property
    def installed(self) -> bool:
        """Whether the module that it needs is here."""
        return not self.needs or find_spec(self.needs) is not None

    def times(self, clock: Clock) -> list[float]:
        """Seconds of every round."""
        return self.cpu if clock == "cpu" else self.wall

    def best(self, clock: Clock) -> float:
        """Seconds of the best round."""
        return min(self.times(clock))


@dataclass
class Row:
    """A line of the table: ours against one peer, or a figure against its limit."""

    section: str
    act: str
    ours: Entry
    peer: Entry

    @property
    def clock(self) -> Clock:
        """The clock that is judged and shown."""
        return self.peer.clock

    def ratio(self, clock: Clock) -> float | None:
        """Best of ours over best of the peer."""
        return self.ours.best(clock) / self.peer.best(clock) if self.peer.cpu else None

    @property
    def verdict(self) -> str:
        """Whether the target is met; "near" if it is missed by less than the noise."""
        ratio, target = self.ratio(self.clock), self.peer.at_most
        return "" if target is None or ratio is None else judge(ratio, target)


@dataclass
class Bound:
    """A line of the table: a figure and its limit."""

    section: str
    act: str
    what: str
    value: float
    limit: float | None
    unit: str

    @property
    def verdict(self) -> str:
        """Whether the limit is kept."""
        return "" if self.limit is None else ("yes" if self.value <= self.limit else "NO")


def judge(ratio: float, target: float) -> str:
    """Put a ratio against its target into a word."""
    if ratio <= target:
        return "yes"
    return "near" if ratio <= target * (1 + NOISE) else "NO"


@dataclass
class Table:
    """What was measured in this run.

    Attributes
    ----------
    section : str
        The file of the bench that runs now.
    """

    rows: list[Row | Bound] = field(default_factory=list)
    details: list[tuple[str, list[Entry], int]] = field(default_factory=list)
    section: str = ""

    def bound(self, act: str, what: str, value: float, limit: float | None, unit: str = "MiB") -> None:
        """Add a figure, and fail if it is over its limit, unless it is a time."""
        row = Bound(self.section, act, what, value, limit, unit)
        self.rows.append(row)
        assert unit == "ms" or row.verdict != "NO", f"{act}, {what}: {value:.1f} {unit}, the limit is {limit:g} {unit}"


class Race:
    """Measures one act; call it once per test.

    Parameters
    ----------
    benchmark : BenchmarkFixture
        It times ours (wall), in the same rounds, for its own tables and files.
    quick : bool
        One round only: a test that the bench works.
    """

    def __init__(self, benchmark: Any, table: Table, quick: bool) -> None:
        self._benchmark = benchmark
        self._table = table
        self._quick = quick
        self._held: Any = None

    def __call__(
        self,
        act: str,
        ours: Entry,
        peers: Sequence[Entry],
        *,
        check: Check | None = None,
        before: Callable[[], object] | None = None,
        rounds: int = 15,
        loops: int = 1,
        nbytes: int = 0,
    ) -> None:
        """Run all entries `rounds` times in turn and add a row per peer.

        Parameters
        ----------
        check : callable, optional
            Takes a result and raises if it is wrong. Called on one result of each
            entry, before anything is timed.
        before : callable, optional
            Called before each run, untimed.
        loops : int
            Calls per measurement, for acts that are too short for the clock.
        nbytes : int
            What moves, for bytes per second; 0 if nothing does. If something does, memory
            that was freed goes back to the system before each run: nobody's new memory
            is then cheaper than a fresh process' because somebody else had it before.
        """
        here = [entry for entry in peers if entry.installed]
        for entry in (ours, *here):
            entry.check = entry.check or check
        if self._quick:
            loops = 1
        gc.collect()
        gc.freeze()  # what is here already is not walked again while something is timed
        try:
            self._run(ours, here, _prepared(before, nbytes), loops, 1 if self._quick else rounds * _more())
        finally:
            self._held = None
            gc.unfreeze()
        self._table.rows += [Row(self._table.section, act, ours, peer) for peer in peers]
        self._table.details.append((act, [ours, *here], nbytes))
        self._benchmark.group = act
        self._benchmark.extra_info.update({e.name: {"cpu": e.cpu, "wall": e.wall} for e in (ours, *here)})

    def once(self, run: Callable[[], Any]) -> Any:
        """Run something whose figures are not times, under pytest-benchmark's eyes."""
        return self._benchmark.pedantic(run)

    def _try(self, entry: Entry, before: Callable[[], object] | None) -> None:
        """Run an entry once, untimed, and check what it returns."""
        if before is not None:
            before()
        result = entry.run()
        if entry.check is not None:
            entry.check(result)

    def _run(
        self, ours: Entry, peers: list[Entry], before: Callable[[], object] | None, loops: int, rounds: int
    ) -> None:
        turn = -1

        def setup() -> None:
            nonlocal turn
            if turn < 0:
                for entry in (ours, *peers):
                    self._try(entry, before)
                turn = 0
            for entry in (*peers[turn:], *peers[:turn]):
                self._lap(entry, before, loops)
            turn = (turn + 1) % max(len(peers), 1)
            self._ready(before)

        self._benchmark.pedantic(lambda: self._timed(ours, loops), setup=setup, rounds=rounds)

    def _lap(self, entry: Entry, before: Callable[[], object] | None, loops: int) -> None:
        self._ready(before)
        self._timed(entry, loops)

    def _ready(self, before: Callable[[], object] | None) -> None:
        self._held = None  # the last result goes outside of anybody's time
        if before is not None:
            before()
        gc.collect()

    def _timed(self, entry: Entry, loops: int) -> None:
        run = entry.run
        children, wall, cpu = _children_cpu(), time.perf_counter(), time.process_time()
        for _ in repeat(None, loops):
            self._held = run()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        entry.wall.append(wall / loops)
        entry.cpu.append((cpu + _children_cpu() - children) / loops)


def _prepared(before: Callable[[], object] | None, nbytes: int) -> Callable[[], object] | None:
    """What is to be done before each run: the caller's part, then giving back what malloc kept."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if nbytes else None
    if trim is None:
        return before

    def prepare() -> None:
        if before is not None:
            before()
        trim(0)

    return prepare


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _more() -> int:
    """How many times the usual number of rounds is wanted."""
    return int(os.environ.get("TENSORIO_BENCH_ROUNDS", "1"))


def median(times: list[float]) -> float:
    """Return the median of some times."""
    return statistics.median(times)
