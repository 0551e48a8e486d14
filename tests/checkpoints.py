"""A small model with its optimizers, trained a few steps; and a file that would run code."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.model import ModelConfig, TransformerLM, cross_entropy
from lm.optim import AdamW, Muon

CONFIG = ModelConfig(vocab_size=31, context_length=8, d_model=8, num_layers=2, num_heads=2, d_ff=12, rope_theta=77.0)
FILES = ("model.safetensors", "optimizer.pt", "checkpoint.json")


def make(seed: int, config: ModelConfig = CONFIG) -> tuple[TransformerLM, list[torch.optim.Optimizer]]:
    """A model with Muon on its hidden matrices and AdamW on the rest, as training has them."""
    torch.manual_seed(seed)
    model = TransformerLM(config)
    hidden = [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return model, [Muon(hidden, lr=0.01), AdamW(rest, lr=0.01)]


def train(model: TransformerLM, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    """A few steps on batches that depend on the step alone."""
    for step in steps:
        ids = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        cross_entropy(model(ids[:, :-1]), ids[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()


def states_equal(a: Any, b: Any) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(states_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(states_equal, a, b))
    return bool(a == b)


class Payload:
    """Unpickled without restriction this would make a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))
