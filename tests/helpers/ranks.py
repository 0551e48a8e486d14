"""Processes of a process group that run a module of the tests, without the launcher of the product."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lm.distributed.process_group import RENDEZVOUS_VARIABLE, get_rank, process_group
from tests.helpers.training import ROOT


def run_ranks(module: str, directory: Path, *arguments: str, world_size: int) -> None:
    """Run ``python -m MODULE DIRECTORY ARGUMENTS…`` in ``world_size`` processes of one thread each."""
    common = {"WORLD_SIZE": str(world_size), RENDEZVOUS_VARIABLE: f"file://{directory}/rendezvous"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(directory), *arguments],
            cwd=ROOT,
            env=os.environ | common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]
    assert [rank.wait(timeout=600) for rank in ranks] == [0] * world_size


@contextmanager
def rank_of_test() -> Iterator[int]:
    """Join the process group and yield the rank. At the end the process ends at once.

    A thread of torch's process group may abort a process while the interpreter ends (pytorch #190489).
    """
    with process_group(torch.device("cpu")):
        yield get_rank()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
