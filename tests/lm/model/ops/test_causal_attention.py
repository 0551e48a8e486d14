"""All backends of causal attention equal the plain reference, forward and backward, and a trainer uses that of its
execution settings. Attention within segments: packed examples get the logits that they get alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.common.execution import AttentionForm
from lm.data.chat_template import EncodedExample
from lm.data.packing import pack_examples
from lm.model.config import ModelConfig
from lm.model.functional import scaled_dot_product_attention
from lm.model.ops.causal_attention import (
    blocked_causal_attention,
    causal_attention,
    choose_attention,
    make_segment_attention,
    reference_attention,
    sdpa_attention,
)
from lm.model.ops.flash_attention import tiled_attention
from lm.model.transformer import TransformerLM
from tests.helpers.examples import examples
from tests.helpers.tensors import FEW_EXAMPLES, assert_equal_with_gradients, random_normal, seeds, widths
from tests.helpers.training import MODEL, small_trainer


@examples(60)
@given(
    heads=st.integers(1, 5),
    length=st.integers(1, 40),
    width=widths,
    block_queries=st.sampled_from([1, 7, 256]),
    block_scores=st.sampled_from([1, 500, 1 << 19]),
    seed=st.integers(0, 99),
)
def test_blocked_attention_equals_reference(
    heads: int, length: int, width: int, block_queries: int, block_scores: int, seed: int
) -> None:
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.model.ops.causal_attention._BLOCK_QUERIES", block_queries)
        patch.setattr("lm.model.ops.causal_attention._BLOCK_SCORES", block_scores)
        assert_equal_with_gradients(
            blocked_causal_attention, reference_attention, *torch.randn(3, heads, length, width)
        )


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 70, 300])
def test_bfloat16_attention_is_as_exact_as_torch(kv_heads: int, length: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, length, n, 16, dtype=torch.bfloat16).transpose(1, 2) for n in (4, kv_heads, kv_heads))
    grad_out = torch.randn(q.shape, dtype=torch.bfloat16)

    def output_and_gradients(attention: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
        out = attention(*inputs)
        return [out, *torch.autograd.grad(out, inputs, grad_out.to(dtype))]

    results = output_and_gradients(causal_attention, torch.bfloat16)
    torch_results = output_and_gradients(sdpa_attention, torch.bfloat16)
    exact_results = output_and_gradients(reference_attention, torch.float64)
    for result, torch_result, exact in zip(results, torch_results, exact_results, strict=True):
        assert result.dtype == torch.bfloat16 and result.shape == exact.shape
        assert (result - exact).norm() < 2 * (torch_result - exact).norm() + 1e-2


@pytest.mark.slow
def test_compiled_attention_has_the_same_gradients() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 70, 16, dtype=torch.bfloat16).requires_grad_().unbind()
    eager, compiled = (attention(q, k, v) for attention in (causal_attention, torch.compile(causal_attention)))
    torch.testing.assert_close(compiled, eager)
    eager_gradients, compiled_gradients = (
        torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in (eager, compiled)
    )
    torch.testing.assert_close(compiled_gradients, eager_gradients)


@pytest.mark.parametrize("form", get_args(AttentionForm))
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_each_form_equals_the_reference(form: AttentionForm, kv_heads: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 8).transpose(1, 2) for heads in (4, kv_heads, kv_heads))
    assert_equal_with_gradients(choose_attention(form, torch.device("cpu")), reference_attention, q, k, v)


def test_trainer_uses_the_form_of_the_execution_settings(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path / "auto")
    with patch("lm.model.ops.flash_attention.tiled_attention", wraps=tiled_attention) as tiled:
        flash_trainer = small_trainer(tmp_path / "flash", attention="flash")
        batch = trainer.objective.micro_batches(0)
        for each, calls in ((trainer, 0), (flash_trainer, MODEL.num_layers)):
            each.train_step(batch, lr=0.01)
            assert tiled.call_count == calls
    for weight, flash_weight in zip(trainer.model.parameters(), flash_trainer.model.parameters(), strict=True):
        torch.testing.assert_close(flash_weight, weight, rtol=1e-3, atol=1e-4)


def test_flash_attention_runs_in_bfloat16_under_autocast(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, attention="flash", precision="bfloat16")
    loss, _, _ = trainer.train_step(trainer.objective.micro_batches(0), lr=0.01)
    assert torch.isfinite(loss)


@FEW_EXAMPLES
@given(seeds, st.lists(st.integers(0, 3), min_size=1, max_size=6), st.sampled_from([1, 2]))
def test_attention_equals_the_reference_with_loops(seed: int, segments: list[int], kv_heads: int) -> None:
    length = len(segments)
    q, k, v = (random_normal(1, heads, length, 4, seed=seed + i) for i, heads in enumerate((2, kv_heads, kv_heads)))
    out = make_segment_attention(torch.tensor([segments]))(q, k, v)
    for head in range(2):
        for t in range(length):
            seen = [s for s in range(t + 1) if segments[s] == segments[t]]
            kv = head * kv_heads // 2
            expected = scaled_dot_product_attention(q[0, head, t : t + 1], k[0, kv, seen], v[0, kv, seen])
            torch.testing.assert_close(out[0, head, t : t + 1], expected)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1}, {"qk_norm": True}])
def test_packed_examples_have_the_logits_that_they_have_alone(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=30, context_length=12, d_model=16, num_layers=2, num_heads=2, d_ff=16, **options)
    model = TransformerLM(config, dtype=torch.float64)
    texts = [list(range(1, 6)), list(range(10, 18)), [20, 21], list(range(22, 29))]
    packed = pack_examples([EncodedExample(ids, [True] * len(ids)) for ids in texts], 12)
    ids, segments = torch.from_numpy(packed.input_ids), torch.from_numpy(packed.segment_ids)
    attend = make_segment_attention(segments)
    logits = model.logits(model.hidden_states(ids, torch.from_numpy(packed.positions), [attend] * config.num_layers))
    found = 0
    for row in range(len(ids)):
        for segment in range(1, int(segments[row].max()) + 1):
            place = segments[row] == segment
            torch.testing.assert_close(logits[row, place], model(ids[row, place][None])[0])
            found += 1
    assert found == len(texts) and len(ids) == 2
