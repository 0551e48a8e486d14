"""Compare the speed of generation with Hugging Face's Llama of the same weights, and with the memory bandwidth.

``python -m benchmarks.generate [--device auto] [--shape 110m|1b|tiny] [--rounds N] [--json]``. Three implementations
are measured with the same weights, precision, threads and prompts, and greedy decoding:

- ``ours``: :class:`lm.inference.engine.Engine` with a model from
  :func:`lm.inference.runners.runner.prepare_for_inference`
- ``transformers``: ``generate`` of ``LlamaForCausalLM`` with its defaults
- ``compiled``: the same with a static cache and torch.compile

Ours is also measured with weights of 8 bits (``int8``), beside itself in the other precisions. On CPUs ``llama.cpp`` is
a peer too, its ``q8_0`` that of ``int8``; see :mod:`benchmarks.llama_cpp`.

Each measurement is a process. It prefills the prompts, then generates tokens step by step. The implementations take
turns; the results are medians over steps and rounds. In float32 all must generate the same tokens.

``bandwidth_share`` is the achieved read rate (bytes of the weights and of the cached keys and values, over the time of
a step) as a share of the rate at which this device reads a large array. The last line is JSON. ``ratios`` above 1 mean
that ours is faster. The ratio of the prefill is the worst over the batch sizes.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import llama_cpp
from lm.checkpoint.hugging_face.model_files import save_hugging_face
from lm.hardware.device import choose_device
from lm.inference.config import Quantization, SampleConfig
from lm.inference.engine import Engine
from lm.inference.generation_request import Generation
from lm.inference.runners.runner import prepare_for_inference
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer

SHAPES = {
    "110m": ModelConfig(32_000, 1024, 768, 12, 12, d_ff=2048),
    "1b": ModelConfig(32_000, 1024, 2048, 22, 16, d_ff=5632),
    "tiny": ModelConfig(500, 128, 64, 2, 2, d_ff=128),
}
PROMPT_TOKENS, NEW_TOKENS = 64, 48
IMPLEMENTATIONS = ("ours", "transformers", "compiled")


class Job(NamedTuple):
    """The settings of one measurement."""

    implementation: str
    precision: str
    batch: int


JOBS = [
    Job(implementation, precision, batch)
    for precision in ("float32", "bfloat16")
    for batch in (1, 8, 64)
    for implementation in IMPLEMENTATIONS
]
CPU_JOBS = [Job("ours", "int8", batch) for batch in (1, 8, 64)]
LLAMA_CPP_JOBS = [
    Job("llama.cpp", precision, batch) for precision in ("float32", "bfloat16", "int8") for batch in (1, 8)
]


class Timing(NamedTuple):
    """The seconds of the prefill and of each step, and the generated ids."""

    prefill: float
    steps: list[float]
    ids: list[list[int]]


def make_prompts(config: ModelConfig, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    length = min(PROMPT_TOKENS, config.context_length // 2)
    return torch.randint(config.vocab_size or 1, (batch, length), generator=generator)


def ours(
    model: TransformerLM, prompts: Tensor, steps: int, dtype: torch.dtype, quantization: Quantization = "none"
) -> Timing:
    prepare_for_inference(model, dtype, quantization)
    sync = torch.cuda.synchronize if next(model.parameters()).device.type == "cuda" else lambda: None

    def run() -> Timing:
        engine = Engine(model, len(prompts), prompts.shape[1] + steps)
        greedy = SampleConfig(temperature=0)
        generations = [Generation(prompt, steps, greedy) for prompt in prompts.tolist()]
        times = [time.perf_counter()]
        engine.add(generations)
        times.append(time.perf_counter())
        for _ in range(steps - 1):
            engine.step()
            sync()
            times.append(time.perf_counter())
        return make_timing(times, [generation.ids for generation in generations])

    run()
    return run()


def hugging_face(model: TransformerLM, prompts: Tensor, steps: int, dtype: torch.dtype, is_compiled: bool) -> Timing:
    from transformers import CompileConfig, LlamaForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        """Record the time of the prompts and of each row of new ids."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer({byte: bytes([byte]) for byte in range(256)}, [])
        save_hugging_face(model, tokenizer, Path(folder) / "llama")
        llama: Any = LlamaForCausalLM.from_pretrained(Path(folder) / "llama", dtype=dtype)
    llama = llama.to(next(model.parameters()).device).eval()
    prompts = prompts.to(llama.device)
    options: dict[str, Any] = {}
    if is_compiled:
        options = {"cache_implementation": "static", "compile_config": CompileConfig(mode="default")}
        options["compile_config"]._compile_all_devices = True  # on a CPU too

    def run() -> Timing:
        clock = Clock()
        ids = llama.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            streamer=clock,
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
        return make_timing(clock.times, ids[:, prompts.shape[1] :].tolist())

    run()
    return run()


def make_timing(times: list[float], ids: list[list[int]]) -> Timing:
    """Convert the times of the start and of each row of ids to durations."""
    prefill, *steps = (after - before for before, after in zip(times, times[1:], strict=False))
    return Timing(prefill, steps, ids)


def measure(job: Job, shape: str, device: torch.device) -> dict[str, Any]:
    """Return the seconds of the prefill, the median seconds of a step, the bytes that a step reads, and the ids."""
    config, is_int8 = SHAPES[shape], job.precision == "int8"
    dtype = torch.float32 if is_int8 else getattr(torch, job.precision)
    torch.manual_seed(0)
    model = TransformerLM(config, device=device)
    weights = sum(p.numel() for name, p in model.named_parameters() if name != "token_embeddings.weight")
    prompts = make_prompts(config, job.batch)
    steps = min(NEW_TOKENS, config.context_length - prompts.shape[1])
    cached = job.batch * (prompts.shape[1] + steps // 2) * 2 * config.num_layers * config.d_model
    if job.implementation == "llama.cpp":
        weight_type: Any = "q8_0" if is_int8 else job.precision
        measured = llama_cpp.generate(model, prompts.tolist(), steps, weight_type, torch.get_num_threads())
        timing = make_timing([time / 1000 for time in measured.times], measured.ids)
    elif job.implementation == "ours":
        timing = ours(model, prompts, steps, dtype, "int8" if is_int8 else "none")
    else:
        timing = hugging_face(model, prompts, steps, dtype, job.implementation == "compiled")
    step = statistics.median(timing.steps)
    read = weights * (1 if is_int8 else dtype.itemsize) + cached * dtype.itemsize
    return {"prefill": timing.prefill, "step": step, "bytes": read, "ids": timing.ids}


def measure_read_rate(device: torch.device) -> float:
    """Return the bytes per second at which a large array is read: the fastest of several sums."""
    array = torch.ones(1 << 27, device=device)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        array.sum().item()
        best = min(best, time.perf_counter() - started)
    return array.nbytes / best


def run(options: argparse.Namespace, job: Job | str) -> Any:
    """Run a measurement in its own process."""
    command = [sys.executable, "-m", "benchmarks.generate", "--device", options.device, "--shape", options.shape]
    result = subprocess.run([*command, "--worker", json.dumps(job)], capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
        print(f"{job} failed with exit code {result.returncode}: {lines[-1]}", file=sys.stderr)
        return None
    return json.loads(result.stdout.splitlines()[-1])


def compare(medians: dict[Job, dict[str, float]], rate: float) -> dict[str, float]:
    """Return the speed of ours over each other implementation, and its share of ``rate``, in bytes per second."""
    ratios: dict[str, float] = {}
    for job, row in medians.items():
        precision = {"float32": "fp32", "bfloat16": "bf16", "int8": "int8"}[job.precision]
        if job.implementation == "ours":
            ratios[f"bandwidth_share_{precision}_b{job.batch}"] = row["bytes"] / row["step"] / rate
            if int8 := medians.get(job._replace(precision="int8")) if precision != "int8" else None:
                ratios[f"decode_int8_b{job.batch}_vs_own_{precision}"] = row["step"] / int8["step"]
        elif our_row := medians.get(job._replace(implementation="ours")):
            other = {"compiled": "transformers_compiled"}.get(job.implementation, job.implementation)
            ratios[f"decode_{precision}_b{job.batch}_vs_{other}"] = row["step"] / our_row["step"]
            prefill = f"prefill_{precision}_vs_{other}"
            ratios[prefill] = min(ratios.get(prefill, float("inf")), row["prefill"] / our_row["prefill"])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=SHAPES, default="110m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = choose_device(options.device)
    torch.set_num_threads(os.cpu_count() or 1)
    if options.worker:
        job = json.loads(options.worker)
        print(json.dumps(measure_read_rate(device) if job == "read" else measure(Job(*job), options.shape, device)))
        return
    jobs = JOBS + (CPU_JOBS if device.type == "cpu" else [])
    if device.type == "cpu" and llama_cpp.find_package():
        jobs += LLAMA_CPP_JOBS
    rows: dict[Job, list[dict[str, Any]]] = {job: [] for job in jobs}
    rates = []
    for number in range(1, options.rounds + 1):
        for job in jobs:
            if row := run(options, job):
                rows[job].append(row)
                name = " ".join(map(str, job))
                print(f"{number} {name}: {1000 * row['step']:.2f} ms", file=sys.stderr, flush=True)
                reference = rows[job._replace(implementation="ours")]
                if job.precision == "float32" and reference and row["ids"] != reference[0]["ids"]:
                    sys.exit(f"{name} generated other tokens than ours.")
        rates.append(run(options, "read"))
    rate = statistics.median(rates)
    medians = {
        job: {name: statistics.median(row[name] for row in results) for name in ("prefill", "step", "bytes")}
        for job, results in rows.items()
        if results
    }
    ratios = compare(medians, rate)
    if not options.json:
        print(f"{options.shape}: memory is read at {rate / 1e9:.1f} GB/s")
        print(f"{'implementation':14}{'precision':11}{'batch':>5}  prefill tokens/s  decode tokens/s  ms a step   GB/s")
        length = make_prompts(SHAPES[options.shape], 1).shape[1]
        for job, row in medians.items():
            figures = f"{job.batch * length / row['prefill']:18,.0f}{job.batch / row['step']:17,.1f}"
            speed = f"{1000 * row['step']:11.2f}{row['bytes'] / row['step'] / 1e9:7.1f}"
            print(f"{job.implementation:14}{job.precision:11}{job.batch:5}{figures}{speed}")
    machine = {
        "device": str(device),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    named_rows = {" ".join(map(str, job)): row for job, row in medians.items()}
    rounded = {name: round(value, 3) for name, value in ratios.items()}
    print(
        json.dumps(
            {"ratios": rounded, "shape": options.shape, "read_rate": rate, "rows": named_rows, "machine": machine}
        )
    )


if __name__ == "__main__":
    main()
