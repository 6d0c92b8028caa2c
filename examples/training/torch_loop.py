"""A training loop in torch on the CPU that may be killed at any moment, and goes on where its last checkpoint is.

    python torch_loop.py RUN [--steps N] [--save-every K] [--background]

It ends as if it had never been killed, bit for bit: the model, AdamW, the
schedule of the learning rate, the order of the data and the place in it, and the
states of all random numbers (dropout draws from torch's) come back.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import tensorio
from tensorio import torch as tt

SAMPLES, FEATURES, BATCH = 256, 8, 16


class Order(torch.utils.data.Sampler[int]):
    """Shuffled indices, with a place in them that can be saved."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.indices, self.position = torch.empty(0, dtype=torch.int64), 0

    def __iter__(self) -> Iterator[int]:
        if self.position >= len(self.indices):
            self.indices, self.position = torch.randperm(SAMPLES, generator=self.generator), 0
        yield from self.indices[self.position :].tolist()

    def __len__(self) -> int:
        return SAMPLES


class Training:
    """A small network with dropout, AdamW, a cosine schedule and a DataLoader."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)  # not drawn from here, but a part of the state
        np.random.seed(seed)
        data = torch.Generator().manual_seed(12345)  # the same in every process
        x = torch.randn(SAMPLES, FEATURES, generator=data)
        self.model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=500)
        self.shuffling = torch.Generator().manual_seed(seed)
        self.order = Order(self.shuffling)
        self.data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        self.loader = torch.utils.data.DataLoader(
            self.data, batch_size=BATCH, sampler=self.order, generator=torch.Generator()
        )
        self.batches = iter(self.loader)
        self.step = 0

    def advance(self) -> float:
        """Take one step; return its loss."""
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        self.order.position += BATCH
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return loss.item()

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(), "indices": self.order.indices, "position": self.order.position,
            "step": self.step, "rng": tt.rng_state({"shuffling": self.shuffling}),
        }  # fmt: skip

    def set_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.order.indices, self.order.position = state["indices"], state["position"]
        self.step = state["step"]
        self.batches = iter(self.loader)
        tt.set_rng_state(state["rng"], {"shuffling": self.shuffling})


def train(folder: str, steps: int, save_every: int, background: bool) -> Training:
    """Train to `steps`, from the newest checkpoint that is whole, if there is one."""
    training = Training()
    with tensorio.CheckpointManager(folder, keep=3, best=("loss", "min", 1), finite=True) as manager:
        restored = manager.restore(load=tt.load)
        if restored is not None:
            training.set_state(restored.value)
            manager.rollback(restored.step)  # damaged ones after it, if there were any
        while training.step < steps:
            loss = training.advance()
            if training.step % save_every == 0 or training.step == steps:
                if background:
                    manager.save(training.step, training.state(), metrics={"loss": loss}, block=False)
                else:
                    manager.save(training.step, training.state(), metrics={"loss": loss})
    return training


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="RUN")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=25)
    parser.add_argument("--background", action="store_true", help="write while training goes on")
    options = parser.parse_args()
    training = train(options.folder, options.steps, options.save_every, options.background)
    print(f"step {training.step}: learning rate {training.scheduler.get_last_lr()[0]:.3e}")


if __name__ == "__main__":
    main()
