"""Loaders of safetensors files, each in a process of its own: ours, and whatever peers are installed.

``python loaders.py NAME PATH`` loads, reads a byte of every page, and prints one line of JSON: seconds of CPU and of
the clock, bytes of the highest resident memory and of this process' share of it, and a sum over what was read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import child

Held = Any


class Loader(NamedTuple):
    """A way of loading.

    Attributes
    ----------
    name : str
    needs : str
        Module without which it is left out.
    load : callable
        Takes the path, returns what keeps the tensors alive, and a mapping of names to tensors.
    suffix : str
        Of the file that it reads.
    """

    name: str
    needs: str
    load: Callable[[str], tuple[Held, dict[str, Any]]]
    suffix: str = ".safetensors"

    @property
    def installed(self) -> bool:
        """Whether the module that it needs is here."""
        return find_spec(self.needs) is not None


def ours(**options: Any) -> Callable[[str], tuple[Held, dict[str, Any]]]:
    def load(path: str) -> tuple[Held, dict[str, Any]]:
        import tensorio

        return None, tensorio.load(path, **options)

    return load


def prefetched(path: str) -> tuple[Held, dict[str, Any]]:
    import tensorio

    checkpoint = tensorio.open(path)
    checkpoint.prefetch(wait=True)
    return checkpoint, dict(checkpoint)


def safetensors_torch(path: str) -> tuple[Held, dict[str, Any]]:
    from safetensors.torch import load_file

    return None, load_file(path)


def safetensors_bytes(path: str) -> tuple[Held, dict[str, Any]]:
    from safetensors.torch import load

    return None, load(Path(path).read_bytes())


def torch_mapped(path: str) -> tuple[Held, dict[str, Any]]:
    import torch

    return None, torch.load(path, weights_only=True, mmap=True)


def torch_load(path: str) -> tuple[Held, dict[str, Any]]:
    import torch

    return None, torch.load(path, weights_only=True)


def fastsafetensors(path: str) -> tuple[Held, dict[str, Any]]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
    loader.add_filenames({0: [path]})
    buffers = loader.copy_files_to_device()
    return (loader, buffers), {name: buffers.get_tensor(name) for name in buffers.key_to_rank_lidx}


def runai(path: str) -> tuple[Held, dict[str, Any]]:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)
        return None, dict(streamer.get_tensors())


def tensorizer(path: str) -> tuple[Held, dict[str, Any]]:
    from tensorizer import TensorDeserializer

    loaded = TensorDeserializer(path, device="cpu")
    return loaded, dict(loaded.items())


LOADERS = {
    loader.name: loader
    for loader in (
        Loader("prefetch", "tensorio", prefetched),
        Loader("load", "tensorio", ours()),
        Loader("load(mmap=False)", "tensorio", ours(mmap=False)),
        Loader("safetensors", "safetensors", safetensors_torch),
        Loader("safetensors, of bytes", "safetensors", safetensors_bytes),
        Loader("torch.load(mmap=True)", "torch", torch_mapped, ".pt"),
        Loader("torch.load", "torch", torch_load, ".pt"),
        Loader("fastsafetensors", "fastsafetensors", fastsafetensors),
        Loader("runai-model-streamer", "runai_model_streamer", runai),
        Loader("tensorizer", "tensorizer", tensorizer, ".tensors"),
    )
}
# What is imported before the clock starts, since that is no part of loading.
IMPORTS = ("numpy", "ml_dtypes", "tensorio._arrays")


def do(name: str, path: Path) -> dict[str, float]:
    """Load in a fresh process; what it reports."""
    return child.run([sys.executable, __file__, name, str(path)])


def make_tensorizer(source: Path, target: Path) -> None:
    """Write a file in the format of tensorizer, in a process of its own."""
    child.run([sys.executable, __file__, "make-tensorizer", str(source), str(target)])


# ------------------------------------------------------------------------- in the child


def _share() -> int:
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("Pss:"))


def _pages(tensors: dict[str, Any]) -> Iterator[int]:
    import numpy as np

    for tensor in tensors.values():
        array = tensor if isinstance(tensor, np.ndarray) else tensor.detach().numpy()
        yield int(array.reshape(-1).view(np.uint8)[::4096].sum(dtype=np.int64))


def _measured(loader: Loader, path: str) -> dict[str, float]:
    for module in (*IMPORTS, loader.needs):
        __import__(module)
    loader.load(str(Path(path).with_name("warm-up" + loader.suffix)))  # what it sets up at its first use
    before, share = child.status("VmRSS"), _share()
    wall, cpu = time.perf_counter(), time.process_time()
    held, tensors = loader.load(path)
    total = sum(_pages(tensors))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    found = {"cpu": cpu, "wall": wall, "peak": child.status("VmHWM") - before, "share": _share() - share}
    return {**found, "total": total, "tensors": len(tensors), "held": held is not None}


def _make_tensorizer(source: str, target: str) -> None:
    from safetensors.torch import load_file
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(target)
    serializer.write_state_dict(load_file(source))
    serializer.close()


if __name__ == "__main__":
    if sys.argv[1] == "make-tensorizer":
        _make_tensorizer(*sys.argv[2:])
        print("{}")
    else:
        # Some peers write to stdout; the answer goes to what was stdout at the start.
        answer = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        print(json.dumps(_measured(LOADERS[sys.argv[1]], sys.argv[2])), file=answer)
