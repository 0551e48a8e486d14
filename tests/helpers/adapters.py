"""Random adapters, and models with one of them fused."""

import copy
from collections.abc import Mapping, Sequence

import torch

from lm.model.adapter import LowRank, choose_targets
from lm.model.transformer import TransformerLM


def random_adapter(model: TransformerLM, rank: int, targets: Sequence[str] = (), seed: int = 0) -> dict[str, LowRank]:
    """Return an adapter of the layers that ``targets`` name and the model has; all if it is empty."""
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * 0.4

    layers = choose_targets(model, []).items()
    return {
        name: LowRank(numbers(rank, layer.shape[1]), numbers(layer.shape[0], rank), 2.0 / rank)
        for name, layer in layers
        if not targets or name.rpartition(".")[2] in targets
    }


def with_fused(model: TransformerLM, adapter: Mapping[str, LowRank]) -> TransformerLM:
    """Return a copy of ``model`` with an adapter added to its weights."""
    fused = copy.deepcopy(model)
    with torch.no_grad():
        for name, (a, b, scale) in adapter.items():
            weight = fused.get_parameter(f"{name}.weight")
            weight.add_(b.to(weight.dtype) @ a.to(weight.dtype), alpha=scale)
    return fused
