"""A toy training with and without DDP. ``python -m tests.helpers.ddp DIRECTORY BUCKET_BYTES`` runs one rank."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

import lm.distributed.ddp
from lm.distributed.ddp import DDP
from lm.distributed.process_group import process_group


class ToyModel(nn.Module):
    """Tied, frozen and unused weights, a buffer, and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4).double()
        self.register_buffer("offset", torch.randn(8))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.frozen(torch.relu(self.first(x))) + self.offset
        return self.head(torch.relu(self.tied(x)).double()) * scale


def toy_batches() -> list[Tensor]:
    return list(torch.randn(5, 8, 8, generator=torch.Generator().manual_seed(5)))


def train(module: nn.Module, batches: list[Tensor], micro_batches: int = 2) -> None:
    """Take a step of gradient descent on each batch."""
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for batch in batches:
        for number, x in enumerate(batch.chunk(micro_batches), start=1):
            with module.no_sync() if isinstance(module, DDP) and number < micro_batches else nullcontext():
                (module(x, scale=0.5).square().mean() / micro_batches).backward()
        if isinstance(module, DDP):
            module.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    lm.distributed.ddp._MAX_BUCKET_BYTES = int(sys.argv[2])
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    with process_group(torch.device("cpu")):
        ddp = DDP(ToyModel())
        train(ddp, [batch.chunk(2)[rank] for batch in toy_batches()])
        torch.save(ddp.module.state_dict(), Path(sys.argv[1]) / f"{rank}.pt")


if __name__ == "__main__":
    main()
