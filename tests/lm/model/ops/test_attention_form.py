"""All forms of causal attention compute the same, and a trainer uses the form of its execution settings."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from lm.common.execution import AttentionForm
from lm.model.ops.attention_form import choose_attention, flash_attention, reference_attention
from tests.helpers.tensors import assert_equal_with_gradients
from tests.helpers.training import small_trainer


@pytest.mark.parametrize("form", get_args(AttentionForm))
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_each_form_equals_the_reference(form: AttentionForm, kv_heads: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 8).transpose(1, 2) for heads in (4, kv_heads, kv_heads))
    assert_equal_with_gradients(choose_attention(form, torch.device("cpu")), reference_attention, q, k, v)


def test_trainer_uses_the_form_of_the_execution_settings(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path / "auto")
    flash_trainer = small_trainer(tmp_path / "flash", attention="flash")
    assert flash_trainer.model.attention_function is flash_attention
    batch = trainer.objective.micro_batches(0)
    for each in (trainer, flash_trainer):
        each.train_step(batch, lr=0.01)
    for weight, flash_weight in zip(trainer.model.parameters(), flash_trainer.model.parameters(), strict=True):
        torch.testing.assert_close(flash_weight, weight, rtol=1e-3, atol=1e-4)


def test_flash_attention_runs_in_bfloat16_under_autocast(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, attention="flash", precision="bfloat16")
    loss, _, _ = trainer.train_step(trainer.objective.micro_batches(0), lr=0.01)
    assert torch.isfinite(loss)
