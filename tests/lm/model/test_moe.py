"""Mixture of experts: equal to a loop over the experts in float64, for every option of the routing."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.inference.config import SampleConfig
from lm.inference.engine import generate
from lm.inference.generation_request import Generation
from lm.model import functional
from lm.model.config import ModelConfig, MoEConfig
from lm.model.flops import flops_per_token, parameter_count
from lm.model.functional import softmax
from lm.model.moe import MoE, Routing, drop_over_capacity
from lm.model.ops.experts import ExpertWeights, mix_experts, mix_experts_grouped
from lm.model.transformer import TransformerLM
from tests.helpers.tensors import FEW_EXAMPLES, assert_equal_with_gradients, random_normal, seeds

Form = Literal["swiglu", "silu", "relu2"]


def make_moe(moe: MoEConfig, d_model: int, d_ff: int, form: Form = "swiglu") -> MoE:
    return MoE(ModelConfig(d_model=d_model, num_layers=1, num_heads=1, d_ff=d_ff, feed_forward=form, moe=moe))


def run_recorded(moe: MoE, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Routing]:
    """Return the output and the routing of a pass as in training."""
    moe.record_routings(padding)
    out = moe(x)
    (routing,), moe.routings = moe.routings or [], None
    return out, routing


def reference_gates(logits: Tensor, config: MoEConfig, bias: Tensor | None) -> Tensor:
    """Return the gates (N, E) token by token and choice by choice, 0 for experts that are not chosen."""
    affinities = softmax(logits) if config.affinity == "softmax" else 1 / (1 + torch.exp(-logits))
    gates = torch.zeros_like(affinities)
    for token, row in enumerate(affinities):
        scores = (row if bias is None else row + bias).tolist()
        chosen = sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))[: config.top_k]
        total = sum(row[expert] for expert in chosen) if config.normalized_gates else 1.0
        for expert in chosen:
            gates[token, expert] = row[expert] / total
    return gates


def reference_moe(x: Tensor, moe: MoE, weights: dict[str, Tensor], form: Form) -> Tensor:
    gates = reference_gates(x @ weights["router.weight"].T, moe.config, weights.get("expert_bias"))
    stacks = weights["experts.w1"], weights["experts.w2"], weights.get("experts.w3")
    activation = "relu2" if form == "relu2" else "silu"
    out = functional.mix_experts(x, gates, *stacks, activation)
    if moe.shared is not None:
        shared = weights["shared.w1.weight"][None], weights["shared.w2.weight"][None]
        gate = weights["shared.w3.weight"][None] if form == "swiglu" else None
        gates = torch.ones_like(x[:, :1])
        if moe.shared_gate is not None:
            gates = 1 / (1 + torch.exp(-x @ weights["shared_gate.weight"].T))
        out = out + functional.mix_experts(x, gates, *shared, gate, activation)
    return out


@FEW_EXAMPLES
@given(
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from(["swiglu", "silu", "relu2"]),
    st.sampled_from([(2, 2), (4, 2), (8, 3), (9, 1)]),
    st.sampled_from([1, 7, 130]),
    seeds,
)
def test_forward_and_backward_equal_a_loop_over_experts(
    affinity: Literal["softmax", "sigmoid"],
    normalized: bool,
    has_bias: bool,
    shared: int,
    form: Form,
    counts: tuple[int, int],
    tokens: int,
    seed: int,
) -> None:
    experts, top_k = counts
    config = MoEConfig(
        experts,
        top_k,
        d_expert=10,
        num_shared_experts=shared,
        shared_gate=shared == 2,
        affinity=affinity,
        normalized_gates=normalized and top_k > 1,
        bias_update_rate=0.1 if has_bias else 0.0,
    )
    torch.manual_seed(seed)
    moe = make_moe(config, 12, 40, form).double()
    if moe.expert_bias is not None:
        moe.expert_bias.normal_()
        moe.expert_bias[0] = -10.0  # an expert without tokens, if enough others are there
    names = [*dict(moe.named_parameters())]
    buffers = dict(moe.named_buffers())

    def compute(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(moe, dict(zip(names, weights, strict=True)) | buffers, (x,))

    def reference(x: Tensor, *weights: Tensor) -> Tensor:
        return reference_moe(x, moe, dict(zip(names, weights, strict=True)) | buffers, form)

    assert_equal_with_gradients(compute, reference, random_normal(tokens, 12, seed=seed).double(), *moe.parameters())


def test_ties_go_to_the_lower_index_and_other_experts_get_no_gradient() -> None:
    moe = make_moe(MoEConfig(4, 2, d_expert=6), 8, 16)
    torch.nn.init.zeros_(moe.router.weight)
    x = random_normal(50, 8)
    out, routing = run_recorded(moe, x)
    assert routing.counts.tolist() == [50, 50, 0, 0]
    torch.testing.assert_close(out, reference_moe(x, moe, dict(moe.named_parameters()), "swiglu"))
    out.sum().backward()
    assert moe.experts.w1.grad is not None and moe.router.weight.grad is not None
    assert moe.experts.w1.grad[:2].abs().sum((1, 2)).min() > 0 and not moe.experts.w1.grad[2:].any()
    # Normalized gates depend on the logits of the chosen experts only.
    assert moe.router.weight.grad[:2].abs().max() > 1e-2 and moe.router.weight.grad[2:].abs().max() < 1e-5


def test_a_permutation_of_the_experts_changes_nothing() -> None:
    moe = make_moe(MoEConfig(8, 3, d_expert=6, bias_update_rate=0.1), 12, 16)
    assert moe.expert_bias is not None
    moe.expert_bias.normal_()
    x = random_normal(200, 12)
    before = moe(x)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for tensor in (moe.router.weight, moe.expert_bias, *moe.experts.parameters()):
            tensor.copy_(tensor[order].clone())
    torch.testing.assert_close(moe(x), before, rtol=1e-5, atol=1e-5)


@FEW_EXAMPLES
@given(st.booleans(), st.sampled_from(["silu", "relu2"]), st.sampled_from([1, 30, 100]), st.booleans(), seeds)
def test_grouped_products_equal_the_segments(
    is_gated: bool, activation: Literal["silu", "relu2"], tokens: int, on_onednn: bool, seed: int
) -> None:
    """Also with an expert without tokens, and with choices that a capacity dropped; oneDNN's segments have padding."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, 5, generator=generator)
    scores[:, 2] = -1
    chosen = scores.argsort(-1, descending=True)[:, :3]
    chosen = chosen.masked_fill(torch.rand(tokens, 3, generator=generator) < 0.2, 5)
    gates = torch.rand(tokens, 3, generator=generator)
    x, w1, w3 = (random_normal(*shape, seed=seed + i) for i, shape in enumerate([(tokens, 8), (5, 16, 8), (5, 16, 8)]))
    w1, w3, w2 = (0.2 * tensor for tensor in (w1, w3, random_normal(5, 8, 16, seed=seed)))
    inputs = [x, gates, w1, w2, *([w3] if is_gated else [])]
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.model.ops.matmul.PREFERS_ONEDNN", on_onednn and torch.backends.mkldnn.is_available())
        for function in (mix_experts, mix_experts_grouped):
            arguments = [tensor.clone().requires_grad_() for tensor in inputs]
            weights = ExpertWeights(arguments[2], arguments[3], arguments[4] if is_gated else None)
            out = function(arguments[0], chosen, arguments[1], weights, activation)
            results.append([out, *torch.autograd.grad(out.sin().sum(), arguments)])
    for segments, grouped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, segments, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_experts_on_a_gpu_equal_those_of_the_cpu(dtype: torch.dtype, is_compiled: bool) -> None:
    """Also with an expert that has no tokens, and with choices that a capacity dropped."""
    config = MoEConfig(6, 2, d_expert=32, bias_update_rate=0.1, capacity_factor=1.2)
    moe = make_moe(config, 64, 64)
    assert moe.expert_bias is not None
    moe.expert_bias[3] = -10.0
    x, grad = random_normal(500, 64, seed=1), random_normal(500, 64, seed=2)
    results = []
    for device, dtype_of_products in (("cpu", torch.float32), ("cuda", dtype)):
        model = moe.to(device)
        model.zero_grad()
        inputs = x.clone().to(device).requires_grad_()
        forward = torch.compile(model) if is_compiled and device == "cuda" else model
        with torch.autocast(device, dtype_of_products, enabled=dtype_of_products == torch.bfloat16):
            model.record_routings()  # as in training, where a capacity drops tokens
            out = forward(inputs)
        out.backward(grad.to(out))
        assert not any(stack.grad[3].any() for stack in model.experts.parameters() if stack.grad is not None)
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append(
            [tensor.detach().float().cpu() for tensor in (out, inputs.grad, *gradients) if tensor is not None]
        )
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for cpu, gpu in zip(*results, strict=True):
        assert (gpu - cpu).abs().max() <= tolerance * max(1.0, float(cpu.abs().max()))


def test_a_capacity_drops_the_last_tokens_of_an_expert_in_training_only() -> None:
    chosen = torch.tensor([[0, 1], [0, 2], [1, 0], [2, 0]])
    kept, dropped = drop_over_capacity(chosen, torch.tensor([4.0, 2.0, 2.0]), 2)
    assert kept.tolist() == [[0, 1], [0, 2], [1, 3], [2, 3]] and dropped == 2
    config = MoEConfig(4, 2, d_expert=6, num_shared_experts=1)
    moe, x = make_moe(config, 8, 16), random_normal(64, 8)
    torch.nn.init.zeros_(moe.router.weight)  # all tokens choose experts 0 and 1
    whole = moe(x)
    moe.config = replace(config, capacity_factor=0.5)  # 16 tokens each
    out, routing = run_recorded(moe, x)
    assert routing.dropped == 2 * (64 - 16)
    torch.testing.assert_close(out[:16], whole[:16])
    assert moe.shared is not None
    torch.testing.assert_close(out[16:], moe.shared(x[16:]))
    torch.testing.assert_close(moe(x), whole)  # with or without gradients


@pytest.mark.parametrize("options", [{}, {"affinity": "sigmoid", "bias_update_rate": 0.1}, {"capacity_factor": 0.5}])
def test_padding_is_not_routed(options: dict[str, Any]) -> None:
    moe, x = make_moe(MoEConfig(4, 2, d_expert=6, **options), 8, 16), random_normal(5, 12, 8)
    padding = torch.arange(12) >= torch.tensor([12, 3, 0, 7, 1])[:, None]
    out, routing = run_recorded(moe, x, padding)
    assert not out[padding].any()
    expected, expected_routing = run_recorded(moe, x[~padding])
    if not options.get("capacity_factor"):  # which is a share of all places
        torch.testing.assert_close(out[~padding], expected)
        for ours, theirs in zip(routing, expected_routing, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert routing.counts.sum() == 2 * (~padding).sum()


def test_routing_sums_are_those_of_the_tokens() -> None:
    moe, x = make_moe(MoEConfig(4, 2, d_expert=6, affinity="sigmoid"), 8, 16), random_normal(40, 8)
    _, routing = run_recorded(moe, x)
    logits = x @ moe.router.weight.T
    shares = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    assert isinstance(routing, Routing) and routing.counts.sum() == 80 and routing.dropped == 0
    torch.testing.assert_close(routing.affinity_sums, shares.sum(0))
    torch.testing.assert_close(routing.z_sum, logits.exp().sum(-1).log().square().sum())


MODEL = ModelConfig(
    53,
    48,
    d_model=24,
    num_layers=3,
    num_heads=2,
    d_ff=40,
    moe=MoEConfig(4, 2, num_shared_experts=1, num_dense_layers=1),
)


@pytest.mark.parametrize("moe", [{}, {"affinity": "sigmoid", "bias_update_rate": 0.1, "capacity_factor": 0.5}])
def test_cached_decoding_equals_one_pass(moe: dict[str, Any]) -> None:
    torch.manual_seed(0)
    assert MODEL.moe is not None
    model = TransformerLM(replace(MODEL, moe=replace(MODEL.moe, **moe)))
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.normal_()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    generations = [Generation(prompt, 30, SampleConfig(temperature=0), wants_logprobs=True) for prompt in prompts]
    generate(model, generations)
    for prompt, generation in zip(prompts, generations, strict=True):
        ids = torch.tensor([[*prompt, *generation.ids]])
        with torch.no_grad():
            logprobs = model(ids).log_softmax(-1)[0, len(prompt) - 1 : -1]
        assert logprobs.argmax(-1).tolist() == generation.ids
        assert logprobs.amax(-1).tolist() == pytest.approx(generation.logprobs, abs=1e-5)


def test_parameters_and_flops_count_active_experts() -> None:
    assert MODEL.moe is not None
    counts, dense = parameter_count(MODEL), parameter_count(replace(MODEL, moe=None))
    width = MODEL.moe.expert_width(40)
    assert counts["router"] == 2 * 4 * 24 and "router" not in dense
    assert counts["feed_forward"] == 3 * 24 * (40 + 2 * (4 + 1) * width)
    assert counts["total"] == sum(p.numel() for p in TransformerLM(MODEL, device="meta").parameters())
    assert counts["active"] == counts["total"] - 2 * 2 * 3 * 24 * width
    # Two of four experts and a shared one, of 13 hidden units each, stand for the 40 of the dense network.
    change = counts["router"] + 2 * 3 * 24 * (3 * 13 - 40)
    assert (
        flops_per_token(MODEL, training=False) == flops_per_token(replace(MODEL, moe=None), training=False) + 2 * change
    )
