"""Processes that share a checkpoint, and what the system says of their memory.

Each worker serves questions over a connection, so that a test decides when all of them
have touched what they share.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import tensorio

PAGE = 4096
WAIT = 30  # seconds


class Usage(NamedTuple):
    """What a process has of one file in its mappings, in bytes."""

    pss: int
    rss: int
    private_dirty: int
    anonymous: int
    huge: int


def usage(pid: int, inode: int) -> Usage:
    """Add up a process's mappings of a file, as /proc/PID/smaps has them."""
    found = dict.fromkeys(("Pss:", "Rss:", "Private_Dirty:", "Anonymous:", "ShmemPmdMapped:"), 0)
    ours = False
    with open(f"/proc/{pid}/smaps") as f:
        for line in f:
            words = line.split()
            if not words[0].endswith(":"):
                ours = int(words[4]) == inode
            elif ours and words[0] in found:
                found[words[0]] += int(words[1]) * 1024
    return Usage(*found.values())


def answer(checkpoint: tensorio.Checkpoint, question: list[Any]) -> Any:
    """What a worker does when it is asked."""
    if question[0] == "touch":
        return sum(int(a.reshape(-1).view(np.uint8)[::PAGE].astype(int).sum()) for a in checkpoint.values())
    if question[0] == "value":
        return float(checkpoint[question[1]].reshape(-1)[0])
    if question[0] == "write":
        checkpoint[question[1]].reshape(-1)[0] = question[2]
        return None
    if question[0] == "format":
        return checkpoint.format
    raise ValueError(question)


def serve(checkpoint: tensorio.Checkpoint, connection: Any) -> None:
    """The life of a forked or spawned worker."""
    with contextlib.suppress(EOFError):
        while True:
            connection.send(answer(checkpoint, connection.recv()))


def serve_lines() -> None:
    """The life of an unrelated worker: attach to what the command line says, then a question a line."""
    name, options = sys.argv[1], json.loads(sys.argv[2])
    checkpoint = tensorio.attach(name, **options)
    for line in sys.stdin:
        print(json.dumps(answer(checkpoint, json.loads(line))), flush=True)


class Worker:
    """A child of multiprocessing that has a checkpoint by fork or by pickle."""

    def __init__(self, method: str, checkpoint: tensorio.Checkpoint) -> None:
        context: Any = multiprocessing.get_context(method)
        self._here, there = context.Pipe()
        self._process = context.Process(target=serve, args=(checkpoint, there), daemon=True)
        self._process.start()
        there.close()
        self.pid: int = self._process.pid

    def ask(self, *question: Any) -> Any:
        self._here.send(question)
        assert self._here.poll(WAIT)
        return self._here.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._here.close()


class Stranger:
    """A process that has nothing of this one but a name."""

    def __init__(self, name: str, **options: Any) -> None:
        self._process = python("import sharers; sharers.serve_lines()", name, json.dumps(options))
        self.pid = self._process.pid

    def ask(self, *question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the worker died"
        return json.loads(line)

    def end(self) -> None:
        kill(self._process)


def python(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start an interpreter on a piece of code, with its input and output at hand."""
    path = os.pathsep.join([os.path.dirname(__file__), *(p for p in sys.path if p)])
    environment = dict(os.environ, PYTHONPATH=path)
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True, env=environment, **options)  # fmt: skip


def kill(process: subprocess.Popen[str]) -> None:
    """End a process of `python` at once, and wait for it."""
    process.kill()
    process.communicate(timeout=WAIT)


@contextlib.contextmanager
def ending(*workers: Any) -> Iterator[None]:
    """End the workers whatever happens."""
    try:
        yield
    finally:
        for worker in workers:
            worker.end()


def publisher(source: str, name: str, **options: Any) -> subprocess.Popen[str]:
    """A process that publishes a file and holds it; it has done so when this returns."""
    arguments = pickle.dumps((source, name, options)).hex()
    code = (
        "import pickle, sys, tensorio\n"
        "source, name, options = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "publication = tensorio.publish(source, name, **options)\n"
        "print('published', publication.kind, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = python(code, arguments)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("published")
    return process
