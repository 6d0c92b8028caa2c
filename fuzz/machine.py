"""Fuzz the whole way from bytes to arrays: pickles by their grammar, wrapped as files; and whole files of every format.

``machine.py --seconds 60 --seed 1`` runs until the time is over; ``--replay FILE`` judges one file. Inputs follow from
the seed. Batches run in forked children with bounded memory and CPU time; what breaks a promise is made smaller and
kept in build/fuzz/machine/, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import hashlib
import importlib
import mmap
import os
import pickle
import pkgutil
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "fuzz")]

import cases
import containers
import grammar
import judge
import references
import seeds
import tensorio
from tensorio.allowlist import ALLOWED

BATCH = 400
CPU_SECONDS = 5  # after which an input counts as a hang
MEMORY = 1 << 30  # that a child may have beyond what it began with
PEER_SHARE = 0.25  # of the accepted inputs that the reference reads, too
SHRINKS = 300  # tries to make a finding smaller
SUMMARY_SECONDS = 300  # between two lines of a long run
POOL = 4000  # inputs kept for having ended in a new way

SIGNATURE = {"torch": "zip", "torch_zip": "zip", "torch_legacy": "legacy", "torch_tar": "tar", "pickle": "bare"}


@dataclass
class Input:
    """One file to judge."""

    data: bytes
    suffix: str
    room: int
    format: str | None = None  # None: found by content
    program: grammar.Program | None = None
    seed: containers.Seed | None = None


@dataclass
class Findings:
    """What a batch reports."""

    runs: int = 0
    accepted: int = 0
    endings: collections.Counter[str] = field(default_factory=collections.Counter)
    pool: dict[str, Input] = field(default_factory=dict)
    broken: list[tuple[str, str, Input]] = field(default_factory=list)
    peers: collections.Counter[str] = field(default_factory=collections.Counter)


class Source:
    """Where inputs come from: seeds, and what was found worth keeping."""

    def __init__(self) -> None:
        files = [*seeds.torch_files(), *seeds.plain_pickles(), *self.cases(), *seeds.files(*PICKLED, most=1 << 15)]
        self.files = containers.small([*self.cases(), *seeds.files(*SUFFIXES, most=1 << 14)])
        found = [containers.seed_of(data) for data in files]
        kinds = self.kinds()
        usable = [s for s in found if s is not None and s.kind in kinds and len(s.program) <= grammar.LONGEST]
        usable.append(containers.Seed("bare", [b"\x80\x02", b"N", b"."]))
        self.seeds = {kind: [s for s in usable if s.kind == kind] for kind in kinds}
        self.parts = grammar.parts_of([s.program for s in usable])
        self.names = list(ALLOWED)
        self.pool: list[Input] = []
        self.known: set[str] = set()

    @staticmethod
    def cases() -> list[bytes]:
        made = []
        for make in cases.CASES.values():
            with contextlib.suppress(BaseException):  # pytest's Skipped
                made.append(make().data)
        return made

    @staticmethod
    def kinds() -> set[str]:
        """The wrappings of pickles that this version of tensorio opens."""
        known = {kind for name, kind in SIGNATURE.items() if name in tensorio_formats()}
        return known | ({"bare"} if "legacy" in known else set())

    def make(self, rng: random.Random) -> Input:
        """The next input."""
        if rng.random() < 0.25:
            data = containers.mutated(rng, rng.choice(self.files), self.files)
            return Input(data, containers.suffix_of(data), max(len(data), 1 << 20))
        kept = rng.choice(self.pool) if self.pool and rng.random() < 0.4 else None
        seed = kept.seed if kept is not None and kept.seed is not None else rng.choice(self.seeds[self.kind(rng)])
        program = kept.program if kept is not None and kept.program is not None else seed.program
        maker = grammar.Grammar(rng, self.names, self.parts, seed.keys)
        program = maker.program() if rng.random() < 0.2 else maker.mutate(program)
        body = grammar.joined(program)
        data = containers.wrapped(rng, seed, body)
        format = "pickle" if seed.kind == "bare" and rng.random() < 0.8 else None
        return Input(data, ".pt", max(len(data), len(body)), format, program, seed)

    def kind(self, rng: random.Random) -> str:
        """A wrapping that there are seeds of."""
        while True:
            kind = rng.choice(("zip", "zip", "zip", "zip", "legacy", "bare", "bare", "tar"))
            if self.seeds.get(kind):
                return kind

    def keep(self, found: Findings) -> None:
        """Take over the inputs that ended in a new way."""
        for ending, kept in found.pool.items():
            if ending not in self.known and len(self.pool) < POOL:
                self.known.add(ending)
                self.pool.append(kept)


PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar", ".pt2", ".zip", ".joblib", ".t7", "/legacy", "/pickle")
SUFFIXES = (*PICKLED, ".safetensors", ".gguf", ".npz", ".npy", ".onnx")


def tensorio_formats() -> tuple[str, ...]:
    from tensorio import formats

    return formats.names()


# -------------------------------------------------------------------- a child


class Shared:
    """A page that the parent can read after the child has died: the input at work."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, 4 << 20)

    def put(self, item: Input) -> None:
        raw = pickle.dumps(item)
        if len(raw) + 8 <= len(self.map):
            self.map[:8] = len(raw).to_bytes(8, "little")
            self.map[8 : 8 + len(raw)] = raw

    def get(self) -> Input | None:
        n = int.from_bytes(self.map[:8], "little")
        item: Input | None = pickle.loads(self.map[8 : 8 + n]) if n else None
        return item


def in_child(work: Callable[[], Any], wall: float) -> tuple[Any, str]:
    """Run `work` in a forked child with its memory bounded; its answer, or None and how it died."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if not judge.SANITIZED:
                resource.setrlimit(resource.RLIMIT_AS, (judge._status("VmSize") + MEMORY,) * 2)
            answer = pickle.dumps(work())
            with os.fdopen(write_end, "wb") as out:
                out.write(answer)
            os._exit(0)
        except BaseException as error:
            print(f"child: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(98)
    os.close(write_end)
    timer = signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, wall)
    try:
        with os.fdopen(read_end, "rb") as answer_pipe:
            raw = answer_pipe.read()
        _, status = os.waitpid(pid, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, timer)
    if os.WIFSIGNALED(status):
        return None, signal.Signals(os.WTERMSIG(status)).name
    return (pickle.loads(raw), "") if raw else (None, f"status {os.WEXITSTATUS(status)}")


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Any:
    """A signal that ends the process when it has worked for so long; nothing in it can hold that up."""
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds * (10 if judge.SANITIZED else 1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def judged(judge_one: judge.Judge, watch: judge.Watch, item: Input, rng: random.Random) -> judge.Outcome:
    """The outcome of one input, or `Broken`."""
    watch.armed = True
    try:
        with cpu_limit(CPU_SECONDS):
            return judge_one(item.data, item.suffix, item.room, rng, item.format)
    finally:
        watch.armed = False
        gc.collect(1)  # what this input left in cycles; older generations are frozen
        watch.check()


def batch(source: Source, shared: Shared, folder: str, seed: int, number: int, until: float) -> Findings:
    """A batch of inputs, in the child."""
    found = Findings()
    judge_one, watch = judge.Judge(folder), judge.Watch(folder)
    for i in range(BATCH):
        if time.monotonic() > until:
            break
        rng = random.Random(f"{seed} {number} {i}")
        item = source.make(rng)
        shared.put(item)
        try:
            outcome = judged(judge_one, watch, item, rng)
        except judge.Broken as broken:
            found.broken.append((broken.kind, str(broken), item))
            continue
        found.runs += 1
        found.accepted += outcome.error is None
        found.endings[type(outcome.error).__name__ if outcome.error else "read"] += 1
        if outcome.shape not in source.known and outcome.shape not in found.pool:
            found.pool[outcome.shape] = item
        if outcome.error is None and item.format is None and rng.random() < PEER_SHARE:
            found.peers["sampled"] += 1
            found.pool[f"peer {number} {i}"] = item
    found.endings["(refused with other words by map, read or bytes)"] += judge_one.worded_otherwise
    return found


def compare_with_peers(items: list[Input], shared: Shared) -> Findings:
    """What the reference readers say, in a child of its own."""
    found = Findings()
    for item in items:
        shared.put(item)
        try:
            with cpu_limit(2 * CPU_SECONDS):
                if item.suffix == ".safetensors":
                    for text in references.safetensors_differs(item.data):
                        raise judge.Broken("differs", text)
                    found.peers["safetensors agreed"] += 1
                else:
                    refuses = references.torch_refuses(item.data, item.format)
                    found.peers["torch refused" if refuses else "torch agreed"] += refuses is not None
        except judge.Broken as broken:
            found.broken.append((broken.kind, str(broken), item))
        except tensorio.TensorIOError:
            found.peers["other format"] += 1
    return found


# ------------------------------------------------------------------ findings


def kind_of(item: Input, folder: str, peer: bool) -> str:
    """How judging one input ends: a kind of breach, a signal, or nothing."""

    def work() -> str:
        if peer:
            broken = compare_with_peers([item], Shared()).broken
            return broken[0][0] if broken else ""
        try:
            for turn in range(8):  # all that `others` does by turns
                rng = random.Random(turn)
                rng.randrange = lambda *_, turn=turn: turn  # type: ignore[method-assign,assignment,misc]
                judged(judge.Judge(folder), judge.Watch(folder), item, rng)
        except judge.Broken as broken:
            return broken.kind
        return ""

    kind, death = in_child(work, 120)
    return death or str(kind)


def smaller(item: Input, kind: str, folder: str) -> Input:
    """Greedily drop opcodes, then bytes, as long as the same breach remains."""
    tries = SHRINKS
    until = time.monotonic() + 60

    def holds(candidate: Input) -> bool:
        nonlocal tries
        tries -= 1
        return kind_of(candidate, folder, kind == "differs") == kind

    def shrink(pieces: Any, rebuild: Callable[[Any], Input]) -> Any:
        size = len(pieces) // 2
        while size:
            at = 0
            while at < len(pieces):
                if tries <= 0 or time.monotonic() > until:
                    return pieces
                shorter = pieces[:at] + pieces[at + size :]
                if shorter and holds(rebuild(shorter)):
                    pieces = shorter
                else:
                    at += size
            size //= 2
        return pieces

    if item.program is not None and item.seed is not None:
        seed, plain = item.seed, random.Random(0)
        plain.random = lambda: 0.5  # type: ignore[method-assign]

        def rewrapped(program: grammar.Program) -> Input:
            body = grammar.joined(program)
            data = containers.wrapped(plain, seed, body)
            return Input(data, item.suffix, max(len(data), len(body)), item.format, program, seed)

        if holds(rewrapped(item.program)):
            return rewrapped(shrink(item.program, rewrapped))

    def shorter(data: bytes) -> Input:
        return Input(data, item.suffix, item.room, item.format)

    return shorter(shrink(item.data, shorter))


def report(kind: str, text: str, item: Input, folder: str) -> None:
    """Write a finding with a smaller one that does the same."""
    out = ROOT / "build" / "fuzz" / "machine"
    out.mkdir(parents=True, exist_ok=True)
    name = f"{kind}-{hashlib.sha1(item.data).hexdigest()[:10]}"
    (out / f"{name}{item.suffix}").write_bytes(item.data)
    again = kind_of(item, folder, kind == "differs")
    small = smaller(item, again, folder) if again else item
    (out / f"{name}.min{item.suffix}").write_bytes(small.data)
    program = "" if small.program is None else f"\npickle: {grammar.joined(small.program)!r}"
    (out / f"{name}.txt").write_text(f"{text}\nalone: {again or 'does not happen'}\n{len(small.data)} bytes{program}\n")
    print(f"FOUND {name}: {text[:400]} (alone: {again or 'nothing'}){program[:2000]}", flush=True)


class Run:
    """Batches until the time is over."""

    def __init__(self, seed: int, seconds: float) -> None:
        self.seed = seed
        self.seconds = seconds
        self.until = 0.0
        self.total = Findings()
        self.source = Source()
        self.shared = Shared()
        self.folder = tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.reported: collections.Counter[str] = collections.Counter()

    def found(self, kind: str, text: str, item: Input | None) -> None:
        """Report a finding, but of each sort a few only."""
        sort = f"{kind} {text.split(' of ')[0][:60]}"
        self.reported[sort] += 1
        if item is not None and self.reported[sort] <= 3:
            report(kind, text, item, self.folder)

    def batch(self, number: int) -> None:
        answer, death = in_child(
            lambda: batch(self.source, self.shared, self.folder, self.seed, number, self.until), 600
        )
        if answer is None:
            self.found(death, f"the child ended by {death}", self.shared.get())
            return
        self.total.runs += answer.runs
        self.total.accepted += answer.accepted
        self.total.endings += answer.endings
        for kind, text, item in answer.broken:
            self.found(kind, text, item)
        sampled = [item for shape, item in answer.pool.items() if shape.startswith("peer ")]
        answer.pool = {shape: item for shape, item in answer.pool.items() if not shape.startswith("peer ")}
        self.source.keep(answer)
        if sampled:
            self.compare(sampled)

    def compare(self, sampled: list[Input]) -> None:
        answer, death = in_child(lambda: compare_with_peers(sampled, self.shared), 600)
        if answer is None:
            self.total.peers[f"the reference died of {death}"] += 1
            return
        self.total.peers += answer.peers
        for kind, text, item in answer.broken:
            self.found(kind, text, item)

    def __call__(self) -> int:
        warm_up(self.folder)
        start = said = time.monotonic()
        self.until = start + self.seconds
        number = 0
        try:
            while time.monotonic() < self.until:
                self.batch(number)
                number += 1
                if time.monotonic() - said > SUMMARY_SECONDS:
                    said = time.monotonic()
                    print(self.summary(said - start), flush=True)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        print(self.summary(time.monotonic() - start))
        return 1 if self.reported else 0

    def summary(self, seconds: float) -> str:
        total = self.total
        rate = total.runs / max(seconds, 0.001)
        ends = ", ".join(f"{n} {name}" for name, n in total.endings.most_common())
        said = ", ".join(f"{n} {name}" for name, n in total.peers.most_common()) or "none"
        return (
            f"machine     {total.runs:12d} executions, {rate:7.0f} per second, {len(self.source.known)} ways to end, "
            f"{len(self.source.pool)} kept, {sum(self.reported.values())} findings\n  endings: {ends}\n  peers: {said}"
        )


def warm_up(folder: str) -> None:
    """Import what is imported on first use, so that an import is news."""
    for module in pkgutil.walk_packages(tensorio.__path__, "tensorio."):
        if not module.name.startswith(("tensorio.cli", "tensorio.torch", "tensorio.__main__")):
            import_if_installed(module.name)
    for data in Source.cases():
        for turn in range(8):
            judge.Judge(folder)(data, containers.suffix_of(data), 1 << 20, random.Random(turn))
    gc.disable()
    gc.freeze()


def import_if_installed(name: str) -> None:
    """Import a module, unless it is the face of a package that is not here, such as `tensorio.safetensors.flax`."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "tensorio":
            raise


def replay(path: str) -> int:
    """Judge one file, verbosely."""
    data = Path(path).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        warm_up(folder)
        for turn in range(8):
            rng = random.Random(turn)
            try:
                outcome = judge.Judge(folder)(data, Path(path).suffix, max(len(data), 1 << 20), rng)
            except judge.Broken as broken:
                print(broken)
                return 1
        print(outcome.picture)
        found = compare_with_peers([Input(data, Path(path).suffix, len(data))], Shared())
        print(dict(found.peers), [text for _, text, _ in found.broken])
    return 1 if found.broken else 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.replay:
        return replay(arguments.replay)
    return Run(arguments.seed, arguments.seconds)()


if __name__ == "__main__":
    sys.exit(main())
