"""Compare the time of a training step with Hugging Face's Llama, and with the step's matrix products alone.

``python -m benchmarks.train [--device auto] [--shape demo|stories|tinystories|124m|350m] [--rounds N] [--json]``. The
implementations have the same shape, batch, precision, threads and clipping:

- ``ours``: a step of :class:`lm.train.trainer.Trainer`, with a batch from memory, forward, backward, clipping and AdamW
- ``transformers``: ``LlamaForCausalLM`` with torch's fused AdamW
- ``bound``: the matrix products and the attention of a step, forward and backward, with weights and inputs that have
  the precision from the start

Each measurement is a process with some warm-up steps. The implementations take turns; the results are medians over
steps and rounds. Memory is the peak resident size above that of the imports; on a GPU it is the memory that torch
reserved. The last line is JSON. ``ratios`` above 1 mean that ours is faster, or takes less memory.
``step_vs_bound_bf16`` is the time of the bound over the time of our step. ``--learning`` runs
:mod:`benchmarks.learning`.
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
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.learning import compare, read_data
from lm.common.execution import Execution
from lm.hardware.device import choose_device
from lm.hardware.peak_flops import peak_flops
from lm.model.config import ModelConfig
from lm.model.flops import flops_per_token, parameter_count
from lm.model.linear import Linear
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig
from lm.train.pretraining import TrainData, make_trainer

SHAPES = {  # model and sequences per step
    "demo": (ModelConfig(512, 128, 128, 3, 4, d_ff=352), 16),
    "stories": (ModelConfig(4096, 256, 256, 4, 4, d_ff=704), 16),
    "tinystories": (ModelConfig(10_000, 256, 512, 4, 16, d_ff=1344), 64),
    "124m": (ModelConfig(50_304, 1024, 768, 12, 12, d_ff=2048), 32),
    "350m": (ModelConfig(50_304, 1024, 1024, 24, 16, d_ff=2752), 16),
}
JOBS = [  # implementation, precision, whether it is compiled
    ("ours", "float32", False),
    ("transformers", "float32", False),
    ("ours", "bfloat16", False),
    ("transformers", "bfloat16", False),
    ("ours", "bfloat16", True),
    ("transformers", "bfloat16", True),
    ("bound", "bfloat16", False),
]
RATIOS = {
    "step_vs_transformers_fp32": (("ours", "float32", False), ("transformers", "float32", False)),
    "step_vs_transformers_bf16": (("ours", "bfloat16", False), ("transformers", "bfloat16", False)),
    "step_vs_transformers_bf16_compiled": (("ours", "bfloat16", True), ("transformers", "bfloat16", True)),
    "step_vs_bound_bf16": (("ours", "bfloat16", True), ("bound", "bfloat16", False)),
}
WARM_UP_STEPS = 4
Step = Callable[[], Any]


@cache
def random_data(vocab_size: int) -> TrainData:
    """Return a million random tokens."""
    vocab = {i: bytes([i]) if i < 256 else b"%d" % i for i in range(vocab_size)}
    tokens = np.random.default_rng(0).integers(0, vocab_size, 1_000_000, np.uint16)
    return TrainData(tokens, None, Tokenizer(vocab, []), 4.0)


def ours(model: ModelConfig, batch: int, precision: Any, compiled: bool, device: torch.device) -> Step:
    """Return a function that runs a step of the trainer."""
    assert model.vocab_size is not None
    compile_module = sys.modules["lm.distributed.plan"]
    compile_module._MIN_FLOPS_TO_COMPILE = 0  # type: ignore[attr-defined]
    data = random_data(model.vocab_size)
    config = TrainConfig(steps=1_000_000, batch_size=batch, precision=precision, warmup_steps=0)
    execution = Execution(device=str(device), compile=compiled)
    trainer = make_trainer(config, model, data, execution, Path(tempfile.mkdtemp(prefix="textmill-benchmark-")))

    def step() -> None:
        trainer.train_step(trainer.objective.micro_batches(trainer.step), 1e-4)
        trainer.step += 1

    return step


def hugging_face(model: ModelConfig, batch: int, precision: str, compiled: bool, device: torch.device) -> Step:
    """Return a function that runs a step of Hugging Face's Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "max_position_embeddings": model.context_length,
        "attn_implementation": "sdpa",
    }
    llama: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False))
    llama.to(device)
    llama.train()
    optimizer = torch.optim.AdamW(llama.parameters(), 1e-4, (0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(0, model.vocab_size or 1, (batch, model.context_length + 1), device=device)

    def compute_loss(ids: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            logits = llama(input_ids=ids[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    loss = torch.compile(compute_loss) if compiled else compute_loss

    def step() -> None:
        loss(ids).backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def bound(model: ModelConfig, batch: int, precision: str, compiled: bool, device: torch.device) -> Step:
    """Return a function that runs the matrix products and the attention of a step."""
    dtype = getattr(torch, precision)
    shapes = [
        module.weight.shape for module in TransformerLM(model, device="meta").modules() if isinstance(module, Linear)
    ]
    tokens = batch * model.context_length
    weights = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    tensors = {width: torch.randn(tokens, width, device=device, dtype=dtype) for shape in shapes for width in shape}
    heads = (batch, model.num_heads, model.context_length, model.d_model // model.num_heads)
    q, k, v = (torch.randn(heads, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    output_gradient = torch.randn(heads, device=device, dtype=dtype)

    def step() -> None:
        for weight in weights:
            x, gradient = tensors[weight.shape[1]], tensors[weight.shape[0]]
            x @ weight.T  # forward
            gradient @ weight  # gradient of the input
            gradient.T @ x  # gradient of the weight
        for _ in range(model.num_layers):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), output_gradient)

    return step


def measure(
    implementation: str, shape: str, precision: str, compiled: bool, device: torch.device, seconds: float
) -> dict[str, float]:
    """Return the median seconds of a step, and the memory of this process in MB."""
    model, batch = SHAPES[shape]
    torch.manual_seed(0)
    if implementation == "transformers":
        import transformers.models.llama.modeling_llama  # noqa: F401
    if implementation == "ours":
        random_data(model.vocab_size or 1)  # import the kernels of the tokenizer, which no step uses
    if compiled:
        import_module("torch._inductor.compile_fx")
    memory_after_imports = resident_bytes()
    step: Step = {"ours": ours, "transformers": hugging_face, "bound": bound}[implementation](
        model, batch, precision, compiled, device
    )

    def time_step() -> float:
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(WARM_UP_STEPS):
        time_step()
    times, end = [time_step()], time.perf_counter() + seconds
    while time.perf_counter() < end:
        times.append(time_step())
    memory = torch.cuda.max_memory_reserved() if device.type == "cuda" else resident_bytes() - memory_after_imports
    return {"seconds": statistics.median(times), "memory_mb": memory / 1e6}


def resident_bytes() -> float:
    """Return the peak resident size of this process in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run(options: argparse.Namespace, job: tuple[str, str, bool]) -> dict[str, float]:
    """Run a measurement in its own process."""
    command = [sys.executable, "-m", "benchmarks.train", "--device", options.device, "--shape", options.shape]
    process = subprocess.run(
        [*command, "--seconds", str(options.seconds), "--worker", json.dumps(job)],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        print(f"{job} failed: {(process.stderr.splitlines() or ['no message'])[-1]}", file=sys.stderr)
        return {}
    return dict(json.loads(process.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=SHAPES, default="stories")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of a measurement")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--learning", action="store_true", help="compare the losses of two recipes instead")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="number of tokens of an AdamW run of --learning")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds of the best rate of each recipe")
    parser.add_argument("--directory", type=Path, help="keep the runs of --learning here, and resume them")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = choose_device(options.device)
    torch.set_num_threads(os.cpu_count() or 1)
    if options.worker:
        implementation, precision, compiled = json.loads(options.worker)
        print(json.dumps(measure(implementation, options.shape, precision, compiled, device, options.seconds)))
        return
    machine = {
        "device": str(device),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if options.learning:
        directory = options.directory or Path(tempfile.mkdtemp(prefix="textmill-benchmark-"))
        directory.mkdir(parents=True, exist_ok=True)
        comparison = compare(options.tokens, read_data(directory), directory, options.device, options.seeds)
        ratios = {name: recipe["token_part"] for name, recipe in comparison.items() if "token_part" in recipe}
        print(json.dumps({"ratios": ratios, **comparison, "machine": machine}))
        return
    model, batch = SHAPES[options.shape]
    rows: dict[tuple[str, str, bool], list[dict[str, float]]] = {job: [] for job in JOBS}
    for number in range(options.rounds):
        for job in JOBS:
            if row := run(options, job):
                rows[job].append(row)
                print(f"{number + 1} {job} {row['seconds']:.3f} s", file=sys.stderr, flush=True)
    tokens, flops = batch * model.context_length, flops_per_token(model)
    peaks = {name: peak_flops(device, getattr(torch, name)) for name in ("float32", "bfloat16")}
    medians = {
        job: {name: statistics.median(row[name] for row in results) for name in results[0]}
        for job, results in rows.items()
        if results
    }
    ratios = {
        name: medians[peer]["seconds"] / medians[job]["seconds"]
        for name, (job, peer) in RATIOS.items()
        if job in medians and peer in medians
    } | {
        name.replace("step", "memory"): medians[peer]["memory_mb"] / medians[job]["memory_mb"]
        for name, (job, peer) in RATIOS.items()
        if job in medians and peer in medians and peer[0] != "bound"
    }
    if not options.json:
        print(
            f"{options.shape}: {parameter_count(model)['total']:,} parameters, {batch} × {model.context_length} tokens"
        )
        print(f"{'implementation':14}{'precision':11}compiled  tokens/s     ms   MFU %  memory MB")
        for (implementation, precision, compiled), row in medians.items():
            rate = tokens / row["seconds"]
            peak = peaks[precision]
            utilization = f"{100 * rate * flops / peak:.1f}" if peak else "–"
            figures = f"{rate:9,.0f}{1000 * row['seconds']:7,.0f}{utilization:>8}{row['memory_mb']:11,.0f}"
            print(f"{implementation:14}{precision:11}{compiled!s:9}{figures}")
    named_rows = {" ".join(map(str, job)): row for job, row in medians.items()}
    rounded = {name: round(value, 3) for name, value in ratios.items()}
    print(
        json.dumps(
            {"ratios": rounded, "shape": options.shape, "rows": named_rows, "peak_flops": peaks, "machine": machine}
        )
    )


if __name__ == "__main__":
    main()
