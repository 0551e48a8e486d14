"""Parameter groups of the optimizers of a training run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lm.distributed.plan import Parallel
from lm.model.linear import Linear
from lm.model.norm import RMSNorm
from lm.model.transformer import TransformerLM
from lm.train.config import TrainConfig
from lm.train.optimizers import copy_options, make_optimizers, replace_options, set_rates
from tests.helpers.reference_model import MODEL_VARIANTS, SMALL_CONFIG


def parameter_groups(model: TransformerLM, **options: Any) -> list[tuple[type, list[str], float, float]]:
    """Return the optimizer class, parameter names, weight decay and learning rate scale of each parameter group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        (
            type(optimizer),
            [names[id(parameter)] for parameter in group["params"]],
            group["weight_decay"],
            group.get("lr_scale", 1.0),
        )
        for optimizer in make_optimizers(model, TrainConfig(**options), Parallel(model, "none"))
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("variant", MODEL_VARIANTS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_order_of_groups_matches_checkpoints(variant: dict[str, Any], optimizer: str, scale: float) -> None:
    """``optimizer.pt`` numbers states in this order: AdamW's matrices, gains and embedding, then Muon's matrices."""
    model = TransformerLM(replace(SMALL_CONFIG, **variant), device="meta")
    groups = parameter_groups(model, optimizer=optimizer, embedding_lr_scale=scale, weight_decay=0.3)
    dims = {name: parameter.dim() for name, parameter in model.named_parameters()}
    gains = [name for name in dims if dims[name] == 1]
    hidden = [name for name in dims if name.startswith("layers.") and dims[name] == 2 and optimizer == "muon"]
    embedding = ["token_embeddings.weight"] if scale != 1 else []
    matrices = [name for name in dims if name not in (*gains, *hidden, *embedding)]
    expected = [(matrices, 0.3, 1.0), (gains, 0.0, 1.0)]
    expected += [(embedding, 0.3, 3.0)] if embedding else []
    expected += [(hidden, 0.3, 1.0)] if hidden else []
    assert [group[1:] for group in groups] == expected
    optimizer_names = [optimizer_class.__name__ for optimizer_class, *_ in groups]
    assert optimizer_names == ["AdamW"] * (len(groups) - bool(hidden)) + ["Muon"] * bool(hidden)


def test_head_and_vectors_have_their_own_rates() -> None:
    model = TransformerLM(replace(SMALL_CONFIG, tied_embeddings=False), device="meta")
    config = TrainConfig(
        optimizer="muon", head_lr_scale=2.0, vector_lr_scale=3.0, vector_beta2=0.99, beta2=0.9, max_lr=0.1
    )
    optimizers = make_optimizers(model, config, Parallel(model, "none"))
    set_rates(optimizers, 0.05, 0.1)
    matrices, vectors, head, hidden = (group for optimizer in optimizers for group in optimizer.param_groups)
    assert head["params"] == [model.head_weight]
    assert {p.dim() for p in vectors["params"]} == {1}
    assert [group["lr"] for group in (matrices, vectors, head, hidden)] == pytest.approx([0.05, 0.15, 0.1, 0.05])
    assert [group["betas"] for group in (matrices, vectors, head)] == [(0.9, 0.9), (0.9, 0.99), (0.9, 0.9)]


@pytest.mark.parametrize("rule", ["constant", "scheduled", "cautious"])
def test_weight_decay_by_rule(rule: Any) -> None:
    model = TransformerLM(SMALL_CONFIG, device="meta")
    config = TrainConfig(optimizer="muon", weight_decay=0.2, weight_decay_rule=rule, max_lr=0.1)
    optimizers = make_optimizers(model, config, Parallel(model, "none"))
    decays = {}
    for lr in (0.1, 0.025, 0.1):
        set_rates(optimizers, lr, 0.1)
        decays[lr] = [group["weight_decay"] for optimizer in optimizers for group in optimizer.param_groups]
    assert decays[0.1] == pytest.approx([0.2, 0.0, 0.2])
    assert decays[0.025] == pytest.approx([0.05, 0.0, 0.05] if rule == "scheduled" else decays[0.1])
    assert {group["is_cautious"] for optimizer in optimizers for group in optimizer.param_groups} == {
        rule == "cautious"
    }


def test_options_are_those_of_the_config_after_a_checkpoint_of_others() -> None:
    model = TransformerLM(SMALL_CONFIG)
    saved, optimizers = (
        make_optimizers(model, TrainConfig(**fields), Parallel(model, "none"))
        for fields in ({"vector_lr_scale": 3.0, "weight_decay_rule": "scheduled"}, {"beta2": 0.5})
    )
    options = copy_options(optimizers)
    optimizers[0].load_state_dict(saved[0].state_dict())
    replace_options(optimizers, options)
    assert copy_options(optimizers) == options
    assert "lr_scale" not in optimizers[0].param_groups[1] and options[0]["betas"] == (0.9, 0.5)


class _HeadGain(nn.Module):
    """Gains per head: two dimensions, but not a matrix."""

    role = "norm"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 8))


def test_new_layers_are_grouped_by_their_role_not_by_name_or_shape() -> None:
    model = TransformerLM(SMALL_CONFIG)
    model.last = nn.Sequential(Linear(24, 24, role="feed_forward"), _HeadGain(), RMSNorm(24))
    (_, matrices, *_), (_, gains, decay, _), (muon, hidden, *_) = parameter_groups(model, optimizer="muon")
    assert muon.__name__ == "Muon" and decay == 0
    assert {"last.0.weight", "last.1.weight", "last.2.weight"}.isdisjoint(matrices)
    assert "last.0.weight" in hidden
    assert {"last.1.weight", "last.2.weight"} <= set(gains)


def test_the_bias_of_a_scalar_head_has_no_weight_decay() -> None:
    model = TransformerLM(SMALL_CONFIG)
    model.add_scalar_head()
    (_, matrices, *_), (_, vectors, decay, _) = parameter_groups(model)
    assert "scalar_head.weight" in matrices
    assert "scalar_head.bias" in vectors and decay == 0
