"""The fast forms of :mod:`lm.fused` equal plain ones, forward and backward."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lm import fused
from lm.fused import causal_attention, linear, linear_cross_entropy, rms_norm, swiglu
from lm.model import ModelConfig, TransformerLM, cross_entropy, scaled_dot_product_attention, silu

ROWS = st.sampled_from([1, 2, 63, 64, 65, 130])
WIDTHS = st.sampled_from([1, 2, 8, 31, 40])


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def plain_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, softcap: float) -> Tensor:
    logits = x @ weight.T
    return cross_entropy(softcap * torch.tanh(logits / softcap) if softcap else logits, targets)


def assert_same(fast: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Both give the same and have the same gradients, the plain one in float64."""
    ours = [x.detach().clone().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = fast(*ours), plain(*exact)
    assert out.dtype == inputs[0].dtype and out.shape == expected.shape
    torch.testing.assert_close(out, expected.to(out.dtype), rtol=1e-5, atol=1e-5)
    above = torch.randn_like(expected)
    found = torch.autograd.grad(out, ours, above.to(out.dtype))
    wanted = torch.autograd.grad(expected, exact, above)
    for ours_x, exact_x in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_x, exact_x.to(ours_x.dtype), rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, width=WIDTHS, out=WIDTHS, seed=st.integers(0, 99))
def test_linear_is_the_product(rows: int, width: int, out: int, seed: int) -> None:
    torch.manual_seed(seed)
    assert_same(linear, lambda x, w: x @ w.T, torch.randn(2, rows, width), torch.randn(out, width))


def test_linear_takes_a_transposed_input() -> None:
    x, weight = torch.randn(3, 8, 70).mT, torch.randn(5, 8)
    torch.testing.assert_close(linear(x, weight), x @ weight.T)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, width=WIDTHS, seed=st.integers(0, 99))
def test_rms_norm_is_its_formula(rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(2, rows, width) * 3, torch.randn(width)
    assert_same(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: plain_rms_norm(x, w, 1e-5), x, weight)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, width=WIDTHS, part=st.sampled_from([1, 64, 1 << 18]), seed=st.integers(0, 99))
def test_swiglu_is_its_formula(rows: int, width: int, part: int, seed: int) -> None:
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_PART", part)
        assert_same(swiglu, lambda a, b: silu(a) * b, torch.randn(2, rows, width), torch.randn(2, rows, width))


@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    width=WIDTHS,
    vocab=WIDTHS,
    softcap=st.sampled_from([0.0, 1.0, 15.0]),
    chunk=st.sampled_from([1, 1 << 10, 1 << 22]),
    seed=st.integers(0, 99),
)
def test_cross_entropy_in_chunks_is_that_of_all_logits(
    rows: int, width: int, vocab: int, softcap: float, chunk: int, seed: int
) -> None:
    torch.manual_seed(seed)
    targets = torch.randint(vocab, (rows,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_CHUNK_BYTES", {"cpu": chunk})
        assert_same(
            lambda x, w: linear_cross_entropy(x, w, targets, softcap),
            lambda x, w: plain_cross_entropy(x, w, targets, softcap),
            torch.randn(rows, width),
            torch.randn(vocab, width),
        )


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Written out, with shared heads of keys and values repeated."""
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril())


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 5),
    length=st.integers(1, 40),
    width=WIDTHS,
    queries=st.sampled_from([1, 7, 256]),
    scores=st.sampled_from([1, 500, 1 << 19]),
    seed=st.integers(0, 99),
)
def test_attention_in_blocks_is_that_written_out(
    heads: int, length: int, width: int, queries: int, scores: int, seed: int
) -> None:
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_QUERIES", queries)
        patch.setattr(fused, "_SCORES", scores)
        assert_same(fused._causal_attention, plain_attention, *torch.randn(3, heads, length, width))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 70, 300])
def test_attention_in_bfloat16_is_as_exact_as_torchs(kv_heads: int, length: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, length, n, 16, dtype=torch.bfloat16).transpose(1, 2) for n in (4, kv_heads, kv_heads))
    above = torch.randn(q.shape, dtype=torch.bfloat16)

    def found(attention: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
        out = attention(*inputs)
        return [out, *torch.autograd.grad(out, inputs, above.to(dtype))]

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    exact = found(plain_attention, torch.float64)
    for ours, theirs, right in zip(
        found(causal_attention, torch.bfloat16), found(torchs, torch.bfloat16), exact, strict=True
    ):
        assert ours.dtype == torch.bfloat16 and ours.shape == right.shape
        assert (ours - right).norm() < 2 * (theirs - right).norm() + 1e-2


def test_attention_takes_compiled_and_not_the_same_gradients() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 70, 16, dtype=torch.bfloat16).requires_grad_().unbind()
    found = [attention(q, k, v) for attention in (causal_attention, torch.compile(causal_attention))]
    torch.testing.assert_close(found[0], found[1])
    gradients = [torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in found]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_great_logits_give_no_infinity() -> None:
    x, weight = torch.tensor([[1e4]], requires_grad=True), torch.tensor([[1.0], [-1.0]])
    loss = linear_cross_entropy(x, weight, torch.tensor([1]))
    assert loss.item() == 2e4
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.item() == 2.0


def test_swiglu_takes_what_is_not_contiguous() -> None:
    gate, up = (torch.randn(8, 70, requires_grad=True) for _ in range(2))
    found = torch.autograd.grad(swiglu(gate.T, up.T).sum(), (gate, up))
    torch.testing.assert_close(found, torch.autograd.grad((silu(gate.T) * up.T).sum(), (gate, up)))


def test_the_loss_without_gradients_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    x, targets = torch.randn(70, 8), torch.randint(9, (70,))
    weight = torch.randn(9, 8, requires_grad=True)
    monkeypatch.setattr(fused, "_weight_gradient", lambda *_: pytest.fail("a gradient was taken"))
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, targets)
    torch.testing.assert_close(loss, F.cross_entropy(x @ weight.T, targets))
    assert not loss.requires_grad


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_loss_under_autocast_is_near_that_of_the_logits(softcap: float) -> None:
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(97, 64, 32, 2, 2, d_ff=64, logit_softcap=softcap))
    ids, targets = torch.randint(97, (2, 4, 64)).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        fast = model.loss(ids, targets)
        plain = F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())
    for loss in (fast, plain):
        loss.backward()
    assert fast.dtype == torch.float32
    torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-3)
    half = [parameter.grad / 2 for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model.loss(ids, targets).backward()  # float32
    for mean, exact in zip(half, (parameter.grad for parameter in model.parameters()), strict=True):
        assert exact is not None
        assert (mean - exact).norm() < 0.05 * exact.norm() + 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_compiled_and_not_the_loss_and_its_gradients_are_the_same(tied: bool) -> None:
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(97, 64, 32, 1, 2, d_ff=64, tied_embeddings=tied, qk_norm=True))
    ids, targets = torch.randint(97, (2, 4, 64)).unbind()
    found = []
    for loss_of in (model.loss, torch.compile(model.loss)):
        loss = loss_of(ids, targets)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        model.zero_grad()
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_without_gradients_the_results_are_the_same() -> None:
    x, weight, up = torch.randn(3, 70, 16), torch.randn(16), torch.randn(3, 70, 16)
    with_them = rms_norm(x, weight, 1e-5), swiglu(x, up)
    with torch.no_grad():
        torch.testing.assert_close((rms_norm(x, weight, 1e-5), swiglu(x, up)), with_them)
