"""Compare the time of a training step of a mixture of experts with the dense model of equal active FLOPs.

``python -m benchmarks.moe [--device auto] [--shape stories|tinystories] [--rounds N] [--seconds S] [--precision P]``.
Eight experts, two per token, no token dropped; batch, precision, threads and clipping are the same:

- ``moe``: a step of :class:`lm.train.trainer.Trainer`, with the auxiliary loss
- ``dense``: the same without experts
- ``transformers``: ``MixtralForCausalLM`` of the shape of ``moe``, with its auxiliary loss and torch's fused AdamW

Each measurement is a process with some warm-up steps. The implementations take turns; the results are medians over
steps and rounds. The last line is JSON: ``moe_vs_dense`` is the time of ``moe`` over that of ``dense``,
``moe_vs_transformers`` the time of Mixtral over that of ``moe``.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.train import SHAPES, WARM_UP_STEPS, Step, ours
from lm.hardware.device import choose_device
from lm.model.config import ModelConfig, MoEConfig
from lm.model.flops import flops_per_token, parameter_count

IMPLEMENTATIONS = ("moe", "dense", "transformers")
EXPERTS = MoEConfig(num_experts=8, top_k=2, aux_loss_weight=0.01)


def mixtral(model: ModelConfig, batch: int, precision: str, compiled: bool, device: torch.device) -> Step:
    """Return a function that runs a step of Hugging Face's Mixtral."""
    from transformers import MixtralConfig, MixtralForCausalLM

    assert model.moe is not None
    shape: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.moe.expert_width(model.d_ff),
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "max_position_embeddings": model.context_length,
        "router_aux_loss_coef": model.moe.aux_loss_weight,
        "attn_implementation": "sdpa",
    }
    module: Any = MixtralForCausalLM(MixtralConfig(**shape, use_cache=False, output_router_logits=True))
    module.to(device)
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-4, (0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(0, model.vocab_size or 1, (batch, model.context_length + 1), device=device)

    def compute_loss(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            out = module(input_ids=ids[:, :-1])
        loss = F.cross_entropy(out.logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        return loss + module.router_aux_loss_coef * load_balancing(out.router_logits, model.moe)

    loss = torch.compile(compute_loss) if compiled else compute_loss

    def step() -> None:
        loss(ids).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def load_balancing(router_logits: Any, moe: MoEConfig | None) -> torch.Tensor:
    """Return the auxiliary loss that transformers computes for Mixtral."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    assert moe is not None
    loss: Any = load_balancing_loss_func(router_logits, moe.num_experts, moe.top_k)
    return torch.as_tensor(loss)


def measure(implementation: str, shape: str, precision: str, device: torch.device, seconds: float) -> float:
    """Return the median seconds of a step."""
    dense, batch = SHAPES[shape]
    model = replace(dense, moe=EXPERTS)
    torch.manual_seed(0)
    if implementation == "transformers":
        step = mixtral(model, batch, precision, False, device)
    else:
        step = ours(model if implementation == "moe" else dense, batch, precision, False, device)

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
    return statistics.median(times)


def run(options: argparse.Namespace, implementation: str) -> float:
    """Run a measurement in its own process."""
    command = [sys.executable, "-m", "benchmarks.moe", "--worker", implementation]
    for name in ("device", "shape", "precision", "seconds"):
        command += [f"--{name}", str(getattr(options, name))]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(process.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=SHAPES, default="stories")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of a measurement")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = choose_device(options.device)
    torch.set_num_threads(os.cpu_count() or 1)
    if options.worker:
        print(json.dumps(measure(options.worker, options.shape, options.precision, device, options.seconds)))
        return
    rounds: list[dict[str, float]] = []
    for number in range(options.rounds):
        rounds.append({name: run(options, name) for name in IMPLEMENTATIONS})
        print(number + 1, {name: round(value, 4) for name, value in rounds[-1].items()}, file=sys.stderr, flush=True)
    ratios = {
        "moe_vs_dense": [row["moe"] / row["dense"] for row in rounds],
        "moe_vs_transformers": [row["transformers"] / row["moe"] for row in rounds],
    }
    dense = SHAPES[options.shape][0]
    model = replace(dense, moe=EXPERTS)
    counts = parameter_count(model)
    print(f"{counts['total']:,} parameters, {counts['active']:,} active; dense: {parameter_count(dense)['total']:,}")
    result = {
        "ratios": {name: round(statistics.median(values), 3) for name, values in ratios.items()},
        "range_of_ratios": {name: [round(f(values), 3) for f in (min, max)] for name, values in ratios.items()},
        "seconds": {name: round(statistics.median(row[name] for row in rounds), 4) for name in IMPLEMENTATIONS},
        "flops_per_token": {"moe": flops_per_token(model), "dense": flops_per_token(dense)},
        "shape": options.shape,
        "precision": options.precision,
        "machine": {
            "device": str(device),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
