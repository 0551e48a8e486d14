"""A small model with its optimizers, a few training steps, and a pickle that runs code."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.model.config import ModelConfig
from lm.model.functional import cross_entropy
from lm.model.transformer import TransformerLM
from lm.optim.adamw import AdamW
from lm.optim.muon import Muon

CONFIG = ModelConfig(vocab_size=31, context_length=8, d_model=8, num_layers=2, num_heads=2, d_ff=12, rope_theta=77.0)
FILE_NAMES = ("model.safetensors", "optimizer.pt", "checkpoint.json")


def make_training(seed: int, config: ModelConfig = CONFIG) -> tuple[TransformerLM, list[torch.optim.Optimizer]]:
    """Return a model, with Muon for its hidden matrices and AdamW for the other parameters."""
    torch.manual_seed(seed)
    model = TransformerLM(config)
    hidden = [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
    hidden_ids = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in hidden_ids]
    return model, [Muon(hidden, lr=0.01), AdamW(rest, lr=0.01)]


def train_steps(model: TransformerLM, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    """Train on random batches that depend only on the step."""
    for step in steps:
        ids = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        cross_entropy(model(ids[:, :-1]), ids[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()


def are_states_equal(a: Any, b: Any) -> bool:
    """Return whether two nested states are equal bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(are_states_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(are_states_equal, a, b))
    return bool(a == b)


class Payload:
    """Creates a directory when it is unpickled without restrictions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))
