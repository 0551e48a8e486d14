"""Processes of a process group that run a module of the tests, without the launcher of the product.

``python -m tests.helpers.ranks`` imports torch once for all tests of a process, and forks the ranks of each call.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lm.distributed.process_group import RENDEZVOUS_VARIABLE, get_rank, process_group
from lm.inference.completion import complete
from lm.inference.config import SampleConfig
from lm.model.transformer import TransformerLM
from tests.helpers.figures import save_tiny_image
from tests.helpers.training import MODEL, ROOT, byte_tokenizer

_TIMEOUT_SECONDS = 600


@cache
def _forking_process() -> "subprocess.Popen[str]":
    """Start the process that forks. It ends with this one, which closes its input."""
    command, pipe = [sys.executable, "-m", "tests.helpers.ranks"], subprocess.PIPE
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)


def run_ranks(module: str, directory: Path, *arguments: str, world_size: int) -> str:
    """Run ``main`` of a module, with the arguments DIRECTORY ARGUMENTS…, in processes of one thread each.

    Return what they print.
    """
    meeting = Path(tempfile.mkdtemp(dir=directory, prefix="ranks-"))
    common = {"WORLD_SIZE": str(world_size), RENDEZVOUS_VARIABLE: f"file://{meeting}/rendezvous"}
    request = {
        "command": [module, str(directory), *arguments],
        "environment": os.environ | common | {"OMP_NUM_THREADS": "1"},
        "log": str(log := meeting / "log.txt"),
    }
    process = _forking_process()
    assert process.stdin and process.stdout
    timer = threading.Timer(_TIMEOUT_SECONDS, process.kill)
    timer.start()
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        codes = process.stdout.readline()
    finally:
        timer.cancel()
        if process.poll() is not None:
            _forking_process.cache_clear()
    output = log.read_text() if log.exists() else ""
    assert codes and not any(json.loads(codes)), f"exit codes {codes}:\n{output}"
    return output


def main() -> None:
    # Else each rank imports these modules, draws figures and loads kernels. It cannot compile them.
    import_module("torch._dynamo")
    import_module("matplotlib.figure").Figure.savefig = save_tiny_image
    complete(TransformerLM(MODEL), byte_tokenizer(), SampleConfig(prompts=["a"], max_new_tokens=2))
    for line in sys.stdin:
        request = json.loads(line)
        import_module(request["command"][0])
        children = []
        for rank in range(int(request["environment"]["WORLD_SIZE"])):
            if child := os.fork():
                children.append(child)
            else:
                _run_rank(rank, **request)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


def _run_rank(rank: int, command: list[str], environment: dict[str, str], log: str) -> Any:
    with open(os.devnull) as null, open(log, "a", buffering=1) as file:
        os.dup2(null.fileno(), 0)
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank))
    sys.argv = command
    try:
        import_module(command[0]).main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)  # a rank that does not fail ends in end_rank


@contextmanager
def rank_of_test() -> Iterator[int]:
    """Join the process group and yield the rank. At the end the process ends at once."""
    with process_group(torch.device("cpu")):
        yield get_rank()
    end_rank()


def end_rank() -> None:
    """End this process at once.

    A thread of torch's process group may abort a process while the interpreter ends (pytorch #190489).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
