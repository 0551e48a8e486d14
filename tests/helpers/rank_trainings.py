"""Small trainings of two ranks. ``main``, which ``run_ranks`` calls, is one rank of a case."""

import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lm.checkpoint.training_checkpoint import ROW_FILES, save_training
from lm.common.errors import UserError
from lm.common.execution import Execution
from lm.distributed import FSDP
from lm.model.transformer import TransformerLM
from lm.train.pretraining import make_trainer
from lm.train.trainer import Trainer
from lm.train.training_job import lock_directory
from tests.helpers.ranks import rank_of_test
from tests.helpers.training import MODEL, small_data, small_trainer, train_config

_SETTINGS: dict[str, Any] = {
    "steps": 8,
    "checkpoint_interval": 3,
    "eval_interval": 4,
    "optimizer": "muon",
    "sample_prompts": [],
}
_SHORT_TIMEOUT_SECONDS = 5.0


class _Killed(Exception):
    pass


def _train_interrupted(out: Path, **settings: Any) -> Trainer:
    def end(step: int) -> None:
        if step == 7:
            raise _Killed

    try:
        small_trainer(out, **settings).run(end)
    except _Killed:
        trainer = small_trainer(out, **settings)
    assert trainer.resume(out) and trainer.step == 6
    trainer.run()
    return trainer


def resume_without_a_shared_directory(directory: Path, rank: int) -> None:
    """Save the weights of an interrupted and of an uninterrupted training whose ranks have directories of their own."""
    interrupted = _train_interrupted(directory / f"interrupted-{rank}", **_SETTINGS)
    whole = small_trainer(directory / f"whole-{rank}", **_SETTINGS)
    whole.run()
    for name, trainer in (("interrupted", interrupted), ("whole", whole)):
        torch.save(trainer.model.state_dict(), directory / f"{name}-{rank}.pt")
    assert not rank or not {path.name for path in interrupted.out.iterdir()} & {"step-0000006", *ROW_FILES}


def resume_with_whole_vectors(directory: Path, rank: int) -> None:
    """Compare the shards and the optimizers' states of an interrupted and of an uninterrupted training."""
    model = replace(MODEL, qkv_bias=True)
    for kind, optimizer in (("fsdp", "adamw"), ("fsdp", "muon"), ("zero2", "muon")):
        settings = {**_SETTINGS, "optimizer": optimizer, "model": model}
        with patch("lm.train.trainer.choose_parallel", lambda *_, kind=kind: kind):
            interrupted = _train_interrupted(directory / f"{kind}-{optimizer}", **settings)
            whole = small_trainer(directory / f"{kind}-{optimizer}-whole", **settings)
            whole.run()
        for ours, others in zip(interrupted.optimizers, whole.optimizers, strict=True):
            torch.testing.assert_close(ours.state_dict()["state"], others.state_dict()["state"], rtol=0, atol=0)
        for (name, p), other in zip(interrupted.model.named_parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(p, other), f"{name} of {kind}"
            assert p.ndim > 1 or p.shape == dict(TransformerLM(model).named_parameters())[name].shape
    (directory / f"{rank}.done").touch()


class _Scaled(torch.nn.Module):
    """A linear map with a bias, and a scale without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 5)
        self.norm = torch.nn.LayerNorm(5)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.scale


def average_gradients_of_vectors(directory: Path, rank: int) -> None:
    """Each rank has the whole gradients of vectors and scalars: the mean of those that the ranks compute alone."""
    for compute_dtype, is_resharded in product((None, torch.bfloat16), (True, False)):
        for make in (_Scaled, lambda: TransformerLM(replace(MODEL, qkv_bias=True))):
            torch.manual_seed(0)
            module, alone = make(), make()
            alone.load_state_dict(module.state_dict())
            fsdp = FSDP(module, compute_dtype, is_resharded_after_forward=is_resharded)
            torch.manual_seed(1 + rank)
            x = torch.randn(3, 6) if make is _Scaled else torch.randint(256, (3, 16))
            for model in (fsdp, alone):
                for part in x.split(2):  # two micro-batches
                    with fsdp.no_sync() if model is fsdp and len(part) == 2 else nullcontext():
                        model(part).float().sin().sum().backward()
            fsdp.finish_gradient_synchronization()
            vectors = {name: p for name, p in module.named_parameters() if p.ndim < 2}
            assert vectors
            for name, p in alone.named_parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad)
                if name in vectors:
                    grad = vectors[name].grad
                    assert grad is not None and vectors[name].shape == p.shape, name
                    mean, tolerance = p.grad / dist.get_world_size(), 1e-5 if compute_dtype is None else 0.05
                    torch.testing.assert_close(
                        grad, mean, rtol=tolerance, atol=tolerance * float(mean.abs().max()), msg=name
                    )
                    of_rank0 = grad.clone()
                    dist.broadcast(of_rank0, 0)
                    assert torch.equal(grad, of_rank0), name
    (directory / f"{rank}.done").touch()


def start_with_the_weights_of_one_process(directory: Path, rank: int) -> None:
    """The initial weights of a divided training are those of a model that is drawn at once, or of a checkpoint."""
    config, data = replace(MODEL, zero_init_residual=True), small_data()
    torch.manual_seed(7)
    saved = TransformerLM(config)
    if not rank:
        save_training(directory / "start", saved, [], 0, {})
    dist.barrier()
    train, execution = train_config(**_SETTINGS), Execution(threads=1, device="cpu", compile=False)
    torch.manual_seed(train.seed)
    drawn = TransformerLM(config)
    for kind, (start, model) in product(("ddp", "zero2", "fsdp"), ((None, drawn), (directory / "start", saved))):
        with patch("lm.train.trainer.choose_parallel", lambda *_, kind=kind: kind):
            trainer = make_trainer(train, config, data, execution, directory / "out", start=start)
        expected = dict(model.named_parameters())
        for name, weight in trainer.parallel.iterate_full_weights():
            assert torch.equal(weight, expected[name]), f"{name} of {kind} from {start}"
        held = sum(p.untyped_storage().nbytes() for p in trainer.model.parameters())
        assert kind == "ddp" or held < 0.6 * sum(p.nbytes for p in expected.values())
    (directory / f"{rank}.done").touch()


def refuse_a_locked_directory(directory: Path, rank: int) -> None:
    """All ranks raise, and the first training keeps its lock."""
    with lock_directory(directory / "out"):
        for _ in range(2):
            try:
                with lock_directory(directory / "out"):
                    raise AssertionError("two trainings in one directory")
            except UserError as error:
                assert "Another program is training in" in str(error)
    with lock_directory(directory / "out"):
        (directory / f"{rank}.done").touch()


def let_rank0_work_alone(directory: Path, rank: int) -> None:
    """Rank 0 saves once and samples once for longer than the timeout of collectives."""
    trainer = small_trainer(directory / "out", **_SETTINGS | {"sample_prompts": ["a"]})
    save, sample = trainer.save, trainer.objective.sample
    waits: list[str] = []

    def wait(what: str) -> None:
        if not rank and what not in waits:
            time.sleep(_SHORT_TIMEOUT_SECONDS + 3)
        waits.append(what)

    def wait_and_save() -> None:
        wait("save")
        save()

    def wait_and_sample(model: Any) -> Any:
        wait("sample")
        return sample(model)

    with patch.multiple(trainer, save=wait_and_save), patch.multiple(trainer.objective, sample=wait_and_sample):
        trainer.run()
    assert rank or {"save", "sample"} == set(waits)
    (directory / f"{rank}.done").touch()


def main() -> None:
    directory, case = Path(sys.argv[1]), globals()[sys.argv[2]]
    if case is let_rank0_work_alone:
        timeout = timedelta(seconds=_SHORT_TIMEOUT_SECONDS)
        dist.init_process_group = partial(dist.init_process_group, timeout=timeout)
    with rank_of_test() as rank:
        case(directory, rank)
