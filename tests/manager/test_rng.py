"""States of random number generators: saved, loaded, set; all of them or none."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
from tensorio.manager import _rng

torch = pytest.importorskip("torch")
from tensorio import torch as face  # noqa: E402

BITS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == np.asarray(b).dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


def made() -> dict[str, Any]:
    numpys = {f"np{i}": np.random.Generator(bits(i)) for i, bits in enumerate(BITS)}
    return {**numpys, "loader": torch.Generator().manual_seed(3)}


def draw(generators: dict[str, Any]) -> list[Any]:
    """One of everything, where a spare normal number is in the state, too."""
    out: list[Any] = [random.random(), random.gauss(0, 1), np.random.randn(), np.random.randint(1 << 30)]
    out += torch.randn(3).tolist()
    for one in generators.values():
        out.append(torch.rand(2, generator=one).tolist() if isinstance(one, torch.Generator) else one.normal())
        if not isinstance(one, torch.Generator):
            out.append(int(one.integers(1 << 20, dtype=np.uint32)))  # PCG64 keeps the other half of a word
    return out


@pytest.mark.parametrize("load", [tensorio.load, face.load, lambda path: torch.load(path, weights_only=True)],
                         ids=["tensorio", "tensorio.torch", "torch"])  # fmt: skip
def test_what_is_drawn_is_drawn_again(load: Callable[[Any], Any], tmp_path: Path) -> None:
    generators = made()
    draw(generators)
    state = face.rng_state(generators)
    tensorio.save({"rng": state}, tmp_path / "rng.pt")
    assert equal(state, tensorio.load(tmp_path / "rng.pt")["rng"])
    first = draw(generators)
    others = made()
    assert draw(others) != first
    face.set_rng_state(load(tmp_path / "rng.pt")["rng"], others)
    assert draw(others) == first


def test_the_state_is_of_that_moment(tmp_path: Path) -> None:
    state = face.rng_state()
    before = copy.deepcopy(state)
    torch.rand(5)
    np.random.rand()
    assert equal(state, before)


def test_without_torch_there_is_the_rest(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    state = tensorio.rng_state({"mine": generator})
    tensorio.save(state, tmp_path / "rng.pt")
    first = [random.random(), np.random.rand(), generator.random()]
    other = np.random.default_rng(0)
    tensorio.set_rng_state(tensorio.load(tmp_path / "rng.pt"), {"mine": other})
    assert [random.random(), np.random.rand(), other.random()] == first


DAMAGES: dict[str, Callable[[Any], object]] = {
    "no python": lambda s: s.pop("python"),
    "python cut": lambda s: s["python"].update(words=s["python"]["words"][:-1]),
    "python version": lambda s: s["python"].update(version=77),
    "python position": lambda s: s["python"].update(words=np.full(625, 9999, np.uint32)),
    "numpy cut": lambda s: s["numpy"]["state"].update(key=np.zeros(3, np.uint32)),
    "numpy other": lambda s: s["numpy"].update(bit_generator="MT20000"),
    "no generators": lambda s: s.pop("generators"),
    "generator of another kind": lambda s: s["generators"].update(np0=s["generators"]["np2"]),
    "generator damaged": lambda s: s["generators"].update(np0={"bit_generator": "PCG64"}),
    "generator missing": lambda s: s["generators"].pop("np1"),
    "no torch": lambda s: s.pop("torch"),
    "torch cut": lambda s: s["torch"].update(cpu=s["torch"]["cpu"][:100]),
    "torch of another type": lambda s: s["torch"].update(cpu=s["torch"]["cpu"].view(np.int8)),
    "torch text": lambda s: s["torch"].update(cpu="state"),
    "torch generator missing": lambda s: s["torch"]["generators"].clear(),
    "torch generator cut": lambda s: s["torch"]["generators"].update(loader=np.zeros(3, np.uint8)),
    "cuda": lambda s: s["torch"].update(cuda=5),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_sets_nothing(damage: str) -> None:
    generators = made()
    state = copy.deepcopy(face.rng_state(generators))
    draw(generators)
    now = face.rng_state(generators)
    DAMAGES[damage](state)
    with pytest.raises(tensorio.TensorMismatchError, match="random state") as caught:
        face.set_rng_state(state, generators)
    assert len(str(caught.value)) <= 500
    assert equal(face.rng_state(generators), now)


class Cuda:
    """As many devices as are asked for, that remember their states."""

    def __init__(self, devices: int) -> None:
        self.states = [torch.zeros(16, dtype=torch.uint8) + i for i in range(devices)]

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: len(self.states))
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: list(self.states))
        patch.setattr(torch.cuda, "set_rng_state_all", lambda states: self.states.__setitem__(slice(None), states))
        patch.setattr(torch, "Generator", lambda device="cpu": type("G", (), {"set_state": lambda self, state: None})())


def test_states_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        Cuda(2).patch(patch)
        patch.setattr(_rng, "numpy_setters", lambda *a: [])
        state = face.rng_state()
        assert [list(one[:1]) for one in state["torch"]["cuda"]] == [[0], [1]]
        other = Cuda(2)
        other.states = [one + 7 for one in other.states]
        other.patch(patch)
        patch.setattr(face._rng, "_sorted", lambda generators: ({}, {}))
        face.set_rng_state(state)
        assert [int(one[0]) for one in other.states] == [0, 1]
        Cuda(3).patch(patch)
        with pytest.raises(tensorio.TensorMismatchError, match="expected 3, found 2"):
            face.set_rng_state(state)
    face.set_rng_state(state)  # without devices, there is nothing to set
