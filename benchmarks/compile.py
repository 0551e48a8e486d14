"""Measure how long the first start compiles: the seconds of each kernel that the demo needs, and their sum.

``python -m benchmarks.compile [--rounds 3]``. A round is a new process with an empty cache folder. It counts the
pretokens of 300 generated stories, trains a vocabulary of 500, encodes to uint16 ids, and compiles the kernels that
sample a token in float32. Numba's events give the times: the wall time in the compiler, and the CPU time of the process
during it. A helper counts for the kernel that needs it first. The CPU time varies less on a busy machine. Prints
medians. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from numba.core import event


class _Timer(event.Listener):
    """Record the wall and CPU seconds of each kernel. Helpers are compiled inside a kernel's own event."""

    def __init__(self) -> None:
        self.kernels: dict[str, tuple[float, float]] = {}
        self._depth = 0
        self._started = (0.0, 0.0)

    def on_start(self, event: Any) -> None:
        if self._depth == 0:
            self._started = time.perf_counter(), time.process_time()
        self._depth += 1

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            function = event.data["dispatcher"].py_func
            wall, cpu = time.perf_counter() - self._started[0], time.process_time() - self._started[1]
            self.kernels[f"{function.__module__.removeprefix('lm.kernels.')}.{function.__name__}"] = wall, cpu


def compile_demo() -> dict[str, tuple[float, float]]:
    """Run the stages in this process and return the (wall, CPU) seconds of each compiled kernel."""
    import torch

    from lm.inference.runners.runner import compile_kernels
    from lm.text.demo_corpus import demo_stories
    from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
    from lm.tokenizer.bpe import train_merges
    from lm.tokenizer.pretoken_counts import DEFAULT_MEMORY_BYTES, count_to_file, read_counts
    from lm.tokenizer.tokenizer import Tokenizer

    text = "".join(demo_stories(300)).encode()
    timer = _Timer()
    with event.install_listener("numba:compile", timer), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.parquet"
        count_to_file(path, [[text]], [END_OF_TEXT], GPT2_PATTERN, DEFAULT_MEMORY_BYTES)
        tokenizer = Tokenizer(*train_merges(read_counts(path), 500, [END_OF_TEXT]), [END_OF_TEXT])
        for _ in tokenizer.encode_blocks([text]):
            pass
        compile_kernels(torch.float32)
    return timer.kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    code = "import json; from benchmarks.compile import compile_demo; print(json.dumps(compile_demo()))"
    rounds: list[dict[str, tuple[float, float]]] = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "XDG_CACHE_HOME": cache}
            result = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
        rounds.append(json.loads(result.stdout))
    medians = {
        name: tuple(statistics.median(times[name][i] for times in rounds) for i in range(2)) for name in rounds[0]
    }
    totals = tuple(statistics.median(sum(pair[i] for pair in times.values()) for times in rounds) for i in range(2))
    print(f"{'kernel':28}{'wall s':>8}{'CPU s':>8}")
    for name, (wall, cpu) in [*medians.items(), ("total", totals)]:
        print(f"{name:28}{wall:8.2f}{cpu:8.2f}")
    print(json.dumps({"wall": totals[0], "cpu": totals[1], "kernels": medians}))


if __name__ == "__main__":
    main()
