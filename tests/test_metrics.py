"""Parameter and FLOP counts against the real model, and a run's figures on disk."""

import json
import math
import warnings
from pathlib import Path

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
)
def test_parameter_count_equals_the_real_model(vocab: int, heads: int, half_width: int, layers: int, d_ff: int) -> None:
    config = ModelConfig(
        vocab_size=vocab, d_model=2 * half_width * heads, num_layers=layers, num_heads=heads, d_ff=d_ff
    )
    model = TransformerLM(config, device="meta")
    counts = parameter_count(config)
    assert counts["total"] == sum(p.numel() for p in model.parameters())
    patterns = {"embedding": "token_embeddings", "attention": ".attn.", "feed_forward": ".ffn.", "head": "lm_head"}
    for part, pattern in {**patterns, "norms": "ln"}.items():
        assert counts[part] == sum(p.numel() for name, p in model.named_parameters() if pattern in name), part


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
    """A forward pass over one full context is 4.513 TFLOPs, term by term."""
    tokens = 1024
    projections = 48 * 4 * 2 * tokens * 1600 * 1600
    scores = 48 * 2 * tokens * tokens * 1600  # over the heads together, each is 1600 / 25 wide
    weighted_sums = scores
    feed_forward = 48 * 3 * 2 * tokens * 1600 * 6400
    head = 2 * tokens * 1600 * 50257
    forward = projections + scores + weighted_sums + feed_forward + head
    assert forward == 4_513_336_524_800
    assert flops_per_token(XL, training=False) * tokens == forward
    assert flops_per_token(XL) * tokens == 3 * forward


@pytest.mark.parametrize(
    "config", [SMALL, ModelConfig(vocab_size=7, context_length=5, d_model=8, num_layers=1, num_heads=4, d_ff=6)]
)
def test_flops_equal_torchs_counter(config: ModelConfig) -> None:
    """Attention as plain matrix products: torch's counter does not see inside the fused one on every device."""
    batch = 2
    model = TransformerLM(config)
    ids = torch.zeros(batch, config.context_length, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        logits = model(ids)
    tokens = batch * config.context_length
    assert counter.get_total_flops() == flops_per_token(config, training=False) * tokens
    with sdpa_kernel(SDPBackend.MATH), counter:
        model(ids).sum().backward()
    assert counter.get_total_flops() == flops_per_token(config) * tokens
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
