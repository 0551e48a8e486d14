"""Compare a training step of an adapter (LoRA) with one of peft and transformers, in turn.

``python -m benchmarks.adapters [--dtypes float32 bfloat16 nf4] [--layers 24] [--tokens 1024] [--rounds 5]``. The model
has random weights and the shape of Qwen2.5-0.5B, with fewer blocks if ``layers`` says so. Both train rank 16 on all
linear layers of the blocks with AdamW, one text a step, activations checkpointed. With ``nf4`` the base of both is in
4 bits, double quantised, in bitsandbytes for the peer, and products are of float32. The losses of the first step must
be equal. ``ratio``: the peer's seconds over ours, medians; more than 1 means that ours is faster. ``pip install -e
'.[peers]'`` brings the peers. The last line is JSON; the exit code is 1 if a ratio is below 1.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.common.execution import Execution
from lm.distributed.plan import parallelize
from lm.model.adapter import add_adapter, trained_parameters
from lm.model.config import AdapterConfig, ModelConfig
from lm.model.transformer import TransformerLM
from lm.optim.adamw import AdamW
from lm.tokenizer.tokenizer import Tokenizer

RANK, ALPHA, LR = 16, 32, 1e-3
SHAPE = ModelConfig(
    151_936,
    d_model=896,
    num_heads=14,
    num_kv_heads=2,
    d_ff=4864,
    tied_embeddings=True,
    qkv_bias=True,
    norm_eps=1e-6,
    rope_theta=1e6,
)
VOCAB_SIZE = SHAPE.vocab_size or 0
Dtype = Literal["float32", "bfloat16", "nf4"]
Step = Callable[[Tensor], float]
"""Trains on ids, int64 (1, tokens + 1), and returns the loss before."""


def write_model(folder: Path, layers: int, tokens: int) -> None:
    torch.manual_seed(0)
    config = replace(SHAPE, context_length=tokens, num_layers=layers)
    tokenizer = Tokenizer({byte: bytes([byte]) for byte in range(256)}, [])
    save_hugging_face(TransformerLM(config, dtype=torch.bfloat16), tokenizer, folder)


def make_ours(folder: Path, dtype: Dtype) -> Step:
    base = "float32" if dtype == "nf4" else dtype
    model = load_hugging_face(folder).to(getattr(torch, base)).train()
    add_adapter(model, AdapterConfig(rank=RANK, alpha=ALPHA, dtype=dtype))
    parallelize(model, Execution(activation_checkpointing=True), "none")
    optimizer = AdamW(trained_parameters(model).values(), lr=LR)

    def step(ids: Tensor) -> float:
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def make_peer(folder: Path, dtype: Dtype) -> Step:
    import peft
    import transformers

    options: dict[str, Any] = {"dtype": getattr(torch, "float32" if dtype == "nf4" else dtype)}
    if dtype == "nf4":
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    base.gradient_checkpointing_enable({"use_reentrant": False})
    base.config.use_cache = False
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)

    def step(ids: Tensor) -> float:
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def measure(folder: Path, dtype: Dtype, tokens: int, rounds: int) -> dict[str, float]:
    """Return the seconds of a step of both, and their ratio."""
    steps = {"ours": make_ours(folder, dtype), "peft": make_peer(folder, dtype)}
    generator = torch.Generator().manual_seed(0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):  # the first warms up
        ids = torch.randint(VOCAB_SIZE, (1, tokens + 1), generator=generator)
        losses = {}
        for name in list(steps)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            losses[name] = steps[name](ids)
            seconds[name].append(time.perf_counter() - started)
        if number == 0:
            print(dtype, losses, file=sys.stderr, flush=True)
            torch.testing.assert_close(
                losses["ours"], losses["peft"], rtol=1e-5 if dtype == "float32" else 1e-2, atol=0
            )
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {**medians, "ratio": medians["peft"] / medians["ours"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=get_args(Dtype), default=get_args(Dtype))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), options.layers, options.tokens)
        for dtype in options.dtypes:
            results[dtype] = measure(Path(name), dtype, options.tokens, options.rounds)
            print(dtype, results[dtype], file=sys.stderr, flush=True)
    print(json.dumps({dtype: {k: round(v, 3) for k, v in result.items()} for dtype, result in results.items()}))
    return int(any(result["ratio"] < 1 for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
