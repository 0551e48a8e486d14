"""DDP, FSDP and ShardedOptimizer in two processes equal one process with the whole batch.

The toy model has tied, frozen and unused weights, a buffer, and two dtypes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.toy_training import ToyModel, make_adamw, toy_batches, train, trained

SLOW_KINDS = ["1", "bfloat16", "AdamW", "300", str(1 << 20), "zero2", "torch.AdamW"]
TOLERANCES: dict[str, dict[str, Any]] = {"bfloat16": {"rtol": 0.02, "atol": 0.005}}


@pytest.mark.parametrize("kind", ["fsdp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS)])
def test_two_processes_have_the_weights_of_one(tmp_path: Path, kind: str) -> None:
    """A number is the bytes of DDP's buckets; a class is what ShardedOptimizer wraps, in two groups."""
    torch.manual_seed(0)  # rank 0's initial weights
    model = ToyModel(has_double_head=kind != "bfloat16")
    optimizer = make_adamw(trained(model), torch.optim.AdamW) if "AdamW" in kind else None
    train(model, toy_batches(), micro_batches=1, optimizer=optimizer)
    run_ranks("tests.helpers.toy_training", tmp_path, kind, world_size=2)
    weights = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(weights[0][name], p.detach(), **TOLERANCES.get(kind, {}), msg=name)
