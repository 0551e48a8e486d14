"""The divergence of distillation: against its definition in float64 and against TRL, and the same sum in chunks."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.posttrain.losses.distillation import compute_divergence, sum_divergences

BETAS = st.sampled_from([0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
TEMPERATURES = st.sampled_from([0.3, 1.0, 2.5])


def reference(logits: list[float], teacher_logits: list[float], beta: float, temperature: float) -> float:
    """The definition of Agarwal et al. 2023, one token and one id of the vocabulary at a time."""

    def probabilities(values: list[float]) -> list[float]:
        weights = torch.tensor(values, dtype=torch.float64).div(temperature).exp().tolist()
        return [weight / sum(weights) for weight in weights]

    def kl(first: list[float], second: list[float]) -> float:
        ratios = torch.tensor(first, dtype=torch.float64) / torch.tensor(second, dtype=torch.float64)
        return sum(a * float(ratio.log()) for a, ratio in zip(first, ratios, strict=True))

    p, q = probabilities(logits), probabilities(teacher_logits)
    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    m = [(1 - beta) * a + beta * b for a, b in zip(p, q, strict=True)]
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


@given(st.integers(0, 1 << 30), st.integers(1, 9), BETAS, TEMPERATURES)
def test_divergence_is_its_definition(seed: int, vocab_size: int, beta: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, teacher_logits = 4 * torch.randn(2, 3, vocab_size, generator=generator, dtype=torch.float64)
    expected = [
        reference(a, b, beta, temperature) for a, b in zip(logits.tolist(), teacher_logits.tolist(), strict=True)
    ]
    result = compute_divergence(logits, teacher_logits, beta, temperature)
    assert result.dtype == torch.float64
    assert result.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    in_float32 = compute_divergence(logits.float(), teacher_logits.float(), beta, temperature)
    assert in_float32.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@given(st.integers(0, 1 << 30), BETAS, TEMPERATURES)
def test_divergence_and_gradient_are_those_of_trl(seed: int, beta: float, temperature: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd", reason="trl is not installed")
    generator = torch.Generator().manual_seed(seed)
    logits, teacher_logits = 3 * torch.randn(2, 2, 4, 11, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[-100, 1, 2, 3], [-100, -100, 5, -100]])
    results = []
    for function in (
        lambda x: gkd.GKDTrainer.generalized_jsd_loss(x, teacher_logits, labels, beta, temperature),
        lambda x: compute_divergence(x, teacher_logits, beta, temperature)[labels != -100].mean(),
    ):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)


def make_model(seed: int, d_model: int = 16, vocab_size: int = 37, **options: Any) -> TransformerLM:
    torch.manual_seed(seed)
    config = ModelConfig(vocab_size, context_length=32, d_model=d_model, num_layers=1, num_heads=2, d_ff=32, **options)
    return TransformerLM(config, dtype=torch.float64)


def plain_sum(
    model: TransformerLM,
    hidden: Tensor,
    teacher: TransformerLM,
    teacher_hidden: Tensor,
    beta: float,
    temperature: float,
) -> Tensor:
    with torch.no_grad():
        teacher_logits = teacher.logits(teacher_hidden)[:, :37]
    size = teacher_logits.shape[-1]
    return compute_divergence(model.logits(hidden)[:, :size], teacher_logits, beta, temperature).sum()


@pytest.mark.parametrize("options", [{}, {"tied_embeddings": True}, {"logit_softcap": 3.0}])
@given(
    seed=st.integers(0, 1 << 30),
    tokens=st.integers(0, 9),
    rows=st.integers(1, 10),
    vocab_size=st.sampled_from([30, 37, 40]),
    beta=BETAS,
)
def test_chunks_have_the_sum_and_the_gradients_of_all_tokens(
    options: dict[str, Any], seed: int, tokens: int, rows: int, vocab_size: int, beta: float
) -> None:
    model, teacher = make_model(seed, **options), make_model(seed + 1, d_model=8, vocab_size=vocab_size)
    hidden = torch.randn(tokens, 16, dtype=torch.float64, requires_grad=True)
    teacher_hidden = torch.randn(tokens, 8, dtype=torch.float64)
    results = []
    for function in (plain_sum, sum_divergences):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lm.posttrain.losses.distillation.rows_of_chunk", lambda *_: 4 * rows)
            loss = function(model, hidden, teacher, teacher_hidden, beta, 1.7)
            gradients = torch.autograd.grad(3 * loss, [hidden, model.head_weight])
        results.append((loss.detach(), *gradients))
    torch.testing.assert_close(results[0], results[1])
    with torch.no_grad():
        torch.testing.assert_close(sum_divergences(model, hidden, teacher, teacher_hidden, beta, 1.7), results[0][0])


def test_a_frozen_head_gets_no_gradient() -> None:
    model, teacher = make_model(0), make_model(1)
    model.head_weight.requires_grad_(False)
    hidden = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    sum_divergences(model, hidden, teacher, torch.randn(5, 16, dtype=torch.float64), 0.5, 1.0).backward()
    assert hidden.grad is not None and hidden.grad.any()
    assert model.head_weight.grad is None and teacher.head_weight.grad is None


def test_no_more_than_a_chunk_of_logits_is_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, teacher = make_model(0), make_model(1)
    seen: list[tuple[int, ...]] = []

    def record(logits: Tensor) -> Tensor:
        seen.append(tuple(logits.shape))
        return logits

    monkeypatch.setattr("lm.posttrain.losses.distillation.rows_of_chunk", lambda *_: 8)
    for part in (model, teacher):
        monkeypatch.setattr(part, "cap_logits", record)
    hidden = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    sum_divergences(model, hidden, teacher, hidden.detach(), 0.5, 1.0).backward()
    assert seen == [(2, 37)] * 4 + [(1, 37)] * 2
