"""Acts in a fresh process, whose peak of memory is then that of the act.

``python child.py ACT ARGUMENT...`` prints one line of JSON. Bytes throughout; mapped
pages of files count, as they do for the kernel.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent


def do(act: str, *arguments: object) -> dict[str, Any]:
    """Do an act in a process of its own and return what it reports."""
    return run(command(act, *arguments))


def run(arguments: list[str]) -> dict[str, Any]:
    """Run a program and return what it reports."""
    answer = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, env=environment()).stdout
    found: dict[str, Any] = json.loads(answer)
    return found


def command(act: str, *arguments: object) -> list[str]:
    return [sys.executable, str(BENCH / "child.py"), act, *map(str, arguments)]


def environment() -> dict[str, str]:
    """Ours, with the same tensorio on the path."""
    import tensorio

    package = Path(tensorio.__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, (str(package), str(BENCH.parent / "tests"), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}


# ------------------------------------------------------------- in the child


def status(field: str) -> int:
    """A figure of ``/proc/self/status``, in bytes."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith(field + ":"))


def growth(act: Callable[[], object]) -> int:
    """How far the peak of resident memory rises above what is there before."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # the peak starts again from here; where that is not allowed, it is overstated
    before = status("VmRSS")
    held = act()
    peak = status("VmHWM") - before
    del held
    return peak


def save(path: str, nbytes: str) -> dict[str, int]:
    import inputs
    import tensorio

    arrays = inputs.few(Path(path).parent, "child", int(nbytes)).arrays
    return {"growth": growth(lambda: tensorio.save(arrays, path, durable=False))}


def convert(source: str, target: str) -> dict[str, int]:
    import numpy  # noqa: F401

    import tensorio

    return {"growth": growth(lambda: tensorio.convert(source, target, durable=False))}


def verify(path: str) -> dict[str, int]:
    import numpy  # noqa: F401

    import tensorio

    return {"growth": growth(lambda: tensorio.verify(path))}


def load(path: str) -> dict[str, int]:
    import numpy  # noqa: F401

    import tensorio

    return {"growth": growth(lambda: tensorio.load(path))}


def inspect(path: str) -> dict[str, int]:
    """The command line's work, output included; the interpreter as it starts is not counted."""
    out = io.StringIO()

    def act() -> None:
        from tensorio.cli import run

        with redirect_stdout(out):
            assert run(["inspect", path, "--json"]) == 0

    return {"growth": growth(act), "tensors": len(json.loads(out.getvalue())["tensors"])}


# ------------------------------------------------------------------ workers


def share(loader: str, path: str) -> None:
    """Wait to be told; load; wait; read every page; tell what memory is this process' own share."""
    import inputs
    import peers
    import tensorio

    loaders: dict[str, Callable[[str], Any]] = {
        "load": tensorio.load,
        "safetensors.numpy": lambda p: peers.safetensors_numpy(Path(p)),
        "torch.load(mmap=True)": lambda p: peers.torch_load(Path(p), True),
    }
    if loader.startswith("torch"):
        import torch  # noqa: F401
    held: Any = None
    print("ready", flush=True)
    for line in sys.stdin:
        order = line.strip()
        if order == "load":
            held = loaders[loader](path)
            inputs.touch(held)
        print(_proportional() if order == "measure" else "done", flush=True)


def _proportional() -> int:
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("Pss:"))


class Workers:
    """Several processes that do the same, step by step."""

    def __init__(self, count: int, loader: str, path: Path) -> None:
        self._processes = [
            subprocess.Popen(command("share", loader, path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             env=environment())
            for _ in range(count)
        ]  # fmt: skip
        for process in self._processes:
            self._line(process)

    def tell(self, order: str) -> list[str]:
        """Give an order to all of them and return their answers."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(order + "\n")
            process.stdin.flush()
        return [self._line(process) for process in self._processes]

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line, f"a worker ended with {process.wait()}"
        return line

    def growth(self) -> int:
        """Load in all of them; return by how much their memory together grows, shared pages counted once."""
        before = sum(map(int, self.tell("measure")))
        self.tell("load")
        return sum(map(int, self.tell("measure"))) - before

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.communicate()


if __name__ == "__main__":
    result = {f.__name__: f for f in (save, convert, verify, load, inspect, share)}[sys.argv[1]](*sys.argv[2:])
    if result is not None:
        print(json.dumps(result))
