"""Step time, memory and traffic of divided trainings beside torch's own.

``python -m benchmarks.parallel [--processes N …] [--rounds N]``. Every process trains the same small Transformer on its
part of a batch, with ``torch.optim.AdamW``. In turns, a few steps each:

- ``ddp``: :class:`lm.distributed.DDP`, beside torch's ``DistributedDataParallel``
- ``zero1``: with :class:`lm.distributed.ShardedOptimizer`, beside ``ZeroRedundancyOptimizer``
- ``zero2``, ``fsdp``: :class:`lm.distributed.FSDP`, beside ``fully_shard``; zero2 keeps weights between the passes
- ``none``: each process by itself

The ratio of a round is torch's time over ours; the table has the medians. Memory is that of process 0: of its tensors
between steps, and the peak within a step. Traffic is what the loopback device carries in a step, per process; other
programs on the machine that use it disturb the figure. On a machine with a GPU for each process, they use NCCL, and
traffic is not measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lm.distributed import DDP, FSDP, ShardedOptimizer
from lm.distributed.process_group import RENDEZVOUS_VARIABLE, get_rank, process_group
from lm.hardware.device import choose_device
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM

MODEL = ModelConfig(vocab_size=4096, context_length=128, d_model=256, num_layers=4, num_heads=4, d_ff=704)
SEQUENCES = 4  # of each process
STEPS = 3  # of a measurement
KINDS = ["none", "ddp", "zero1", "zero2", "fsdp"]
Step = Callable[[], None]


def make_step(kind: str, is_ours: bool, device: torch.device) -> Step:
    """Make a new model, and return a function that takes an optimizer step."""
    torch.manual_seed(0)
    model = TransformerLM(MODEL, device=device)
    module: nn.Module = model
    if kind in ("ddp", "zero1"):
        module = DDP(model) if is_ours else DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif kind in ("zero2", "fsdp"):
        is_resharded = kind == "fsdp"
        if is_ours:
            module = FSDP(model, is_resharded_after_forward=is_resharded)
        else:
            for layer in model.layers:
                fully_shard(layer, reshard_after_forward=is_resharded)
            fully_shard(model, reshard_after_forward=is_resharded)
    if kind == "zero1":
        optimizer: torch.optim.Optimizer = (
            ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
            if is_ours
            else ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(get_rank())
    tokens = torch.randint(MODEL.vocab_size or 0, (SEQUENCES, MODEL.context_length + 1), generator=generator).to(device)

    def step() -> None:
        logits = module(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if isinstance(module, DDP | FSDP):
            module.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def time_steps(step: Step, device: torch.device) -> float:
    """Return the seconds of a step, from when all processes are ready until all have finished."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return (time.perf_counter() - started) / STEPS


def loopback_bytes() -> int:
    """Return the bytes that the loopback device has carried."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.lstrip().startswith("lo:"))


def measure_memory(kind: str, is_ours: bool) -> tuple[int, int]:
    """Return the bytes of tensors on the CPU between two steps, and the most within the second step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step = make_step(kind, is_ours, torch.device("cpu"))
        step()
        with torch.profiler.record_function("second step"):
            step()
    events = profiler.profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == "second step")
    live = between = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        live += event.nbytes()
        if event.start_ns() < start:
            between = live
        else:
            peak = max(peak, live)
    return between, peak


def run_rank(rounds: int) -> None:
    """Measure in this process of the group; rank 0 prints the results as JSON."""
    with process_group(choose_device("auto")) as device:
        cases = [(kind, is_ours) for kind in KINDS for is_ours in (True, False) if is_ours or kind != "none"]
        steps = {case: make_step(*case, device) for case in cases}
        for step in steps.values():
            step()
        seconds: dict[tuple[str, bool], list[float]] = {case: [] for case in cases}
        traffic: dict[tuple[str, bool], list[int]] = {case: [] for case in cases}
        for _ in range(rounds):
            for case, step in steps.items():
                before = loopback_bytes()
                seconds[case].append(time_steps(step, device))
                traffic[case].append((loopback_bytes() - before) // STEPS // dist.get_world_size())
        memory = {case: measure_memory(*case) for case in cases} if device.type == "cpu" else {}
        if get_rank() == 0:
            rows = [
                {
                    "kind": kind,
                    "who": "ours" if is_ours else "torch",
                    "seconds": seconds[kind, is_ours],
                    "traffic": statistics.median(traffic[kind, is_ours]) if device.type == "cpu" else None,
                    "memory": memory.get((kind, is_ours)),
                }
                for kind, is_ours in cases
            ]
            print(json.dumps(rows))


def run_processes(world_size: int, rounds: int) -> list[dict[str, Any]]:
    """Run the measurement in ``world_size`` processes of one thread each."""
    with tempfile.TemporaryDirectory() as directory:
        common = {"WORLD_SIZE": str(world_size), RENDEZVOUS_VARIABLE: f"file://{directory}/rendezvous"}
        command = [sys.executable, "-m", "benchmarks.parallel", "--rank", "--rounds", str(rounds)]
        processes = [
            subprocess.Popen(
                command,
                env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("A process failed, see above.")
    rows: list[dict[str, Any]] = json.loads(outputs[0].splitlines()[-1])
    return rows


def format_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| kind | who | step | torch / ours | memory between steps | peak | sent per process and step |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    times = {(row["kind"], row["who"]): row["seconds"] for row in rows}
    for row in rows:
        ours, theirs = times[row["kind"], "ours"], times.get((row["kind"], "torch"))
        ratio = ""
        if theirs and row["who"] == "ours":
            ratio = f"{statistics.median(b / a for a, b in zip(ours, theirs, strict=True)):.2f}"
        memory = [f"{size / 1e6:.1f} MB" for size in row["memory"] or ()] or ["", ""]
        sent = "" if row["traffic"] is None else f"{row['traffic'] / 1e6:.1f} MB"
        step = statistics.median(row["seconds"])
        yield f"| {row['kind']} | {row['who']} | {step * 1e3:.0f} ms | {ratio} | {memory[0]} | {memory[1]} | {sent} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank", action="store_true", help="measure in this process; the benchmark starts it")
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rounds)
        return
    for world_size in options.processes:
        print(f"{world_size} processes, {SEQUENCES} × {MODEL.context_length} tokens each, {options.rounds} rounds\n")
        print("\n".join(format_table(run_processes(world_size, options.rounds))), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
