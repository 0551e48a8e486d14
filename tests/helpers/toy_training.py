"""A toy training in one process and divided.

``main``, which ``run_ranks`` calls, is one rank that trains in one kind after another. A kind is
the size of DDP's buckets in bytes, ``fsdp``, ``zero2``, ``bfloat16`` (fsdp in that dtype), or a class that
ShardedOptimizer wraps.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import lm.distributed.sharding
from lm.distributed import DDP, FSDP, ShardedOptimizer
from lm.distributed.sharding import MAX_BUCKET_BYTES
from lm.optim import AdamW
from tests.helpers.ranks import rank_of_test


class ToyModel(nn.Module):
    """Tied, frozen and unused weights, a buffer, and two dtypes."""

    offset: Tensor

    def __init__(self, has_double_head: bool = True) -> None:
        super().__init__()
        self.has_double_head = has_double_head
        self.first = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4, dtype=torch.float64 if has_double_head else torch.float32)
        self.register_buffer("offset", torch.randn(8))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.frozen(torch.relu(self.first(x)))
        x = x + self.offset.to(x.dtype)
        x = torch.relu(self.tied(x))
        return self.head(x.double() if self.has_double_head else x) * scale


def toy_batches() -> list[Tensor]:
    return list(torch.randn(5, 8, 8, generator=torch.Generator().manual_seed(5)))


def train(
    module: nn.Module,
    batches: list[Tensor],
    micro_batches: int = 2,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Take a step of gradient descent on each batch."""
    optimizer = optimizer or torch.optim.SGD(trained(module), lr=0.1)
    for batch in batches:
        for number, x in enumerate(batch.chunk(micro_batches), start=1):
            with module.no_sync() if isinstance(module, DDP | FSDP) and number < micro_batches else nullcontext():
                (module(x, scale=0.5).square().mean() / micro_batches).backward()
        if isinstance(module, DDP | FSDP):
            module.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def make_adamw(params: list[nn.Parameter], make: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Make an optimizer with ``make(params, **options)``, and add half of the parameters later.

    Without weight decay: unused weights have gradients of 0 in DDP, and none in one process.
    """
    optimizer = make(params[::2], lr=0.01, weight_decay=0)
    optimizer.add_param_group({"params": params[1::2], "lr": 0.02})
    return optimizer


def main() -> None:
    directory, *kinds = sys.argv[1:]
    with rank_of_test() as rank:
        for kind in kinds:
            torch.save(train_in_kind(kind, rank), Path(directory) / f"{kind}-{rank}.pt")


def train_in_kind(kind: str, rank: int) -> dict[str, Tensor]:
    """Train on this process's half of each batch, and return the weights."""
    torch.manual_seed(rank)
    batches = [batch.chunk(2)[rank] for batch in toy_batches()]
    lm.distributed.sharding.MAX_BUCKET_BYTES = int(kind) if kind.isdecimal() else MAX_BUCKET_BYTES
    module: DDP | FSDP
    if kind == "bfloat16":
        module = FSDP(ToyModel(has_double_head=False), torch.bfloat16, reduce_dtype=torch.float32)
    elif kind in ("zero2", "fsdp"):
        module = FSDP(ToyModel(), is_resharded_after_forward=kind == "fsdp")
    else:
        module = DDP(ToyModel())
    optimizer = None
    if optimizer_cls := {"AdamW": AdamW, "torch.AdamW": torch.optim.AdamW}.get(kind):
        optimizer = make_adamw(trained(module), partial(ShardedOptimizer, optimizer_cls=optimizer_cls))
    train(module, batches, optimizer=optimizer)
    weights = module.gather_full_params() if isinstance(module, FSDP) else dict(module.module.named_parameters())
    return {name: p.detach() for name, p in weights.items()}
