"""DDP in two processes equals one process with the whole batch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lm.distributed.process_group import RENDEZVOUS_VARIABLE
from tests.helpers.ddp import ToyModel, toy_batches, train
from tests.helpers.training import ROOT


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
def test_two_processes_have_the_weights_of_one(tmp_path: Path, bucket_bytes: int) -> None:
    torch.manual_seed(0)  # rank 0's initial weights
    model = ToyModel()
    train(model, toy_batches(), micro_batches=1)
    common = {"WORLD_SIZE": "2", RENDEZVOUS_VARIABLE: f"file://{tmp_path}/rendezvous"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.ddp", str(tmp_path), str(bucket_bytes)],
            cwd=ROOT,
            env=os.environ | common | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    weights = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    torch.testing.assert_close(weights[0], dict(model.state_dict()))
