"""The model's parts and the whole, each against an independent reference."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lm.errors import UserError
from lm.model import (
    Embedding,
    Linear,
    ModelConfig,
    MultiHeadSelfAttention,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    TransformerBlock,
    TransformerLM,
    cross_entropy,
    scaled_dot_product_attention,
    silu,
    softmax,
)

CONFIG = ModelConfig(
    vocab_size=53, context_length=16, d_model=24, num_layers=2, num_heads=3, d_ff=40, rope_theta=500.0, norm_eps=1e-3
)
FEW = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 2**32 - 1)
shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Standard normal numbers times ``scale``, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def tokens_for(config: ModelConfig, batch: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids (batch, length)."""
    assert config.vocab_size is not None
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def seeded_model(config: ModelConfig = CONFIG, seed: int = 0) -> TransformerLM:
    """A model whose norm weights are random too: all ones would hide a norm left out."""
    torch.manual_seed(seed)
    model = TransformerLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


# The reference: plain functions and loops over heads, queries and keys.


def reference_rope(x: Tensor, theta: float, positions: Tensor) -> Tensor:
    """Meta's Llama: pairs of neighbours as complex numbers, each times exp(i · position · frequency)."""
    d_k = x.shape[-1]
    frequencies = 1.0 / (theta ** (torch.arange(0, d_k, 2)[: d_k // 2].double() / d_k))
    angles = positions.double()[..., None] * frequencies
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def reference_attention(x: Tensor, weights: dict[str, Tensor], heads: int, theta: float | None) -> Tensor:
    """One sequence (T, D); every head and query in turn, looking at no later key."""
    length, d_model = x.shape
    width = d_model // heads
    outputs = torch.zeros_like(x)
    for head in range(heads):
        rows = slice(head * width, (head + 1) * width)
        q, k, v = (x @ weights[f"{name}_proj.weight"][rows].T for name in "qkv")
        if theta is not None:
            q, k = (reference_rope(part, theta, torch.arange(length)) for part in (q, k))
        for t in range(length):
            scores = torch.stack([q[t] @ k[s] for s in range(t + 1)]) / width**0.5
            outputs[t, rows] = sum(p * v[s] for s, p in enumerate(torch.softmax(scores, 0)))
    return outputs @ weights["output_proj.weight"].T


def reference_transformer(ids: Tensor, state: dict[str, Tensor], config: ModelConfig) -> Tensor:
    """One sequence of ids (T,) → logits (T, V)."""
    x = state["token_embeddings.weight"][ids]
    for n in range(config.num_layers):
        layer = {
            key.removeprefix(f"layers.{n}."): value for key, value in state.items() if key.startswith(f"layers.{n}.")
        }
        attention = {key.removeprefix("attn."): value for key, value in layer.items() if key.startswith("attn.")}
        normed = reference_rms_norm(x, layer["ln1.weight"], config.norm_eps)
        x = x + reference_attention(normed, attention, config.num_heads, config.rope_theta)
        normed = reference_rms_norm(x, layer["ln2.weight"], config.norm_eps)
        gate, up = normed @ layer["ffn.w1.weight"].T, normed @ layer["ffn.w3.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ layer["ffn.w2.weight"].T
    return reference_rms_norm(x, state["ln_final.weight"], config.norm_eps) @ state["lm_head.weight"].T


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


# The whole model


def test_model_equals_plain_functions() -> None:
    model = seeded_model()
    ids = tokens_for(CONFIG, 2, 12)
    expected = torch.stack([reference_transformer(row, model.state_dict(), CONFIG) for row in ids])
    torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=1e-4)


def test_model_equals_hugging_face_llama() -> None:
    """Hugging Face turns (i, i + d/2) and not neighbours, so the rows of q and k change places."""
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=CONFIG.vocab_size,
            hidden_size=CONFIG.d_model,
            intermediate_size=CONFIG.d_ff,
            num_hidden_layers=CONFIG.num_layers,
            num_attention_heads=CONFIG.num_heads,
            num_key_value_heads=CONFIG.num_heads,
            max_position_embeddings=CONFIG.context_length,
            rms_norm_eps=CONFIG.norm_eps,
            rope_theta=CONFIG.rope_theta,
            # transformers 5 reads this, 4 the line above
            rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta},
            tie_word_embeddings=False,
            attention_bias=False,
            hidden_act="silu",
        )
    ).eval()
    names = {
        "token_embeddings": "model.embed_tokens",
        "attn.output_proj": "self_attn.o_proj",
        "attn": "self_attn",
        "ffn.w1": "mlp.gate_proj",
        "ffn.w2": "mlp.down_proj",
        "ffn.w3": "mlp.up_proj",
        "ln1": "input_layernorm",
        "ln2": "post_attention_layernorm",
        "ln_final": "model.norm",
    }
    model = seeded_model()
    weights = {}
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            rows = weight.unflatten(0, (CONFIG.num_heads, -1, 2))
            weight = rows.transpose(1, 2).flatten(0, 2)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs) if f".{ours}." in f".{name}" else name
        weights[f"model.{name}" if name.startswith("layers.") else name] = weight
    llama.load_state_dict(weights)
    ids = tokens_for(CONFIG, 3, CONFIG.context_length)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), llama(ids).logits, atol=1e-5, rtol=1e-4)


@FEW
@given(seeds, st.integers(1, 11), st.integers(1, 52))
def test_later_tokens_do_not_change_earlier_logits(seed: int, place: int, other: int) -> None:
    model = seeded_model()
    ids = tokens_for(CONFIG, 2, 12, seed)
    changed = ids.clone()
    changed[:, place] = (changed[:, place] + other) % 53
    with torch.no_grad():
        before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :place], after[:, :place], atol=1e-6, rtol=1e-6)
    assert (before[:, place] - after[:, place]).abs().max() > 1e-3


def test_prefix_has_the_same_logits() -> None:
    model = seeded_model()
    ids = tokens_for(CONFIG, 2, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, :5]), model(ids)[:, :5], atol=1e-5, rtol=1e-5)


def test_default_positions_count_from_zero() -> None:
    model = seeded_model()
    ids = tokens_for(CONFIG, 2, 9)
    positions = torch.arange(9)
    with torch.no_grad():
        expected = model(ids)
        torch.testing.assert_close(model(ids, positions), expected)
        torch.testing.assert_close(model(ids, positions.expand(2, 9)), expected)


def test_positions_are_each_sequence_own() -> None:
    model = seeded_model()
    ids = tokens_for(CONFIG, 2, 5)
    positions = torch.tensor([[0, 1, 2, 3, 4], [2, 3, 7, 11, 15]])
    with torch.no_grad():
        together = model(ids, positions)
        for n in range(2):
            torch.testing.assert_close(together[n], model(ids[n : n + 1], positions[n])[0], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(together[1], model(ids)[1], atol=1e-3)


def test_shifting_all_positions_changes_nothing() -> None:
    model = seeded_model()
    ids = tokens_for(CONFIG, 2, 9)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, torch.arange(9) + 7), model(ids), atol=1e-4, rtol=1e-4)


def test_state_dict_keys_are_the_documented_ones() -> None:
    expected = {"token_embeddings.weight", "ln_final.weight", "lm_head.weight"}
    for n in range(CONFIG.num_layers):
        expected |= {f"layers.{n}.attn.{part}_proj.weight" for part in ("q", "k", "v", "output")}
        expected |= {f"layers.{n}.ffn.{part}.weight" for part in ("w1", "w2", "w3")}
        expected |= {f"layers.{n}.{part}.weight" for part in ("ln1", "ln2")}
    model = TransformerLM(CONFIG)
    assert set(model.state_dict()) == expected == {name for name, _ in model.named_parameters()}


def test_every_parameter_gets_a_gradient() -> None:
    model = seeded_model().train()
    ids = tokens_for(CONFIG, 2, 9)
    cross_entropy(model(ids[:, :-1]), ids[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


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


def test_untrained_model_is_near_uniform() -> None:
    """At the start no token is much likelier than another: the loss is about log V, plus half the logits' variance."""
    torch.manual_seed(0)
    model = TransformerLM(
        ModelConfig(vocab_size=300, context_length=32, d_model=64, num_layers=2, num_heads=4, d_ff=128)
    )
    ids = torch.randint(300, (8, 33))
    with torch.no_grad():
        loss = cross_entropy(model(ids[:, :-1]), ids[:, 1:]).item()
    assert math.log(300) - 0.1 < loss < math.log(300) + 0.5


def test_device_and_dtype_reach_every_parameter() -> None:
    model = TransformerLM(CONFIG, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


# A user's mistakes


@pytest.mark.parametrize(
    "wrong",
    [
        {"vocab_size": 0},
        {"context_length": 0},
        {"d_model": 0},
        {"num_layers": 0},
        {"num_heads": 0},
        {"num_heads": -2},
        {"d_ff": 0},
        {"d_model": 100, "num_heads": 16},  # not a multiple
        {"d_model": 48, "num_heads": 16},  # heads 3 wide: an odd number has no pairs
        {"rope_theta": 0.0},
        {"rope_theta": -1.0},
        {"rope_theta": math.nan},
        {"norm_eps": -1e-5},
    ],
    ids=str,
)
def test_bad_config_is_a_user_error(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        ModelConfig(**wrong)  # type: ignore[arg-type]


def test_model_needs_a_vocabulary_size() -> None:
    with pytest.raises(UserError, match="vocab_size"):
        TransformerLM(ModelConfig())


def test_too_long_sequence_is_a_user_error() -> None:
    model = TransformerLM(CONFIG)
    assert model(tokens_for(CONFIG, 1, 16)).shape == (1, 16, 53)
    with pytest.raises(UserError, match=r"17 tokens.*16"):
        model(tokens_for(CONFIG, 1, 17))


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
