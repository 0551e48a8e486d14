"""Measure what ``GPU.md`` lists on one GPU, in one process, because a GPU is often lent for minutes.

``python -m benchmarks.gpu [moe train generate attention profile …] [--rounds N] [--seconds S]``. The implementations
are those of :mod:`benchmarks.moe`, :mod:`benchmarks.train`, :mod:`benchmarks.generate` and
:mod:`benchmarks.flash_attention`, with their shapes. Here they are all built first, and then take turns: a part
compiles once, not in each round. A part that fails prints its traceback, and the next one runs.

Each part prints one line of JSON. Seconds are medians over steps and rounds. ``profile`` compares a step
without waits between steps with the time of it in which a kernel runs (``busy``). Both are of a steady run: after a
wait, the clocks of a GPU are higher for a while.
"""

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import threading
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks import flash_attention, generate
from benchmarks import train as training
from benchmarks.moe import EXPERTS, mixtral
from benchmarks.train import SHAPES, WARM_UP_STEPS, Step, bound, hugging_face, random_data
from lm.common.execution import Execution
from lm.hardware.device import choose_device
from lm.hardware.peak_flops import peak_flops
from lm.model.flops import flops_per_token
from lm.train.config import TrainConfig
from lm.train.pretraining import make_trainer
from lm.train.profile import TRACE_FILE, profile_training

PRECISION = "bfloat16"


def time_in_turns(steps: dict[str, Step], options: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of each step."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    for _ in range(options.rounds):
        for name, step in steps.items():
            end = time.perf_counter() + options.seconds
            while time.perf_counter() < end:
                synchronize(options.device)
                started = time.perf_counter()
                step()
                synchronize(options.device)
                times[name].append(time.perf_counter() - started)
    return {name: round(statistics.median(seconds), 5) for name, seconds in times.items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def moe(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a step of a mixture of experts, of the dense model, and of transformers' Mixtral."""
    results = {}
    for is_compiled in (False, True):
        dense, batch = SHAPES[options.shapes[0]]
        experts = replace(dense, moe=EXPERTS)
        ours = partial(training.ours, batch=batch, precision=PRECISION, compiled=is_compiled, device=options.device)
        steps = {"moe": ours(experts), "dense": ours(dense)}
        if options.peers:
            steps["transformers"] = mixtral(experts, batch, PRECISION, is_compiled, options.device)
        seconds = time_in_turns(steps, options)
        ratios = {"moe_vs_dense": round(seconds["moe"] / seconds["dense"], 3)}
        if options.peers:
            ratios["moe_vs_transformers"] = round(seconds["transformers"] / seconds["moe"], 3)
        results["compiled" if is_compiled else "plain"] = seconds | ratios
        print(json.dumps(results), flush=True)
    return results


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Return for each shape the seconds of a compiled step, of transformers' and of its products, and the MFU."""
    results = {}
    for shape in options.shapes:
        model, batch = SHAPES[shape]
        makers = {"ours": training.ours, "bound": bound} | ({"transformers": hugging_face} if options.peers else {})
        steps = {name: make(model, batch, PRECISION, True, options.device) for name, make in makers.items()}
        seconds = time_in_turns(steps, options)
        rate = batch * model.context_length / seconds["ours"]
        peak = peak_flops(options.device, torch.bfloat16)
        ratios = {f"step_vs_{name}": round(seconds[name] / seconds["ours"], 3) for name in makers if name != "ours"}
        utilization = {"mfu": round(rate * flops_per_token(model) / peak, 4)} if peak else {}
        results[shape] = seconds | ratios | {"tokens_per_second": round(rate)} | utilization
        print(json.dumps(results), flush=True)
        release_memory()
    return results


def generation(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of decoding steps of the largest shape, ours and transformers', and the bandwidth's share."""
    rate = generate.measure_read_rate(options.device)
    results: dict[str, Any] = {"read_rate": rate}
    for batch in (1, 8):
        row = {}
        for name in ("ours", "transformers"):
            row[name] = generate.measure(generate.Job(name, PRECISION, batch), options.decode_shape, options.device)
            release_memory()
        results[f"batch {batch}"] = {
            "ours": row["ours"]["step"],
            "transformers": row["transformers"]["step"],
            "decode_vs_transformers": round(row["transformers"]["step"] / row["ours"]["step"], 3),
            "prefill_vs_transformers": round(row["transformers"]["prefill"] / row["ours"]["prefill"], 3),
            "bandwidth_share": round(row["ours"]["bytes"] / row["ours"]["step"] / rate, 3),
        }
        print(json.dumps(results), flush=True)
    return results


def attention(options: argparse.Namespace) -> dict[str, Any]:
    """Print the table of FlashAttention for the lengths and widths of models today."""
    flash_attention.SECONDS = 0.1
    for dtype, widths in (("bfloat16", [64, 128]), ("float32", [64])):
        lengths = [1024, 4096, 16384] if dtype == "bfloat16" else [4096]
        sizes = argparse.Namespace(dtypes=[dtype], widths=widths, lengths=lengths, heads=16)
        flash_attention.run(sizes, options.device)
    return {}


def profile(options: argparse.Namespace) -> dict[str, Any]:
    """Return the phases of a compiled step, and how long the GPU is busy in it."""
    model, batch = SHAPES[options.shapes[0]]
    assert model.vocab_size is not None
    config = TrainConfig(steps=1_000_000, batch_size=batch, precision="bfloat16", warmup_steps=0)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        make = partial(make_trainer, config, model, random_data(model.vocab_size), Execution(), out, options.device)
        profiled = profile_training(make, options.device, 10, out, threading.Event())
        if options.trace:
            shutil.move(out / TRACE_FILE, options.trace)
        files = {path.name: path.stat().st_size for path in out.iterdir() if path.is_file()}
        trainer = make()
        with trainer.loading() as load:

            def run(steps: int) -> float:
                started = time.perf_counter()
                for _ in range(steps):
                    trainer.train_step(load(trainer.step), 1e-4)
                    trainer.step += 1
                synchronize(options.device)
                return (time.perf_counter() - started) / steps

            run(5)
            step = run(20)
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
                run(20)
        events = [event for event in trace.events() or [] if event.device_type.name == "CUDA"]
        share = busy_share([(event.time_range.start, event.time_range.end) for event in events])
    return {
        "step": step,
        "busy": share * step,
        "step_with_waits": profiled.plain_seconds_per_step,
        "phases": profiled.phases,
        "mfu": profiled.mfu,
        "operations": [(operation.name, operation.seconds) for operation in profiled.operations],
        "files": files,
    }


def busy_share(spans: list[tuple[float, float]]) -> float:
    """Return the share of the time of a trace, without its first and last fifth, in which at least one kernel runs."""
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    first, last = first + (last - first) / 5, last - (last - first) / 5
    total, covered = 0.0, first
    for start, end in sorted(spans):
        total += max(0.0, min(end, last) - max(start, covered))
        covered = max(covered, end)
    return total / (last - first)


def release_memory() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


PARTS = {"moe": moe, "train": train, "generate": generation, "attention": attention, "profile": profile}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=PARTS, default=[*PARTS], metavar="PART")
    parser.add_argument("--device", type=choose_device, default="cuda")
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["124m", "350m"], help="of training steps")
    parser.add_argument("--decode_shape", choices=generate.SHAPES, default="1b")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="measure transformers too")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="keep the trace of profile here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of an implementation in a round")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device.type == "cuda" else str(options.device)
    print(f"{name}, torch {torch.__version__}", flush=True)
    for part in options.parts:
        started = time.perf_counter()
        try:
            print(json.dumps({part: PARTS[part](options)}), flush=True)
        except Exception:
            traceback.print_exc()
        print(f"{part}: {time.perf_counter() - started:.0f} s", flush=True)
        release_memory()


if __name__ == "__main__":
    main()
