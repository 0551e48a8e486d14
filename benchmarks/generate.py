"""How fast tokens are drawn beside Hugging Face's Llama of the same shape, and beside the memory that is read for them.

``python -m benchmarks.generate [--device auto] [--shape 110m|tiny] [--rounds N] [--json]``. Ours is
:class:`lm.generate.Engine` over a model made ready by :mod:`lm.inference`; ``transformers`` is its
``LlamaForCausalLM`` with a static cache, greedy too, of the same shape, precision, threads and prompts. Each
measurement is a process of its own: prompts are prefilled, then tokens drawn one step at a time; medians of prefill
and of the steps count, and of the rounds, in turn. ``bandwidth_share`` is the bytes that a token reads (weights and
cached keys and values) over the time it takes, over the rate at which this device reads a large array. The last line
is JSON; ``ratios`` above 1 mean that ours is faster.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.device import choose_device
from lm.generate import Engine, Generation
from lm.inference import prepare
from lm.model import ModelConfig, TransformerLM
from lm.sampling import SampleConfig

SHAPES = {
    "110m": ModelConfig(32_000, 1024, 768, 12, 12, d_ff=2048),
    "tiny": ModelConfig(500, 128, 64, 2, 2, d_ff=128),
}
PROMPT, STEPS = 64, 48  # tokens
BATCHES = {"float32": (1, 8), "bfloat16": (1, 8, 64)}


class Job(NamedTuple):
    """One measurement."""

    who: str
    precision: str
    batch: int


JOBS = [
    Job(who, precision, batch)
    for precision, batches in BATCHES.items()
    for batch in batches
    for who in ("ours", "transformers")
]


def prompts_of(config: ModelConfig, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    length = min(PROMPT, config.context_length // 2)
    return torch.randint(config.vocab_size or 1, (batch, length), generator=generator)


def ours(
    model: TransformerLM, prompts: Tensor, dtype: torch.dtype, sync: Callable[[], None]
) -> tuple[float, list[float]]:
    """Seconds of a prefill and of each step."""
    prepare(model, dtype)
    steps = min(STEPS, model.config.context_length - prompts.shape[1])

    def run() -> tuple[float, list[float]]:
        engine = Engine(model, len(prompts))
        greedy = SampleConfig(temperature=0)
        found = [Generation(prompt, steps, greedy) for prompt in prompts.tolist()]
        taken = []
        started = time.perf_counter()
        engine.add(found)
        for _ in range(steps - 1):
            sync()
            taken.append(time.perf_counter())
            engine.step()
        sync()
        taken.append(time.perf_counter())
        return taken[0] - started, [after - before for before, after in zip(taken, taken[1:], strict=False)]

    run()
    return run()


def hugging_face(
    model: TransformerLM, prompts: Tensor, dtype: torch.dtype, sync: Callable[[], None]
) -> tuple[float, list[float]]:
    """The same of transformers' model, step by step as its ``generate`` does, without that one's own checks."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = model.config
    about = LlamaConfig(
        vocab_size=config.vocab_size or 1,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        max_position_embeddings=config.context_length,
    )
    device = next(model.parameters()).device
    llama: Any = LlamaForCausalLM(about).to(device=device, dtype=dtype).eval()  # type: ignore[arg-type]
    steps = min(STEPS, config.context_length - prompts.shape[1])

    @torch.inference_mode()
    def run() -> tuple[float, list[float]]:
        cache = StaticCache(about, max_cache_len=prompts.shape[1] + steps)
        ids, taken = prompts.to(device), []
        started = time.perf_counter()
        for _ in range(steps):
            logits = llama(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
            sync()
            taken.append(time.perf_counter())
        return taken[0] - started, [after - before for before, after in zip(taken, taken[1:], strict=False)]

    run()
    return run()


def measure(job: Job, shape: str, device: torch.device) -> dict[str, float]:
    """Seconds of the prefill and of a step (the median), and bytes that a step reads."""
    config, dtype = SHAPES[shape], getattr(torch, job.precision)
    torch.manual_seed(0)
    model = TransformerLM(config, device=device)
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    read = sum(p.numel() for name, p in model.named_parameters() if name != "token_embeddings.weight")
    prompts = prompts_of(config, job.batch)
    cached = job.batch * (prompts.shape[1] + STEPS // 2) * 2 * config.num_layers * config.d_model
    prefill, steps = {"ours": ours, "transformers": hugging_face}[job.who](model, prompts, dtype, sync)
    return {"prefill": prefill, "step": statistics.median(steps), "bytes": (read + cached) * dtype.itemsize}


def read_rate(device: torch.device) -> float:
    """Bytes a second at which a large array is read: the fastest of several sums."""
    array = torch.ones(1 << 27, device=device)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        array.sum().item()
        best = min(best, time.perf_counter() - started)
    return array.nbytes / best


def run(options: argparse.Namespace, job: Job | str) -> Any:
    """A measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.generate", "--device", options.device, "--shape", options.shape]
    done = subprocess.run([*command, "--worker", json.dumps(job)], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{job} failed: {(done.stderr.splitlines() or ['no message'])[-1]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=SHAPES, default="110m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the line of JSON only")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = choose_device(options.device)
    torch.set_num_threads(os.cpu_count() or 1)
    if options.worker:
        job = json.loads(options.worker)
        print(json.dumps(read_rate(device) if job == "read" else measure(Job(*job), options.shape, device)))
        return
    rows: dict[Job, list[dict[str, float]]] = {job: [] for job in JOBS}
    rates = []
    for number in range(options.rounds):
        for job in JOBS:
            if row := run(options, job):
                rows[job].append(row)
                print(
                    f"{number + 1} {' '.join(map(str, job))}: {1000 * row['step']:.2f} ms", file=sys.stderr, flush=True
                )
        rates.append(run(options, "read"))
    rate = statistics.median(rates)
    medians = {
        job: {name: statistics.median(row[name] for row in found) for name in found[0]}
        for job, found in rows.items()
        if found
    }
    ratios = {}
    for job, row in medians.items():
        theirs = medians.get(job._replace(who="transformers"))
        if job.who == "ours" and theirs:
            short = {"float32": "fp32", "bfloat16": "bf16"}[job.precision]
            ratios[f"decode_{short}_b{job.batch}_vs_transformers"] = theirs["step"] / row["step"]
            ratios[f"prefill_{short}_b{job.batch}_vs_transformers"] = theirs["prefill"] / row["prefill"]
            ratios[f"bandwidth_share_{short}_b{job.batch}"] = row["bytes"] / row["step"] / rate
    if not options.json:
        print(f"{options.shape}: read at {rate / 1e9:.1f} GB/s")
        print(f"{'who':14}{'precision':11}{'batch':>5}  prefill tokens/s  decode tokens/s  ms a step   GB/s")
        length = prompts_of(SHAPES[options.shape], 1).shape[1]
        for job, row in medians.items():
            figures = f"{job.batch * length / row['prefill']:18,.0f}{job.batch / row['step']:17,.1f}"
            speed = f"{1000 * row['step']:11.2f}{row['bytes'] / row['step'] / 1e9:7.1f}"
            print(f"{job.who:14}{job.precision:11}{job.batch:5}{figures}{speed}")
    machine = {
        "device": str(device),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    named = {" ".join(map(str, job)): row for job, row in medians.items()}
    rounded = {name: round(value, 3) for name, value in ratios.items()}
    print(json.dumps({"ratios": rounded, "shape": options.shape, "read_rate": rate, "rows": named, "machine": machine}))


if __name__ == "__main__":
    main()
