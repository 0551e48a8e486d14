"""Parameter and FLOP counts against the real model."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lm.common.errors import UserError
from lm.model.config import ModelConfig
from lm.model.flops import flops_per_token, parameter_count
from lm.model.linear import Linear
from lm.model.transformer import TransformerLM
from tests.helpers.examples import examples
from tests.helpers.reference_model import SMALL_CONFIG

TINY = ModelConfig(vocab_size=50, context_length=12, d_model=24, num_layers=3, num_heads=3, d_ff=40)
# GPT-2 XL's shape in this architecture (CS336 assignment 1, section 3.6).
XL = ModelConfig(vocab_size=50257, context_length=1024, d_model=1600, num_layers=48, num_heads=25, d_ff=6400)


def test_flops_of_windows_by_hand() -> None:
    """Of the keys that queries see: 1, 2, …, 300, 300, … in two blocks with a window, 1, 2, 3, … in the global one."""
    plain = replace(TINY, context_length=1200)
    windowed = replace(plain, sliding_window=300, global_interval=3)
    keys = [sum(min(query, window) for query in range(1, 1201)) for window in (300, 1200)]
    # A multiplication and an addition, for the score and for the sum of values.
    saved = 2 * 2 * 24 * 2 * (keys[1] - keys[0]) / 1200
    difference = flops_per_token(plain, training=False) - flops_per_token(windowed, training=False)
    assert difference == pytest.approx(saved, rel=0.01)
    assert flops_per_token(replace(TINY, sliding_window=12)) == flops_per_token(TINY)


@examples(20)
@given(
    vocab=st.integers(1, 200),
    heads=st.integers(1, 4),
    half_width=st.integers(1, 8),
    layers=st.integers(1, 4),
    d_ff=st.integers(1, 50),
    variant=st.fixed_dictionaries(
        {
            "feed_forward": st.sampled_from(["swiglu", "geglu", "silu", "relu2"]),
            "norm_placement": st.sampled_from(["pre", "post", "none", "output", "sandwich"]),
            "qk_norm": st.booleans(),
            "qkv_bias": st.booleans(),
            "tied_embeddings": st.booleans(),
        }
    ),
    group_size=st.integers(1, 3),
)
def test_parameter_count_equals_the_real_model(
    vocab: int, heads: int, half_width: int, layers: int, d_ff: int, variant: dict[str, Any], group_size: int
) -> None:
    config = ModelConfig(
        vocab_size=vocab,
        d_model=2 * half_width * heads * group_size,
        num_layers=layers,
        num_heads=heads * group_size,
        num_kv_heads=heads,
        d_ff=d_ff,
        **variant,
    )
    model = TransformerLM(config, device="meta")
    counts = parameter_count(config)
    assert counts["total"] == sum(p.numel() for p in model.parameters())
    patterns = {
        "embedding": "token_embeddings",
        "attention": r"_proj\.weight",
        "feed_forward": ".ffn.",
        "head": "lm_head",
    }
    for part, pattern in {**patterns, "norms": r"ln|_norm", "biases": r"\.bias$"}.items():
        assert counts.get(part, 0) == sum(
            p.numel() for name, p in model.named_parameters() if re.search(pattern, name)
        ), part


def test_counts_need_a_vocabulary_size() -> None:
    with pytest.raises(UserError, match="vocab_size"):
        parameter_count(ModelConfig())


def test_parameters_of_gpt2_xl_by_hand() -> None:
    embedding = 50257 * 1600
    attention = 4 * 1600 * 1600
    feed_forward = 3 * 1600 * 6400
    block = attention + feed_forward + 2 * 1600
    assert embedding == 80_411_200 and block == 40_963_200
    counts = parameter_count(XL)
    assert counts == {
        "embedding": embedding,
        "attention": 48 * attention,
        "feed_forward": 48 * feed_forward,
        "norms": 48 * 2 * 1600 + 1600,
        "head": embedding,
        "total": 2 * embedding + 48 * block + 1600,
    }
    assert counts["total"] == 2_127_057_600


def test_flops_of_gpt2_xl_by_hand() -> None:
    """A forward pass over one full context, term by term: 4.352 TFLOPs, or 4.513 with the masked half of the scores."""
    tokens = 1024
    projections = 48 * 4 * 2 * tokens * 1600 * 1600
    scores = 48 * tokens * tokens * 1600  # over the heads together, each is 1600 / 25 wide; half of the keys
    weighted_sums = scores
    feed_forward = 48 * 3 * 2 * tokens * 1600 * 6400
    head = 2 * tokens * 1600 * 50257
    forward = projections + scores + weighted_sums + feed_forward + head
    assert forward == 4_352_275_251_200
    assert forward + scores + weighted_sums == 4_513_336_524_800
    assert flops_per_token(XL, training=False) * tokens == forward
    assert flops_per_token(XL) * tokens == 3 * forward


@pytest.mark.parametrize(
    ("layers", "d_model", "heads", "released"),
    [
        (12, 768, 12, 124_439_808),
        (24, 1024, 16, 354_823_168),
        (36, 1280, 20, 774_030_080),
        (48, 1600, 25, 1_557_611_200),
    ],
    ids=["small", "medium", "large", "xl"],
)
def test_gpt2_by_hand(layers: int, d_model: int, heads: int, released: int) -> None:
    """GPT-2's shapes: a tied head and two matrices of 4 d_model in the feed-forward network.

    The released models also have learned positions and biases of the matrices (3 + 1 + 4 + 1 widths per layer) and of
    norms.
    """
    config = ModelConfig(
        50257,
        1024,
        d_model,
        layers,
        heads,
        d_ff=4 * d_model,
        feed_forward="silu",
        tied_embeddings=True,
    )
    matrices = layers * 12 * d_model**2 + 50257 * d_model
    extra = 1024 * d_model + (layers * 9 + 2 * layers + 1) * d_model
    assert parameter_count(config)["total"] == matrices + (2 * layers + 1) * d_model == released - extra
    assert flops_per_token(config) == 6 * matrices + 6 * layers * d_model * 1024


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        ModelConfig(vocab_size=7, context_length=5, d_model=8, num_layers=1, num_heads=4, d_ff=6),
        replace(TINY, tied_embeddings=True, feed_forward="relu2", norm_placement="post"),
        replace(TINY, norm_placement="none", position_encoding="none", qk_norm=True),
    ],
)
def test_flops_equal_torchs_counter(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention runs as plain matrix products, which include the masked half: torch's counter does not see inside fused
    attention on every device, nor inside oneDNN's products."""
    monkeypatch.setattr("lm.model.ops.matmul.PREFERS_ONEDNN", False)
    batch = 2
    model = TransformerLM(config)
    ids = torch.zeros(batch, config.context_length, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        logits = model(ids)
    tokens = batch * config.context_length
    masked = 2 * config.num_layers * config.d_model * config.context_length
    assert counter.get_total_flops() == (flops_per_token(config, training=False) + masked) * tokens
    with sdpa_kernel(SDPBackend.MATH), counter:
        model(ids).sum().backward()
    assert counter.get_total_flops() == (flops_per_token(config) + 3 * masked) * tokens
    assert logits.shape[:2] == (batch, config.context_length)


def test_counts_follow_the_roles_of_a_new_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new layer can have more matrices in a block than ModelConfig describes."""
    config = replace(SMALL_CONFIG, vocab_size=61)  # not used by another test, because counts are cached
    plain = parameter_count(config), flops_per_token(config, training=False)
    build = TransformerLM.__init__

    def build_with_extra_matrix(self: TransformerLM, config: ModelConfig, device: str) -> None:
        build(self, config, device)
        layers: Any = self.layers
        layers[0].ffn.w4 = Linear(24, 40, device, role="feed_forward")

    monkeypatch.setattr(TransformerLM, "__init__", build_with_extra_matrix)
    changed = replace(config, rope_theta=501.0)
    assert parameter_count(changed)["feed_forward"] == plain[0]["feed_forward"] + 24 * 40
    assert parameter_count(changed)["total"] == plain[0]["total"] + 24 * 40
    assert flops_per_token(changed, training=False) == plain[1] + 2 * 24 * 40


def test_counting_draws_no_random_numbers() -> None:
    """Training counts FLOPs after it sets the seed."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    parameter_count(replace(SMALL_CONFIG, vocab_size=67))
    assert torch.equal(torch.get_rng_state(), before)
