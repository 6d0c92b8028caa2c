"""A training loop in plain NumPy that may be killed at any moment, and goes on where its last checkpoint is.

    python numpy_loop.py RUN [--steps N] [--save-every K]

It ends as if it had never been killed, bit for bit: weights, momenta, the order
of the data and the place in it, and the states of all random numbers come back.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import numpy as np

import tensorio

SAMPLES, FEATURES, BATCH = 512, 16, 32


class Training:
    """Linear regression by SGD with momentum, dropout on the inputs, and jitter from `random`."""

    def __init__(self, seed: int = 0) -> None:
        np.random.seed(seed)
        random.seed(seed)
        self.shuffling = np.random.default_rng(seed)
        data = np.random.default_rng(12345)  # the same in every process
        self.x = data.normal(size=(SAMPLES, FEATURES))
        self.y = self.x @ data.normal(size=FEATURES) + 0.1 * data.normal(size=SAMPLES)
        self.weight, self.momentum = np.zeros(FEATURES), np.zeros(FEATURES)
        self.order, self.position = self.shuffling.permutation(SAMPLES), 0
        self.step = 0

    def advance(self) -> float:
        """Take one step; return its loss."""
        if self.position + BATCH > SAMPLES:
            self.order, self.position = self.shuffling.permutation(SAMPLES), 0
        batch = self.order[self.position : self.position + BATCH]
        self.position += BATCH
        inputs = self.x[batch] * (np.random.rand(BATCH, FEATURES) > 0.1)
        error = inputs @ self.weight - self.y[batch]
        self.momentum = 0.9 * self.momentum + inputs.T @ error / BATCH
        self.weight = self.weight - (0.01 + 0.001 * random.random()) * self.momentum
        self.step += 1
        return float((error**2).mean())

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "weight": self.weight, "momentum": self.momentum, "order": self.order, "position": self.position,
            "step": self.step, "rng": tensorio.rng_state({"shuffling": self.shuffling}),
        }  # fmt: skip

    def set_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        tensorio.set_rng_state(state["rng"], {"shuffling": self.shuffling})
        self.weight, self.momentum, self.order = state["weight"], state["momentum"], state["order"]
        self.position, self.step = state["position"], state["step"]


def train(folder: str, steps: int, save_every: int) -> Training:
    """Train to `steps`, from the newest checkpoint that is whole, if there is one."""
    training = Training()
    with tensorio.CheckpointManager(folder, keep=3, best=("loss", "min", 1), finite=True) as manager:
        restored = manager.restore()
        if restored is not None:
            training.set_state(restored.value)
            manager.rollback(restored.step)  # damaged ones after it, if there were any
        while training.step < steps:
            loss = training.advance()
            if training.step % save_every == 0 or training.step == steps:
                manager.save(training.step, training.state(), metrics={"loss": loss})
    return training


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="RUN")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=100)
    options = parser.parse_args()
    training = train(options.folder, options.steps, options.save_every)
    print(f"step {training.step}: weight[:3] = {training.weight[:3]}")


if __name__ == "__main__":
    main()
