"""The parts of the model, each against an independent reference."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lm.model import (
    Embedding,
    Linear,
    MultiHeadSelfAttention,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    TransformerBlock,
    cross_entropy,
    scaled_dot_product_attention,
    silu,
    softmax,
)
from tests.reference_model import FEW, reference_attention, reference_rms_norm, reference_rope, seeds

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Standard normal numbers times ``scale``, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


# Parts


@FEW
@given(seeds, shapes)
def test_linear_equals_torch(seed: int, shape: tuple[int, ...]) -> None:
    ours, theirs = Linear(5, 7), nn.Linear(5, 7, bias=False)
    theirs.load_state_dict(ours.state_dict())
    x = normal(*shape, 5, seed=seed)
    torch.testing.assert_close(ours(x), theirs(x))


def test_linear_keeps_weight_as_out_by_in() -> None:
    layer = Linear(3, 2)
    assert layer.weight.shape == (2, 3)
    x = torch.tensor([1.0, 10.0, 100.0])
    by_hand = [sum((layer.weight[i, j] * x[j]).item() for j in range(3)) for i in range(2)]
    torch.testing.assert_close(layer(x), torch.tensor(by_hand))


@FEW
@given(seeds, shapes)
def test_embedding_equals_torch(seed: int, shape: tuple[int, ...]) -> None:
    ours, theirs = Embedding(11, 4), nn.Embedding(11, 4)
    theirs.load_state_dict(ours.state_dict())
    ids = torch.randint(11, shape, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(ours(ids), theirs(ids))


@FEW
@given(seeds, shapes, st.sampled_from([1e-6, 1e-5, 0.1]), st.sampled_from([1e-4, 1.0, 1e4]))
def test_rms_norm_equals_torch(seed: int, shape: tuple[int, ...], eps: float, scale: float) -> None:
    ours, theirs = RMSNorm(6, eps), nn.RMSNorm(6, eps)
    with torch.no_grad():
        ours.weight.copy_(normal(6, seed=seed + 1))
    theirs.load_state_dict(ours.state_dict())
    x = normal(*shape, 6, seed=seed, scale=scale)
    torch.testing.assert_close(ours(x), theirs(x))


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(RMSNorm(4)(torch.zeros(2, 4)), torch.zeros(2, 4))


def test_rms_norm_computes_in_float32_for_bfloat16() -> None:
    """Exact up to the last rounding; norms computed in bfloat16 itself are off by a unit in about every third entry."""
    norm = RMSNorm(256, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(normal(256, seed=1))
    x = normal(64, 256).bfloat16()
    result = norm(x)
    exact = reference_rms_norm(x.double(), norm.weight.double(), norm.eps).bfloat16()
    assert result.dtype == torch.bfloat16
    assert (result == exact).float().mean() > 0.999


def test_rms_norm_does_not_overflow_in_float16() -> None:
    """The square of 1000 is past float16."""
    norm = RMSNorm(4, dtype=torch.float16)
    torch.testing.assert_close(norm(torch.full((4,), 1000.0).half()), torch.ones(4).half())


@FEW
@given(seeds, shapes, st.sampled_from([0.1, 1.0, 50.0]))
def test_silu_equals_torch(seed: int, shape: tuple[int, ...], scale: float) -> None:
    x = normal(*shape, seed=seed, scale=scale)
    torch.testing.assert_close(silu(x), F.silu(x))


def test_swiglu_equals_formula() -> None:
    layer = SwiGLU(6, 10)
    x = normal(2, 3, 6)
    gate, up = x @ layer.w1.weight.T, x @ layer.w3.weight.T
    expected = (gate * (1 / (1 + torch.exp(-gate))) * up) @ layer.w2.weight.T
    torch.testing.assert_close(layer(x), expected)
    assert layer.w1.weight.shape == layer.w3.weight.shape == (10, 6) and layer.w2.weight.shape == (6, 10)


@FEW
@given(seeds, st.integers(0, 2), st.sampled_from([1e-3, 1.0, 30.0, 1e4]))
def test_softmax_equals_torch(seed: int, dim: int, scale: float) -> None:
    x = normal(2, 3, 5, seed=seed, scale=scale)
    for axis in (dim, dim - 3):
        torch.testing.assert_close(softmax(x, axis), torch.softmax(x, axis))


def test_softmax_does_not_change_when_all_grow() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(softmax(x + 1e4), softmax(x), atol=1e-3, rtol=0)
    assert torch.equal(softmax(torch.tensor([-math.inf, 0.0])), torch.tensor([0.0, 1.0]))


@FEW
@given(seeds, shapes, st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_attention_equals_torch(
    seed: int, batch: tuple[int, ...], queries: int, keys: int, d_k: int, d_v: int, masked: bool
) -> None:
    q, k, v = (
        normal(*batch, *size, seed=seed + i) for i, size in enumerate([(queries, d_k), (keys, d_k), (keys, d_v)])
    )
    mask = None
    if masked:
        mask = torch.rand(*batch, queries, keys, generator=torch.Generator().manual_seed(seed)) < 0.5
        mask[..., 0] = True  # a row that allows nothing has no answer
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), expected)


# Rotary positions


@FEW
@given(seeds, st.integers(1, 9), st.sampled_from([2, 4, 6, 16]), st.sampled_from([10.0, 10000.0, 500000.0]))
def test_rope_equals_complex_form(seed: int, length: int, d_k: int, theta: float) -> None:
    x = normal(2, 3, length, d_k, seed=seed)
    rope = RotaryEmbedding(theta, d_k, max_seq_len=9)
    torch.testing.assert_close(rope(x), reference_rope(x, theta, torch.arange(length)), atol=1e-5, rtol=1e-5)


def test_rope_takes_positions_per_sequence() -> None:
    x = normal(2, 4, 8)
    positions = torch.tensor([[0, 1, 2, 3], [7, 0, 31, 5]])
    rope = RotaryEmbedding(100.0, 8, max_seq_len=32)
    torch.testing.assert_close(rope(x, positions), reference_rope(x, 100.0, positions), atol=1e-5, rtol=1e-5)


def test_rope_turns_a_pair_of_neighbours_by_its_position() -> None:
    """With two dimensions the one frequency is 1, so position p is a turn by p radians."""
    turned = RotaryEmbedding(10000.0, 2, max_seq_len=4)(torch.tensor([[1.0, 0.0]] * 4))
    torch.testing.assert_close(turned, torch.tensor([[math.cos(p), math.sin(p)] for p in range(4)]))


@FEW
@given(seeds, st.integers(0, 40), st.integers(0, 40), st.integers(0, 20))
def test_rope_scores_depend_on_distance_only(seed: int, a: int, b: int, shift: int) -> None:
    rope = RotaryEmbedding(10000.0, 8, max_seq_len=64)
    q, k = normal(1, 8, seed=seed), normal(1, 8, seed=seed + 1)

    def score(i: int, j: int) -> Tensor:
        return rope(q, torch.tensor([i])) @ rope(k, torch.tensor([j])).T

    torch.testing.assert_close(score(a, b), score(a + shift, b + shift), atol=1e-4, rtol=1e-4)


def test_rope_keeps_dtype_and_length() -> None:
    x = normal(3, 5, 8).bfloat16()
    turned = RotaryEmbedding(10000.0, 8, max_seq_len=5)(x)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float().norm(dim=-1), x.float().norm(dim=-1), rtol=1e-2, atol=1e-2)


# Attention over heads


@pytest.mark.parametrize("theta", [None, 100.0])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_multi_head_attention_equals_loop_over_heads(heads: int, theta: float | None) -> None:
    torch.manual_seed(heads)
    rope = None if theta is None else RotaryEmbedding(theta, 16 // heads, max_seq_len=7)
    layer = MultiHeadSelfAttention(16, heads, rope)
    x = normal(2, 7, 16)
    expected = torch.stack([reference_attention(row, layer.state_dict(), heads, theta) for row in x])
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", [1, 3])
def test_multi_head_attention_equals_own_written_out_attention(heads: int) -> None:
    """The fused attention the model runs against the module's documented one, with a causal mask."""
    torch.manual_seed(heads)
    layer = MultiHeadSelfAttention(12, heads)
    x = normal(2, 6, 12)
    width = 12 // heads
    mask = torch.tensor([[key <= query for key in range(6)] for query in range(6)])
    outputs = []
    for head in range(heads):
        rows = slice(head * width, (head + 1) * width)
        q, k, v = (x @ part.weight[rows].T for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        outputs.append(scaled_dot_product_attention(q, k, v, mask))
    torch.testing.assert_close(layer(x), layer.output_proj(torch.cat(outputs, dim=-1)), atol=1e-5, rtol=1e-4)


def test_block_adds_attention_then_feed_forward() -> None:
    torch.manual_seed(0)
    block = TransformerBlock(16, 2, 24, RotaryEmbedding(100.0, 8, 5))
    x = normal(2, 5, 16)
    middle = x + block.attn(block.ln1(x))
    torch.testing.assert_close(block(x), middle + block.ffn(block.ln2(middle)))


# Initial weights


@pytest.mark.parametrize(
    ("make", "std"),
    [(lambda: Linear(300, 500), math.sqrt(2 / 800)), (lambda: Embedding(500, 300), 1.0)],
    ids=["linear", "embedding"],
)
def test_initial_weights_are_normal_cut_at_three_sigma(make: Callable[[], nn.Module], std: float) -> None:
    torch.manual_seed(0)
    weight = make().weight.detach() / std
    # The variance of a standard normal cut at ±c is 1 - 2 c φ(c) / P(|x| < c).
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    cut_std = math.sqrt(1 - 6 * density / math.erf(3 / math.sqrt(2)))
    assert weight.abs().max() <= 3 + 1e-5
    assert weight.max() > 2.9 and weight.min() < -2.9
    assert weight.std().item() == pytest.approx(cut_std, rel=0.01)
    assert weight.mean().item() == pytest.approx(0, abs=0.01)
    assert (weight.abs() < 1).float().mean().item() == pytest.approx(math.erf(1 / math.sqrt(2)) / 0.9973, abs=0.01)


def test_norm_weights_start_at_one() -> None:
    assert torch.equal(RMSNorm(5).weight, torch.ones(5))


# Loss


@FEW
@given(seeds, shapes, st.integers(1, 20), st.sampled_from([1e-3, 1.0, 100.0, 1e4]))
def test_cross_entropy_equals_torch(seed: int, shape: tuple[int, ...], vocab: int, scale: float) -> None:
    logits = normal(*shape, vocab, seed=seed, scale=scale)
    targets = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))
    expected = F.cross_entropy(logits.reshape(-1, vocab), targets.reshape(-1))
    torch.testing.assert_close(cross_entropy(logits, targets), expected, atol=1e-5, rtol=1e-5)


@FEW
@given(seeds, st.sampled_from([-100, -1, 0, 3]))
def test_cross_entropy_leaves_out_ignored_targets(seed: int, ignored: int) -> None:
    logits = normal(4, 5, 7, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(7, (4, 5), generator=generator)
    targets[torch.rand(4, 5, generator=generator) < 0.4] = ignored
    targets[0, 0] = 1
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignored)
    torch.testing.assert_close(cross_entropy(logits, targets, ignored), expected)


def test_cross_entropy_gradient_equals_torch() -> None:
    targets = torch.tensor([0, -100, 2, 4])
    gradients = []
    for loss in (cross_entropy, F.cross_entropy):
        logits = normal(4, 5).requires_grad_()
        loss(logits, targets).backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients)


def test_cross_entropy_of_huge_logits() -> None:
    logits = torch.tensor([[1e4, -1e4], [1e4, -1e4]])
    assert cross_entropy(logits, torch.tensor([0, 0])).item() == 0
    assert cross_entropy(logits, torch.tensor([1, 1])).item() == pytest.approx(2e4)


def test_cross_entropy_without_targets_is_nan() -> None:
    assert cross_entropy(normal(2, 3), torch.tensor([-100, -100])).isnan()
