"""A training on CPUs that does not fit into memory is refused before the model is made."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lm.common.errors import UserError
from lm.common.execution import Execution
from lm.model.config import ModelConfig
from lm.train.training_memory import check_memory
from tests.helpers.training import MODEL, small_trainer, train_config

CPU = torch.device("cpu")
HUGE = ModelConfig(vocab_size=10_000, context_length=256, d_model=16_384, num_layers=48, num_heads=16, d_ff=65_536)


@pytest.fixture(autouse=True)
def sixteen_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.train.training_memory.machine_memory", lambda: 16 << 30)


def test_a_model_that_is_too_large_is_refused_with_the_fields_to_change(tmp_path: Path) -> None:
    message = r"needs about [\d,.]+ GiB.*13\.6 GiB are available.*model\.d_model \(now 16,384\).*check_memory to false"
    with pytest.raises(UserError, match=message):
        check_memory(Execution(), train_config(), HUGE, CPU, 1)
    with pytest.raises(UserError, match=message):  # a training by hand, before 800 GB are allocated
        small_trainer(tmp_path, model=HUGE)


def test_a_batch_that_is_too_large_is_refused_with_other_fields() -> None:
    config, model = train_config(batch_size=65_536), replace(MODEL, context_length=1024)
    with pytest.raises(UserError, match=r"Raise train\.gradient_accumulation_steps \(now 1\)"):
        check_memory(Execution(), config, model, CPU, 1)
    check_memory(Execution(), replace(config, gradient_accumulation_steps=65_536), model, CPU, 1)


def test_processes_share_the_memory() -> None:
    model = replace(HUGE, num_layers=1, d_model=6144, d_ff=24_576)
    check_memory(Execution(), train_config(), model, CPU, 1)
    with pytest.raises(UserError, match=r"3\.4 GiB are available"):
        check_memory(Execution(parallel="ddp"), train_config(), model, CPU, 4)


def test_the_check_can_be_turned_off_and_is_for_cpus() -> None:
    check_memory(Execution(check_memory=False), train_config(), HUGE, CPU, 1)
    check_memory(Execution(), train_config(), HUGE, torch.device("cuda"), 1)
