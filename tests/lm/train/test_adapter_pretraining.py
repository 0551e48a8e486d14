"""Continued pretraining of an adapter: its start, another context, resuming, and bases of fewer bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint.safe_load import map_safetensors, read_safetensors
from lm.checkpoint.training_checkpoint import load_model, save_training
from lm.common.errors import UserError
from lm.model.adapter import adapted_layers
from lm.model.config import AdapterConfig
from lm.model.nf4 import NF4Linear
from lm.model.transformer import TransformerLM
from lm.train.frozen_base import load_start
from lm.train.pretraining import Job
from tests.helpers.training import MODEL, read_rows, train_here, write_job

ADAPTER = AdapterConfig(rank=2, alpha=8, dropout=0.1)
LAST = "step-0000006"


def write_adapter_job(
    directory: Path, adapter: AdapterConfig = ADAPTER, context_length: int = 16, num_layers: int = 1, **settings: Any
) -> Path:
    torch.manual_seed(3)
    model = replace(MODEL, num_layers=num_layers)
    save_training(directory / "model", TransformerLM(model), [], 0, {})
    model = replace(model, context_length=context_length)
    path = write_job(directory, model=model, **{"steps": 6, "warmup_steps": 1, "checkpoint_interval": 2, **settings})
    job = Job.read(path)
    job.adapter, job.start, job.digests = adapter, str(directory / "model"), {**job.digests, "start": "s"}
    job.write(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "nf4"])
def test_the_loaded_model_is_the_trained_one(tmp_path: Path, dtype: Any) -> None:
    job = write_adapter_job(tmp_path, replace(ADAPTER, dtype=dtype))
    train_here(Job.read(job))
    trainer = Job.read(job).make_trainer(tmp_path / "other", torch.device("cpu"))
    assert isinstance(next(iter(adapted_layers(trainer.model).values())).base, NF4Linear) == (dtype == "nf4")
    assert trainer.resume(job.parent)
    ids = torch.arange(32).view(2, 16)
    with torch.no_grad():
        trained, loaded = trainer.model.eval()(ids).float(), load_model(job.parent / LAST)(ids)
    tolerance = 0.05 if dtype == "bfloat16" else 1e-5
    torch.testing.assert_close(loaded, trained, atol=tolerance, rtol=tolerance)
    assert not torch.allclose(loaded, load_model(tmp_path / "model")(ids), atol=2e-2)


@pytest.mark.parametrize("dtype", ["float32", "nf4"])
def test_an_interrupted_training_ends_with_the_same_bytes(tmp_path: Path, dtype: Any) -> None:
    whole, job = (write_adapter_job(tmp_path / name, replace(ADAPTER, dtype=dtype)) for name in ("a", "b"))
    train_here(Job.read(whole))

    def interrupt(step: int) -> None:
        if step == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_here(Job.read(job), interrupt)
    train_here(Job.read(job))
    for name in ("adapter.safetensors", "optimizer.pt", "checkpoint.json"):
        assert (job.parent / LAST / name).read_bytes() == (whole.parent / LAST / name).read_bytes()
    assert read_rows(job.parent) == read_rows(whole.parent)


def test_the_context_may_be_longer_than_the_bases(tmp_path: Path) -> None:
    job = write_adapter_job(tmp_path, context_length=24)
    train_here(Job.read(job))
    assert load_model(job.parent / LAST).config.context_length == 24


def test_a_new_model_has_no_adapter(tmp_path: Path) -> None:
    path = write_adapter_job(tmp_path)
    job = Job.read(path)
    job.start = ""
    with pytest.raises(UserError, match=r"adapter\.rank is set: an adapter needs a model to adapt"):
        train_here(job)


def test_a_mapped_base_is_the_base(tmp_path: Path) -> None:
    write_adapter_job(tmp_path)
    path = tmp_path / "model" / "model.safetensors"
    mapped, whole = map_safetensors(path), read_safetensors(path)
    assert mapped.keys() == whole.keys() and all(torch.equal(mapped[name], whole[name]) for name in whole)
    model = load_start(tmp_path / "model", torch.device("cpu"), replace(ADAPTER, dtype="nf4"))
    for name, tensor in load_model(tmp_path / "model").state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_a_base_with_nan_is_refused(tmp_path: Path) -> None:
    path = write_adapter_job(tmp_path, replace(ADAPTER, dtype="nf4"))
    model = TransformerLM(MODEL)
    with torch.no_grad():
        model.state_dict()["layers.0.ffn.w1.weight"][0, 0] = torch.nan
    save_training(tmp_path / "model", model, [], 0, {})
    with pytest.raises(UserError, match="holds numbers that are not finite"):
        train_here(Job.read(path))
