"""A model prepared for inference generates the same ids as before."""

import copy
from typing import Any

import pytest
import torch

from lm.common.errors import UserError
from lm.inference.config import SampleConfig
from lm.inference.engine import generate
from lm.inference.generation_request import Generation
from lm.inference.runners.cpu_layers import quantize
from lm.inference.runners.runner import prepare_for_inference
from lm.model.config import MoEConfig
from lm.model.linear import Head, Linear
from lm.model.moe import Experts
from lm.model.transformer import TransformerLM
from tests.helpers.generating import make_model
from tests.helpers.tensors import dequantize

VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_kv_heads": 1, "qk_norm": True, "head_dim": 12},
    {"num_kv_heads": 1, "qkv_bias": True},
    {"tied_embeddings": True, "feed_forward": "relu2"},
    {"moe": MoEConfig(num_experts=4, num_shared_experts=1, num_dense_layers=1)},
    {"moe": MoEConfig(num_experts=5, top_k=3, affinity="sigmoid", bias_update_rate=0.1), "feed_forward": "relu2"},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_prepared_model_generates_the_same_ids(variant: dict[str, Any]) -> None:
    model = make_model(300, 40, **variant)
    check_same_ids(model, prepare_for_inference(copy.deepcopy(model)))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_quantized_model_generates_the_ids_of_its_rounded_weights(
    variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.inference.runners.runner.has_int8_products", lambda: False)  # they round inputs too
    model = make_model(300, 40, **variant)
    quantized = prepare_for_inference(copy.deepcopy(model), quantization="int8")
    assert not torch.equal(model(torch.tensor([[1, 2]])), quantized(torch.tensor([[1, 2]])))
    for module in model.modules():
        if isinstance(module, Linear) and getattr(module, "role", None) != "router":
            module.weight.data = dequantize(*quantize(module.weight))
        elif isinstance(module, Experts):
            for stack in (module.w1, module.w2, module.w3):
                for matrix in () if stack is None else stack.data:
                    matrix[:] = dequantize(*quantize(matrix))
    if model.lm_head is None:  # the embedding is rounded only as the head
        model.lm_head = Head(16, 300)
        model.lm_head.weight.data = dequantize(*quantize(model.token_embeddings.weight))
    check_same_ids(model, quantized)


def check_same_ids(model: TransformerLM, prepared: TransformerLM) -> None:
    for batch in (1, 3, 20):  # one row, a few, and many
        prompts = [[1, 2, 3], [4], [5, 6, 7, 8], *([number] for number in range(17))][:batch]
        results = []
        for each in (model, prepared):
            generations = [Generation(p, 20, SampleConfig(temperature=0), wants_logprobs=True) for p in prompts]
            generate(each, generations)
            results.append(generations)
        for expected, actual in zip(*results, strict=True):
            assert actual.ids == expected.ids
            assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_preparing_converts_all_weights_to_one_dtype() -> None:
    model = make_model(30, 8)
    assert model.lm_head is not None
    model.lm_head.double()
    assert {parameter.dtype for parameter in prepare_for_inference(model).parameters()} == {torch.float32}
    generate(model, [Generation([1, 2], 3)])


@pytest.mark.slow
def test_bfloat16_logprobs_are_close_to_float32() -> None:
    """Logprobs of decoding steps in bfloat16 against one forward pass over the whole text in float32."""
    model, greedy = make_model(300, 128, num_kv_heads=1, qk_norm=True), SampleConfig(temperature=0)
    generated = Generation([1, 2, 3], 100, greedy, wants_logprobs=True)
    generate(prepare_for_inference(copy.deepcopy(model), torch.bfloat16), [generated])
    exact = Generation([*generated.prompt, *generated.ids], 1, greedy, wants_prompt_logprobs=True)
    generate(model, [exact])
    assert len(generated.ids) == 100
    assert generated.logprobs == pytest.approx(exact.prompt_logprobs[2:], abs=0.1)


def test_bfloat16_logits_are_close_to_float32() -> None:
    model = make_model(300, 64)
    ids = torch.randint(300, (2, 64))
    with torch.no_grad():
        exact = model(ids).log_softmax(-1)
        near = prepare_for_inference(copy.deepcopy(model), torch.bfloat16)(ids)
    assert near.dtype == torch.bfloat16
    assert (near.float().log_softmax(-1) - exact).abs().mean() < 0.02
    assert model.rope is not None and model.rope.cos.dtype == torch.float32


def test_weights_in_bfloat16_are_computed_in_float32() -> None:
    model = make_model(300, 40)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model = prepare_for_inference(model, quantization="int8")
    assert model(torch.tensor([[1, 2]])).dtype == torch.float32


def test_a_model_becomes_bfloat16() -> None:
    model = make_model(300, 40)
    expected = prepare_for_inference(copy.deepcopy(model), torch.bfloat16)
    model = prepare_for_inference(model, quantization="bfloat16")
    ids = torch.tensor([[1, 2]])
    assert model(ids).dtype == torch.bfloat16 and torch.equal(model(ids), expected(ids))


def test_int8_on_another_device_is_refused() -> None:
    with pytest.raises(UserError, match="int8 is for CPUs, and the model is on meta"):
        prepare_for_inference(make_model().to("meta"), quantization="int8")
