"""Processes of a process group that run a module of the tests, without the launcher of the product.

``python -m tests.helpers.ranks MODULE ARGUMENTS…`` imports torch and the module once, and forks the ranks.
"""

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch

from lm.distributed.process_group import RENDEZVOUS_VARIABLE, get_rank, process_group
from tests.helpers.training import ROOT


def run_ranks(module: str, directory: Path, *arguments: str, world_size: int) -> None:
    """Run ``main`` of a module, with the arguments DIRECTORY ARGUMENTS…, in processes of one thread each."""
    common = {"WORLD_SIZE": str(world_size), RENDEZVOUS_VARIABLE: f"file://{directory}/rendezvous"}
    command = [sys.executable, "-m", "tests.helpers.ranks", module, str(directory), *arguments]
    subprocess.run(command, cwd=ROOT, env=os.environ | common | {"OMP_NUM_THREADS": "1"}, timeout=600, check=True)


def main() -> None:
    del sys.argv[0]
    import_module("torch._dynamo")  # else each rank imports it on first use
    module, children = import_module(sys.argv[0]), []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        if child := os.fork():
            children.append(child)
            continue
        os.environ["RANK"] = str(rank)
        try:
            module.main()
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # a rank that does not fail ends in rank_of_test
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(f"exit codes of the ranks: {codes}" if any(codes) else 0)


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


if __name__ == "__main__":
    main()
