"""Low-rank adapters around linear layers: what they compute, what is frozen, targets, and the fused weights."""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.common.errors import UserError
from lm.model.adapter import (
    LoRALinear,
    adapted_layers,
    adapter_off,
    add_adapter,
    fuse_adapter,
    make_reference,
    trained_parameters,
    trained_state,
)
from lm.model.config import AdapterConfig, ModelConfig, MoEConfig
from lm.model.linear import Linear
from lm.model.transformer import TransformerLM
from tests.helpers.examples import examples

CONFIG = ModelConfig(vocab_size=31, context_length=8, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, d_ff=24)
IDS = torch.arange(16).view(2, 8)
ALL = ["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"]


def adapted_model(seed: int = 0, config: ModelConfig = CONFIG, **options: Any) -> TransformerLM:
    """Return a random model with an adapter that is random too."""
    torch.manual_seed(seed)
    model = add_adapter(TransformerLM(config), AdapterConfig(**({"rank": 3} | options)))
    for layer in adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora_B, std=0.1)
    return model


@given(
    rank=st.integers(1, 9),
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    alpha=st.floats(0.1, 64),
    has_bias=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@examples(30)
def test_layer_is_its_base_plus_a_product_of_small_matrices(
    rank: int, sizes: tuple[int, int], alpha: float, has_bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    base = Linear(*sizes, has_bias=has_bias)
    x, layer = torch.randn(5, sizes[0]), LoRALinear(base, rank, alpha)
    assert torch.equal(layer(x), base(x)), "a new adapter changes nothing"
    torch.nn.init.normal_(layer.lora_B)
    expected = base(x) + alpha / rank * (x @ layer.lora_A.T @ layer.lora_B.T)
    torch.testing.assert_close(layer(x), expected, atol=1e-5 * alpha, rtol=1e-5)
    adapted = layer(x)
    torch.testing.assert_close(layer.fuse()(x), adapted, atol=1e-5 * alpha, rtol=1e-5)


def test_first_matrix_has_the_distribution_of_peft() -> None:
    torch.manual_seed(0)
    a = LoRALinear(Linear(400, 3), rank=64, alpha=1).lora_A.detach()
    assert a.abs().max() <= 1 / math.sqrt(400)
    assert a.std().item() == pytest.approx(1 / math.sqrt(3 * 400), rel=0.02)


def test_only_the_adapter_has_gradients() -> None:
    model = adapted_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.loss(IDS, IDS).backward()
    names = {name for name, p in model.named_parameters() if p.grad is not None}
    assert names == trained_parameters(model).keys() == trained_state(model).keys()
    assert names == {f"{name}.lora_{matrix}" for name in adapted_layers(model) for matrix in "AB"}
    assert len(names) == 2 * 2 * len(ALL)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_gradients_are_those_of_the_fused_product() -> None:
    model = adapted_model(alpha=5.0)
    model.loss(IDS, IDS).backward()
    layers = adapted_layers(model)
    grads: dict[str, list[Tensor | None]] = {n: [layer.lora_A.grad, layer.lora_B.grad] for n, layer in layers.items()}
    pairs = {n: (layer.lora_A.detach(), layer.lora_B.detach(), layer.scale) for n, layer in layers.items()}
    fused = fuse_adapter(model)
    fused.loss(IDS, IDS).backward()
    for name, (a, b, scale) in pairs.items():
        layer = fused.get_submodule(name)
        assert isinstance(layer, Linear) and layer.weight.grad is not None
        torch.testing.assert_close(grads[name][0], scale * b.T @ layer.weight.grad, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(grads[name][1], scale * layer.weight.grad @ a.T, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("targets", [[], ["q_proj"], ["w2", "v_proj"], ALL])
def test_targets(targets: list[str]) -> None:
    layers = adapted_layers(adapted_model(targets=targets))
    assert {name.rpartition(".")[2] for name in layers} == set(targets or ALL)
    assert len(layers) == 2 * len(targets or ALL)


def test_unknown_target_names_the_known_ones() -> None:
    message = "adapter.targets has 'o_proj'; the linear layers of this model are k_proj, output_proj, q_proj, v_proj"
    with pytest.raises(UserError, match=re.escape(message)):
        adapted_model(targets=["q_proj", "o_proj"])


def test_of_experts_only_the_shared_ones_have_an_adapter() -> None:
    moe = MoEConfig(num_experts=4, top_k=2, num_shared_experts=1)
    model = adapted_model(config=ModelConfig(**{**vars(CONFIG), "moe": moe}))
    names = {name.partition(".")[2].partition(".")[2] for name in adapted_layers(model)}
    assert names == {*(f"attn.{name}" for name in ALL[:4]), *(f"ffn.shared.{name}" for name in ALL[4:])}


def test_reference_is_the_model_without_its_adapter() -> None:
    torch.manual_seed(0)
    original = TransformerLM(CONFIG)
    expected = original(IDS)
    model = adapted_model()
    reference = make_reference(model)
    assert torch.equal(reference(IDS), expected)
    assert not torch.allclose(model(IDS), expected)
    with pytest.raises(ZeroDivisionError), adapter_off(model):
        assert torch.equal(model(IDS), expected)
        raise ZeroDivisionError
    assert not torch.allclose(model(IDS), expected), "the adapter is on again after an error"
    frozen = {p.data_ptr() for p in model.parameters() if not p.requires_grad}
    assert {p.data_ptr() for p in reference.parameters()} == frozen, "no second copy"


def test_reference_without_an_adapter_is_a_copy() -> None:
    model = TransformerLM(CONFIG)
    reference = make_reference(model)
    expected = model(IDS)
    torch.nn.init.zeros_(model.head_weight)
    assert torch.equal(reference(IDS), expected)
    assert not any(p.requires_grad for p in reference.parameters())


def test_fused_model_is_an_ordinary_one() -> None:
    model = adapted_model()
    expected = model(IDS)
    fused = fuse_adapter(model)
    torch.testing.assert_close(fused(IDS), expected, atol=1e-5, rtol=1e-5)
    assert fused.state_dict().keys() == TransformerLM(CONFIG).state_dict().keys()
    assert trained_parameters(fused).keys() == dict(fused.named_parameters()).keys()
    assert all(p.requires_grad for p in fused.parameters())


def test_dropout_is_of_training_passes_only() -> None:
    model = adapted_model(dropout=0.5)
    with torch.no_grad():
        assert torch.equal(model(IDS), model(IDS)), "an evaluation"
    torch.manual_seed(1)
    first = model(IDS)
    assert not torch.equal(first, model(IDS))
    torch.manual_seed(1)
    assert torch.equal(model(IDS), first)
    assert torch.equal(model.eval()(IDS), model(IDS))


def test_dropout_scales_the_inputs_that_remain() -> None:
    torch.manual_seed(0)
    layer = LoRALinear(Linear(50, 4), rank=2, alpha=2.0, dropout=0.3)
    torch.nn.init.normal_(layer.lora_B)
    x = torch.randn(1, 50)
    mean = torch.stack([layer(x) for _ in range(3000)]).mean(0)
    torch.testing.assert_close(mean, layer.eval()(x), atol=0.05, rtol=0.05)


def test_bfloat16_base_has_a_float32_adapter() -> None:
    torch.manual_seed(0)
    model = add_adapter(TransformerLM(CONFIG), AdapterConfig(rank=2, dtype="bfloat16"))
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "lora" in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "lora" not in name} == {torch.bfloat16}
    model.loss(IDS, IDS).backward()
    assert all(layer.lora_B.grad is not None and layer.lora_B.grad.any() for layer in adapted_layers(model).values())
    assert model.hidden_states(IDS).dtype == torch.bfloat16


def test_a_frozen_head_gets_no_gradient_and_the_loss_stays() -> None:
    torch.manual_seed(0)
    model = TransformerLM(CONFIG)
    embedding = model.token_embeddings.weight
    model.loss(IDS, IDS).backward()
    assert embedding.grad is not None
    whole = embedding.grad.clone()
    model.zero_grad()
    model.head_weight.requires_grad_(False)
    model.loss(IDS, IDS).backward()
    assert model.head_weight.grad is None
    assert torch.equal(embedding.grad, whole)
