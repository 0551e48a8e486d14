"""Parameter and FLOP counts against the real model, and a run's figures on disk."""

import json
import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lm.metrics import bits_per_byte, flops_per_token, parameter_count, plot_metrics, read_metrics
from lm.model import ModelConfig, TransformerLM

SMALL = ModelConfig(vocab_size=50, context_length=12, d_model=24, num_layers=3, num_heads=3, d_ff=40)
# GPT-2 XL's shape in this architecture (CS336 assignment 1, section 3.6).
XL = ModelConfig(vocab_size=50257, context_length=1024, d_model=1600, num_layers=48, num_heads=25, d_ff=6400)


@settings(deadline=None, max_examples=20)
@given(
    vocab=st.integers(1, 200),
    heads=st.integers(1, 4),
    half_width=st.integers(1, 8),
    layers=st.integers(1, 4),
    d_ff=st.integers(1, 50),
    variant=st.fixed_dictionaries(
        {
            "feed_forward": st.sampled_from(["swiglu", "silu", "relu2"]),
            "norm": st.sampled_from(["pre", "post", "none"]),
            "qk_norm": st.booleans(),
            "tied_embeddings": st.booleans(),
        }
    ),
    shares=st.integers(1, 3),
)
def test_parameter_count_equals_the_real_model(
    vocab: int, heads: int, half_width: int, layers: int, d_ff: int, variant: dict[str, Any], shares: int
) -> None:
    config = ModelConfig(
        vocab_size=vocab,
        d_model=2 * half_width * heads * shares,
        num_layers=layers,
        num_heads=heads * shares,
        num_kv_heads=heads,
        d_ff=d_ff,
        **variant,
    )
    model = TransformerLM(config, device="meta")
    counts = parameter_count(config)
    assert counts["total"] == sum(p.numel() for p in model.parameters())
    patterns = {"embedding": "token_embeddings", "attention": "_proj", "feed_forward": ".ffn.", "head": "lm_head"}
    for part, pattern in {**patterns, "norms": r"ln|_norm"}.items():
        assert counts[part] == sum(p.numel() for name, p in model.named_parameters() if re.search(pattern, name)), part


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
    """A forward pass over one full context, term by term: 4.352 TFLOPs, and 4.513 with what the mask leaves out."""
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
    """GPT-2's shapes: a tied head, two matrices of 4 d_model in the feed-forward network. The released models have
    learned positions besides, and biases of the matrices (3 + 1 + 4 + 1 widths a layer) and of the norms."""
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
    besides = 1024 * d_model + (layers * 9 + 2 * layers + 1) * d_model
    assert parameter_count(config)["total"] == matrices + (2 * layers + 1) * d_model == released - besides
    assert flops_per_token(config) == 6 * matrices + 6 * layers * d_model * 1024


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        ModelConfig(vocab_size=7, context_length=5, d_model=8, num_layers=1, num_heads=4, d_ff=6),
        replace(SMALL, tied_embeddings=True, feed_forward="relu2", norm="post"),
        replace(SMALL, norm="none", positions="none", qk_norm=True),
    ],
)
def test_flops_equal_torchs_counter(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention as plain matrix products, the masked half with them: torch's counter does not see inside the fused one
    on every device, nor oneDNN's products."""
    monkeypatch.setattr("lm.fused._ONEDNN", False)
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


def test_bits_per_byte() -> None:
    assert bits_per_byte(math.log(2), 1.0) == pytest.approx(1.0)
    assert bits_per_byte(math.log(256), 1.0) == pytest.approx(8.0)  # bytes at random
    assert bits_per_byte(math.log(256), 4.0) == pytest.approx(2.0)


def write_lines(path: Path, rows: list[dict[str, object]]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return text


def test_metrics_of_a_missing_file_are_none(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_metrics_without_a_cut_last_line(tmp_path: Path) -> None:
    """Whatever byte a crash cut the file at, the whole lines before it are read."""
    path = tmp_path / "metrics.jsonl"
    rows: list[dict[str, object]] = [{"step": n, "loss": 1.5 / n, "note": "ü\u2028"} for n in range(1, 4)]
    text = write_lines(path, rows)
    assert read_metrics(path) == rows
    for cut in range(len(text)):
        path.write_text(text[:cut], encoding="utf-8")
        whole = text[:cut].count("\n")
        # A line that lacks nothing but its line feed counts too.
        expected = rows[: whole + 1] if text[cut] == "\n" else rows[:whole]
        assert read_metrics(path) == expected, cut


def test_metrics_cut_within_a_character(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes('{"step": 1}\n{"note": "ü'.encode()[:-1])
    assert read_metrics(path) == [{"step": 1}]


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": n, "loss": 5 / n, "lr": 1e-3 / n} for n in range(1, 9)] + [{"step": 8, "valid_loss": 1.1}],
        [{"step": 1, "loss": None, "lr": 0.1}, {"step": 2, "loss": math.nan}],
        [],
    ],
    ids=["run", "gaps", "empty"],
)
def test_plot_writes_a_png(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    pytest.importorskip("matplotlib")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plot_metrics(rows, tmp_path / "plot.png")
    data = (tmp_path / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 2000
