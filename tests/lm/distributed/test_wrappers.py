"""DDP, FSDP and ShardedOptimizer in two processes equal one process with the whole batch.

The toy model has tied, frozen and unused weights, a buffer, and two dtypes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.toy_training import ToyModel, make_adamw, toy_batches, train, trained

# A number is the bytes of DDP's buckets; a class is what ShardedOptimizer wraps, in two groups.
KINDS = ["fsdp", "1", "bfloat16", "AdamW", "300", str(1 << 20), "zero2", "torch.AdamW"]
TOLERANCES: dict[str, dict[str, Any]] = {"bfloat16": {"rtol": 0.02, "atol": 0.005}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights that two processes have after training in each kind: ``KIND-RANK.pt``."""
    directory = tmp_path_factory.mktemp("weights")
    run_ranks("tests.helpers.toy_training", directory, *KINDS, world_size=2)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_have_the_weights_of_one(directory: Path, kind: str) -> None:
    torch.manual_seed(0)  # rank 0's initial weights
    model = ToyModel(has_double_head=kind != "bfloat16")
    optimizer = make_adamw(trained(model), torch.optim.AdamW) if "AdamW" in kind else None
    train(model, toy_batches(), micro_batches=1, optimizer=optimizer)
    weights = [torch.load(directory / f"{kind}-{rank}.pt", weights_only=True) for rank in range(2)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(weights[0][name], p.detach(), **TOLERANCES.get(kind, {}), msg=name)
