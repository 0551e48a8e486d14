"""Cross-entropy fused with the head's product equals the plain reference, forward and backward."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.model.functional import IGNORE_INDEX, cross_entropy
from lm.model.ops.cross_entropy import _softmax_in_place, _softmax_to_compile, linear_cross_entropy
from tests.helpers.examples import examples
from tests.helpers.tensors import assert_equal_with_gradients, row_counts, widths

ROWS_OF_CHUNK = "lm.model.ops.cross_entropy.rows_of_chunk"


def reference_loss(x: Tensor, weight: Tensor, targets: Tensor, softcap: float) -> Tensor:
    logits = x @ weight.T
    return cross_entropy(softcap * torch.tanh(logits / softcap) if softcap else logits, targets)


def loss_and_gradients(loss_function: Callable[..., Tensor], x: Tensor, weight: Tensor) -> list[Tensor]:
    """Return the loss in float32, and three times its gradients."""
    inputs = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    loss = loss_function(*inputs)
    return [loss.detach().float(), *torch.autograd.grad(3 * loss, inputs)]


@examples(60)
@given(
    rows=row_counts,
    width=widths,
    vocab=widths,
    softcap=st.sampled_from([0.0, 1.0, 15.0]),
    chunk_rows=st.sampled_from([1, 5, 1000]),
    seed=st.integers(0, 99),
)
def test_loss_in_chunks_equals_loss_of_all_logits(
    rows: int, width: int, vocab: int, softcap: float, chunk_rows: int, seed: int
) -> None:
    torch.manual_seed(seed)
    targets = torch.randint(vocab, (rows,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ROWS_OF_CHUNK, lambda *_: chunk_rows)
        assert_equal_with_gradients(
            lambda x, w: linear_cross_entropy(x, w, targets, softcap),
            lambda x, w: reference_loss(x, w, targets, softcap),
            torch.randn(rows, width),
            torch.randn(vocab, width),
        )


@examples(60)
@given(
    rows=row_counts,
    width=widths,
    vocab=widths,
    softcap=st.sampled_from([0.0, 15.0]),
    chunk_rows=st.sampled_from([1, 7, 64, 1000]),
    ignored=st.sampled_from(["none", "some", "first chunk", "all except the last", "all"]),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ignored_targets_do_not_count(
    dtype: torch.dtype,
    rows: int,
    width: int,
    vocab: int,
    softcap: float,
    chunk_rows: int,
    ignored: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(vocab, width).to(dtype)
    targets = torch.randint(vocab, (rows,))
    index = torch.arange(rows)
    is_ignored = {
        "none": index < 0,
        "some": torch.rand(rows) < 0.5,
        "first chunk": index < chunk_rows,
        "all except the last": index < rows - 1,
        "all": index >= 0,
    }[ignored]
    targets[is_ignored] = IGNORE_INDEX

    def fused_loss(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, softcap)

    def torch_loss(x: Tensor, weight: Tensor) -> Tensor:
        logits = x.float() @ weight.float().T
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ROWS_OF_CHUNK, lambda *_: chunk_rows)
        loss, grad_x, grad_weight = loss_and_gradients(fused_loss, x, weight)
    assert grad_x.dtype == grad_weight.dtype == dtype
    assert not grad_x[is_ignored].any()
    if is_ignored.all():
        assert loss == 0 and not grad_weight.any()
        return
    # In bfloat16 the logits and their gradient are rounded before they are multiplied.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for result, expected in zip((loss, grad_x, grad_weight), loss_and_gradients(torch_loss, x, weight), strict=True):
        assert (result - expected).norm() <= tolerance * (expected.norm() + 1)


@examples(40)
@given(seed=st.integers(0, 99), parts=st.integers(1, 6), ignored_share=st.sampled_from([0.0, 0.2, 0.9, 1.0]))
def test_micro_batches_weighted_by_counted_targets_equal_the_batch(seed: int, parts: int, ignored_share: float) -> None:
    torch.manual_seed(seed)
    x, weight, targets = torch.randn(24, 8), torch.randn(31, 8), torch.randint(31, (24,))
    targets[torch.rand(24) < ignored_share] = IGNORE_INDEX
    counted = (targets != IGNORE_INDEX).sum().clamp(min=1)

    def loss_in_parts(x: Tensor, weight: Tensor) -> Tensor:
        losses = [
            linear_cross_entropy(part, weight, part_targets) * ((part_targets != IGNORE_INDEX).sum() / counted)
            for part, part_targets in zip(x.chunk(parts), targets.chunk(parts), strict=True)
        ]
        return torch.stack(losses).sum()

    def whole_loss(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets)

    torch.testing.assert_close(loss_and_gradients(loss_in_parts, x, weight), loss_and_gradients(whole_loss, x, weight))


def test_large_logits_do_not_overflow() -> None:
    x, weight = torch.tensor([[1e4]], requires_grad=True), torch.tensor([[1.0], [-1.0]])
    loss = linear_cross_entropy(x, weight, torch.tensor([1]))
    assert loss.item() == 2e4
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.item() == 2.0


def test_no_gradient_is_computed_under_no_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    x, targets = torch.randn(70, 8), torch.randint(9, (70,))
    weight = torch.randn(9, 8, requires_grad=True)
    monkeypatch.setattr(
        "lm.model.ops.cross_entropy.linear_weight_grad", lambda *_: pytest.fail("a gradient was computed")
    )
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, targets)
    torch.testing.assert_close(loss, F.cross_entropy(x @ weight.T, targets))
    assert not loss.requires_grad


@examples(40)
@given(
    rows=row_counts,
    vocab=widths,
    softcap=st.sampled_from([0.0, 2.0]),
    has_ignored=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_form_for_compiled_kernels_of_gpus_equals_the_other(
    rows: int, vocab: int, softcap: float, has_ignored: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = 10 * torch.randn(rows, vocab, dtype=torch.float64)
    targets = torch.randint(vocab, (rows, 1))
    ignored = torch.rand(rows, 1) < (0.5 if has_ignored else 0)
    expected = _softmax_in_place(logits.clone(), targets, ignored, softcap, needs_grad=True)
    found = _softmax_to_compile(logits, targets, ignored, softcap, needs_grad=True)
    torch.testing.assert_close(found, expected)
