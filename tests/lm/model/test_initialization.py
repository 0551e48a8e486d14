"""Weights that are drawn later, one matrix at a time, are those that are drawn at once."""

from typing import Any

import pytest
import torch

from lm.model.config import ModelConfig, MoEConfig
from lm.model.initialization import draw_later
from lm.model.transformer import TransformerLM

SIZES: dict[str, Any] = {"context_length": 8, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 24}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tied_embeddings": True, "qkv_bias": True, "qk_norm": True},
    {"zero_init_residual": True, "moe": MoEConfig(4, 2, num_shared_experts=1, num_dense_layers=1)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_weights_are_the_same(options: dict[str, Any]) -> None:
    config = ModelConfig(33, **SIZES | options)
    torch.manual_seed(5)
    expected = TransformerLM(config)
    after = torch.rand(1)
    torch.manual_seed(5)
    with draw_later() as late:
        model = TransformerLM(config)
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    assert all(p.untyped_storage().nbytes() == 0 and p.shape for p in matrices.values())
    late.draw()
    assert torch.equal(torch.rand(1), after)
    for (name, p), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, other), name


def test_a_model_outside_of_the_block_is_drawn_at_once() -> None:
    config = ModelConfig(33, **SIZES)
    with draw_later(), pytest.raises(ValueError):
        TransformerLM(config)
        raise ValueError
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in TransformerLM(config).parameters())


def test_one_matrix_at_a_time_has_memory() -> None:
    with draw_later() as late:
        model = TransformerLM(ModelConfig(33, **SIZES))
    for drawn in late:
        sizes = [p.untyped_storage().nbytes() for p in model.parameters() if p.ndim > 1]
        assert sum(sizes) == drawn.nbytes
        drawn.untyped_storage().resize_(0)
