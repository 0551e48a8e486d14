"""How fast tokens are drawn beside Hugging Face's Llama of the same weights, and beside the memory that is read for it.

``python -m benchmarks.generate [--device auto] [--shape 110m|tiny] [--rounds N] [--json]``. Ours is
:class:`lm.generate.Engine` over a model made ready by :mod:`lm.inference`; ``transformers`` is ``generate`` of its
``LlamaForCausalLM`` as it comes, and ``compiled`` the same with a static cache and torch.compile: greedy all, the same
weights, precision, threads and prompts. Each measurement is a process of its own: prompts are prefilled, then tokens
drawn one step at a time; medians of prefill and of the steps count, and of the rounds, in turn. In float32 all must
have drawn the same. ``bandwidth_share`` is the bytes that a token reads (weights and cached keys and values) over the
time it takes, over the rate at which this device reads a large array. The last line is JSON; ``ratios`` above 1 mean
that ours is faster; of prefill they are the worst of the batches.
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

from lm.convert import save_hugging_face
from lm.device import choose_device
from lm.generate import Engine, Generation
from lm.inference import prepare
from lm.model import ModelConfig, TransformerLM
from lm.sampling import SampleConfig
from lm.tokenizer import Tokenizer

SHAPES = {
    "110m": ModelConfig(32_000, 1024, 768, 12, 12, d_ff=2048),
    "tiny": ModelConfig(500, 128, 64, 2, 2, d_ff=128),
}
PROMPT, STEPS = 64, 48  # tokens
WHO = ("ours", "transformers", "compiled")


class Job(NamedTuple):
    """One measurement."""

    who: str
    precision: str
    batch: int


JOBS = [Job(who, precision, batch) for precision in ("float32", "bfloat16") for batch in (1, 8, 64) for who in WHO]


class Drawn(NamedTuple):
    """What came of a measurement: seconds of the prefill and of each step, and the ids."""

    prefill: float
    steps: list[float]
    ids: list[list[int]]


def prompts_of(config: ModelConfig, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    length = min(PROMPT, config.context_length // 2)
    return torch.randint(config.vocab_size or 1, (batch, length), generator=generator)


def ours(model: TransformerLM, prompts: Tensor, steps: int, dtype: torch.dtype) -> Drawn:
    prepare(model, dtype)
    sync = torch.cuda.synchronize if next(model.parameters()).device.type == "cuda" else lambda: None

    def run() -> Drawn:
        engine = Engine(model, len(prompts), prompts.shape[1] + steps)
        greedy = SampleConfig(temperature=0)
        found = [Generation(prompt, steps, greedy) for prompt in prompts.tolist()]
        times = [time.perf_counter()]
        engine.add(found)
        times.append(time.perf_counter())
        for _ in range(steps - 1):
            engine.step()
            sync()
            times.append(time.perf_counter())
        return drawn(times, [one.ids for one in found])

    run()
    return run()


def hugging_face(model: TransformerLM, prompts: Tensor, steps: int, dtype: torch.dtype, is_compiled: bool) -> Drawn:
    from transformers import CompileConfig, LlamaForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        """Notes when the prompts come in, and each row of new ids."""

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
    how: dict[str, Any] = {}
    if is_compiled:
        how = {"cache_implementation": "static", "compile_config": CompileConfig(mode="default")}
        how["compile_config"]._compile_all_devices = True  # on a processor too

    def run() -> Drawn:
        clock = Clock()
        found = llama.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            streamer=clock,
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **how,
        )
        return drawn(clock.times, found[:, prompts.shape[1] :].tolist())

    run()
    return run()


def drawn(times: list[float], ids: list[list[int]]) -> Drawn:
    """From the times of the start and of each row of ids."""
    prefill, *steps = (after - before for before, after in zip(times, times[1:], strict=False))
    return Drawn(prefill, steps, ids)


def measure(job: Job, shape: str, device: torch.device) -> dict[str, Any]:
    """Seconds of the prefill and of a step (the median), bytes that a step reads, and what was drawn."""
    config, dtype = SHAPES[shape], getattr(torch, job.precision)
    torch.manual_seed(0)
    model = TransformerLM(config, device=device)
    read = sum(p.numel() for name, p in model.named_parameters() if name != "token_embeddings.weight")
    prompts = prompts_of(config, job.batch)
    steps = min(STEPS, config.context_length - prompts.shape[1])
    cached = job.batch * (prompts.shape[1] + steps // 2) * 2 * config.num_layers * config.d_model
    if job.who == "ours":
        found = ours(model, prompts, steps, dtype)
    else:
        found = hugging_face(model, prompts, steps, dtype, job.who == "compiled")
    step = statistics.median(found.steps)
    return {"prefill": found.prefill, "step": step, "bytes": (read + cached) * dtype.itemsize, "ids": found.ids}


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
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        print(f"{job} failed with {done.returncode}: {said[-1]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def compare(medians: dict[Job, dict[str, float]], rate: float) -> dict[str, float]:
    """How many times faster ours is than the others, and its part of the ``rate`` at which memory is read."""
    ratios: dict[str, float] = {}
    for job, row in medians.items():
        short = {"float32": "fp32", "bfloat16": "bf16"}[job.precision]
        if job.who == "ours":
            ratios[f"bandwidth_share_{short}_b{job.batch}"] = row["bytes"] / row["step"] / rate
        elif mine := medians.get(job._replace(who="ours")):
            other = {"transformers": "transformers", "compiled": "transformers_compiled"}[job.who]
            ratios[f"decode_{short}_b{job.batch}_vs_{other}"] = row["step"] / mine["step"]
            prefill = f"prefill_{short}_vs_{other}"
            ratios[prefill] = min(ratios.get(prefill, float("inf")), row["prefill"] / mine["prefill"])
    return ratios


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
    rows: dict[Job, list[dict[str, Any]]] = {job: [] for job in JOBS}
    rates = []
    for number in range(1, options.rounds + 1):
        for job in JOBS:
            if row := run(options, job):
                rows[job].append(row)
                named = " ".join(map(str, job))
                print(f"{number} {named}: {1000 * row['step']:.2f} ms", file=sys.stderr, flush=True)
                mine = rows[job._replace(who="ours")]
                if job.precision == "float32" and mine and row["ids"] != mine[0]["ids"]:
                    sys.exit(f"{named} drew other tokens than ours.")
        rates.append(run(options, "read"))
    rate = statistics.median(rates)
    medians = {
        job: {name: statistics.median(row[name] for row in found) for name in ("prefill", "step", "bytes")}
        for job, found in rows.items()
        if found
    }
    ratios = compare(medians, rate)
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
    described = {" ".join(map(str, job)): row for job, row in medians.items()}
    rounded = {name: round(value, 3) for name, value in ratios.items()}
    print(
        json.dumps(
            {"ratios": rounded, "shape": options.shape, "read_rate": rate, "rows": described, "machine": machine}
        )
    )


if __name__ == "__main__":
    main()
