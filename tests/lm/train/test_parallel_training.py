"""The trainer in processes that divide weights and state: its losses, and its checkpoints, which any other reads."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from lm.checkpoint.peft import read_stored_adapter
from lm.checkpoint.training_checkpoint import ROW_FILES, load_model
from lm.common.errors import UserError
from lm.common.execution import Execution, ParallelKind
from lm.model.config import AdapterConfig, MoEConfig
from lm.train.adapter_memory import predict_adapter_memory
from lm.train.frozen_base import FrozenBase, load_beside
from lm.train.pretraining import Job
from lm.train.training_memory import TrainingMemory, check_memory, choose_parallel, predict_training_memory
from tests.helpers.ranks import run_ranks
from tests.helpers.training import MODEL, read_rows, train_config, train_here, write_job
from tests.lm.train.test_adapter_pretraining import write_adapter_job

OPTIONS: dict[str, Any] = {
    "steps": 12,
    "max_lr": 1e-3,  # Muon rounds its updates to bfloat16
    "min_lr": 1e-4,
    "optimizer": "muon",
    "eval_interval": 4,
    "checkpoint_interval": 4,
    "keep_checkpoints": 3,
    "sample_prompts": ["a"],
    "average_tail": 0.5,
}


def run_job(
    job: Path, parallel: ParallelKind | Literal["auto"], processes: int, tensor_parallel: int = 1, last: int = 0
) -> None:
    """Train; with ``last``, all processes are killed after that step."""
    content = json.loads(job.read_text())
    content["execution"] |= {"parallel": parallel, "tensor_parallel": tensor_parallel}
    job.write_text(json.dumps(content))
    if processes == 1:
        train_here(Job.read(job))
    else:
        argument = f"{job}@{last}" if last else str(job)
        run_ranks("tests.helpers.rank_jobs", job.parent.parent, argument, world_size=processes)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training in one process."""
    job = write_job(tmp_path_factory.mktemp("expected"), **OPTIONS)
    train_here(Job.read(job))
    return job.parent


def check_training(out: Path, expected: Path) -> None:
    rows, expected_rows = read_rows(out), read_rows(expected)
    assert len(rows) == OPTIONS["steps"]
    for name in ("loss", "valid_loss", "grad_norm"):
        values = [row[name] for row in rows if name in row]
        assert values == pytest.approx([row[name] for row in expected_rows if name in row], rel=1e-4)
    assert [row["text"] for row in read_rows(out, "samples.jsonl")]
    for checkpoint in ("step-0000012", "average"):
        weights = load_model(expected / checkpoint).state_dict()
        for name, tensor in load_model(out / checkpoint).state_dict().items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "divisions",
    [
        [("fsdp", 4), ("zero1", 2), ("none", 1)],
        pytest.param([("zero2", 2), ("fsdp", 2), ("ddp", 2)], marks=pytest.mark.long),
        pytest.param([("none", 1), ("fsdp", 2), ("zero1", 4)], marks=pytest.mark.long),
    ],
)
def test_a_training_goes_on_with_another_division(
    tmp_path: Path, expected: Path, divisions: list[tuple[ParallelKind, int]]
) -> None:
    """Each division trains four steps, from the checkpoint of the one before."""
    job = write_job(tmp_path, **OPTIONS)
    train_in_divisions(job, divisions)
    check_training(job.parent, expected)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["normuon", "soap_muon"])
def test_state_of_other_shapes_than_the_weights_goes_on_with_another_division(tmp_path: Path, optimizer: str) -> None:
    """Twelve steps in three divisions have the loss of twelve steps in one process."""
    options = OPTIONS | {"optimizer": optimizer, "precision": "float32"}
    whole, job, tensor = (write_job(tmp_path / name, **options) for name in ("whole", "divided", "tensor"))
    train_here(Job.read(whole))
    train_in_divisions(job, [("zero1", 2), ("none", 1), ("fsdp", 2)])
    for number, tensor_parallel in enumerate((2, 1, 2), start=1):
        run_job(tensor, "auto" if tensor_parallel > 1 else "none", tensor_parallel, tensor_parallel)
        if number < 3:
            undo_after(tensor.parent, number)
    losses = [
        [row["valid_loss"] for row in read_rows(path.parent) if "valid_loss" in row] for path in (whole, job, tensor)
    ]
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-3)] * 2


def train_in_divisions(job: Path, divisions: list[tuple[ParallelKind, int]]) -> None:
    for number, (parallel, processes) in enumerate(divisions, start=1):
        run_job(job, parallel, processes)
        check_parts(job.parent, number, processes if parallel not in ("none", "ddp") else 1)
        if number < len(divisions):
            undo_after(job.parent, number)


ADAPTER = AdapterConfig(rank=3, alpha=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "divisions"),
    [
        ("nf4", [("fsdp", 2), ("none", 1), ("zero2", 2)]),
        ("float32", [("none", 1), ("fsdp", 4), ("zero1", 2)]),
        pytest.param("float32", [("zero2", 4), ("ddp", 2), ("fsdp", 2)], marks=pytest.mark.long),
    ],
)
def test_a_training_of_an_adapter_goes_on_with_another_division(
    tmp_path: Path, dtype: Any, divisions: list[tuple[ParallelKind, int]]
) -> None:
    """Its checkpoints hold the adapter alone, which may have fewer rows than there are processes."""
    adapter = replace(ADAPTER, dtype=dtype)
    expected, job = (write_adapter_job(tmp_path / n, adapter, num_layers=2, **OPTIONS) for n in ("one", "many"))
    train_here(Job.read(expected))
    train_in_divisions(job, divisions)
    check_training(job.parent, expected.parent)
    samples, expected_samples = (read_rows(out, "samples.jsonl") for out in (job.parent, expected.parent))
    assert samples == expected_samples
    for number, (parallel, processes) in enumerate(divisions, start=1):
        directory = job.parent / f"step-{4 * number:07d}"
        parts = processes if parallel in ("zero2", "fsdp") else 1
        weights = [load_file(path) for path in sorted(directory.glob("adapter[.-]*safetensors"))]
        assert len(weights) == parts and not [*directory.glob("model*")]
        stored = read_stored_adapter(directory)
        assert stored is not None and all(len(part) == 2 * len(stored.layers) == 2 * 2 * 7 for part in weights)
        for name, (a, b, _) in stored.layers.items():
            assert torch.equal(a, torch.cat([part[f"{name}.lora_A"] for part in weights]))
            assert torch.equal(b, torch.cat([part[f"{name}.lora_B"] for part in weights]))


@pytest.mark.slow
def test_a_divided_adapter_is_a_teacher_over_the_same_base(tmp_path: Path) -> None:
    job = write_adapter_job(tmp_path, ADAPTER, num_layers=2, steps=2)
    run_job(job, "fsdp", 2)
    model = load_model(tmp_path / "model").train()
    frozen = FrozenBase.adapt(model, tmp_path / "model", ADAPTER, 1e-3)
    checkpoint, ids = job.parent / "step-0000002", torch.arange(32).view(2, 16)
    teacher = load_beside(checkpoint, model, frozen)
    assert teacher.head_weight is model.head_weight
    torch.testing.assert_close(teacher(ids), load_model(checkpoint)(ids), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "dtype"), [("fsdp", "float32"), ("zero2", "bfloat16"), ("fsdp", "nf4")])
def test_a_killed_training_of_a_divided_adapter_ends_with_the_same_bytes(
    tmp_path: Path, parallel: ParallelKind, dtype: Any
) -> None:
    adapter = replace(ADAPTER, dtype=dtype, dropout=0.1)
    options = OPTIONS | {"optimizer": "adamw", "max_lr": 1e-2}
    whole, job = (write_adapter_job(tmp_path / name, adapter, num_layers=2, **options) for name in ("a", "b"))
    run_job(whole, parallel, 2)
    with pytest.raises(AssertionError, match=r"exit codes \[-9, -9\]"):
        run_job(job, parallel, 2, last=7)
    assert not (job.parent / "training.json").exists()
    run_job(job, parallel, 2)
    last = whole.parent / "step-0000012"
    names = [path.name for path in last.iterdir()]
    assert len(names) == 5
    for name in names:
        assert (job.parent / last.name / name).read_bytes() == (last / name).read_bytes(), name
    assert [read_rows(job.parent, name) for name in ROW_FILES[:2]] == [read_rows(last.parent, n) for n in ROW_FILES[:2]]


TENSOR_OPTIONS = OPTIONS | {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
TENSOR_MODEL = replace(MODEL, num_heads=4, num_kv_heads=2, qk_norm=True, qkv_bias=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_tied", "divisions"),
    [
        (True, [("auto", 2, 2), ("none", 1, 1), ("auto", 4, 2)]),
        pytest.param(False, [("fsdp", 2, 1), ("ddp", 4, 2), ("zero1", 2, 1)], marks=pytest.mark.long),
        pytest.param(False, [("none", 1, 1), ("none", 2, 2), ("ddp", 2, 1)], marks=pytest.mark.long),
    ],
)
def test_a_training_goes_on_with_another_tensor_parallelism(
    tmp_path: Path, is_tied: bool, divisions: list[tuple[ParallelKind, int, int]]
) -> None:
    """Of the four processes with a tensor parallelism of 2, two pairs divide the batch."""
    model = replace(TENSOR_MODEL, tied_embeddings=is_tied)
    expected, job = (write_job(tmp_path / name, model=model, **TENSOR_OPTIONS) for name in ("expected", "divided"))
    train_here(Job.read(expected))
    for number, (parallel, processes, tensor_parallel) in enumerate(divisions, start=1):
        run_job(job, parallel, processes, tensor_parallel)
        is_sharded = tensor_parallel > 1 or parallel in ("zero1", "fsdp")
        check_parts(job.parent, number, processes if is_sharded else 1)
        if number < len(divisions):
            undo_after(job.parent, number)
    check_training(job.parent, expected.parent)


def check_parts(out: Path, number: int, parts: int) -> None:
    """Check in how many parts the checkpoint of a division was saved."""
    names = {path.name for path in (out / f"step-{4 * number:07d}").iterdir()}
    assert ("optimizer.pt" if parts == 1 else f"optimizer-{parts}-of-{parts}.pt") in names


def undo_after(out: Path, number: int) -> None:
    """Make the training as it was after the steps of a division."""
    (out / "training.json").unlink()
    for later in range(number + 1, 4):
        shutil.rmtree(out / f"step-{4 * later:07d}")


@pytest.mark.parametrize(
    ("processes", "options", "message"),
    [
        (
            1,
            {},
            r"tensor_parallel is 2, and the training has 1 process; set execution\.processes, .* to a multiple of 2",
        ),
        (3, {}, "tensor_parallel is 2, and the training has 3 processes"),
        (2, {"parallel": "fsdp"}, r"execution\.parallel is fsdp: it cannot divide further.*set it to auto or ddp"),
        (4, {"parallel": "zero1"}, r"execution\.parallel is zero1: it cannot divide further"),
        (2, {"d_ff": 63}, r"model\.d_ff 63 cannot be divided among 2 processes"),
        (2, {"num_kv_heads": 1}, r"model\.num_kv_heads 1 cannot be divided among 2 processes"),
        (2, {"moe": MoEConfig()}, r"model\.moe cannot be divided by tensor parallelism"),
    ],
)
def test_what_tensor_parallelism_cannot_divide_is_refused_before_the_model_is_made(
    processes: int, options: dict[str, Any], message: str
) -> None:
    execution = Execution(tensor_parallel=2, parallel=options.pop("parallel", "auto"))
    with pytest.raises(UserError, match=message):
        check_memory(execution, train_config(), replace(MODEL, **options), torch.device("cuda"), processes)


def test_one_process_with_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tensor_parallel is 2, and the training has 1 process;"):
        train_here(Job.read(write_job(tmp_path, tensor_parallel=2)))


def test_a_process_predicts_the_memory_of_its_part_of_the_model() -> None:
    def predict(tensor_parallel: int) -> TrainingMemory:
        model, execution = replace(DEEP_MODEL, vocab_size=4096), Execution(tensor_parallel=tensor_parallel)
        return predict_training_memory(1, execution, train_config(), model, "none", 1, "cpu")

    whole, part = predict(1), predict(2)
    assert whole.weights / 2 < part.weights < 0.51 * whole.weights  # norms are whole
    assert part.optimizer_state == 2 * part.weights and whole.peak / 2 < part.peak < 0.6 * whole.peak


@pytest.mark.long
def test_fsdp_in_two_processes_trains_evaluates_and_samples(tmp_path: Path, expected: Path) -> None:
    """The five windows of the evaluation do not divide by two."""
    job = write_job(tmp_path, gradient_accumulation_steps=2, **OPTIONS)
    run_job(job, "fsdp", 2)
    check_training(job.parent, expected)


DEEP_MODEL = replace(MODEL, num_layers=16)  # the memory of each kind is less than that of the kind before


def choose(
    monkeypatch: pytest.MonkeyPatch,
    parallel: Literal["auto"] | ParallelKind,
    processes: int,
    adapter: AdapterConfig | None = None,
) -> ParallelKind:
    monkeypatch.setattr("lm.train.training_memory.get_world_size", lambda: processes)
    return choose_parallel(Execution(parallel=parallel), train_config(), DEEP_MODEL, torch.device("cpu"), adapter)


def test_several_processes_divide_something(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, "zero1", 2) == "zero1" and choose(monkeypatch, "fsdp", 1) == "none"
    with pytest.raises(UserError, match=r"execution\.parallel none trains in one process, and 2 processes are started"):
        choose(monkeypatch, "none", 2)


@pytest.mark.parametrize("adapter", [None, ADAPTER])
def test_auto_divides_as_much_as_the_memory_requires(
    monkeypatch: pytest.MonkeyPatch, adapter: AdapterConfig | None
) -> None:
    kinds: tuple[ParallelKind, ...] = ("ddp", "zero1", "zero2", "fsdp")
    arguments = 1, Execution(), train_config(), DEEP_MODEL
    peaks = [
        predict_adapter_memory(*arguments, adapter, kind, 4, "cpu").peak
        if adapter
        else predict_training_memory(*arguments, kind, 4, "cpu").peak
        for kind in kinds
    ]
    assert min(peaks) == peaks[-1]
    for peak in (1, *peaks):
        expected = next((kind for kind, other in zip(kinds, peaks, strict=True) if other <= peak), "fsdp")
        monkeypatch.setattr("lm.train.training_memory.machine_memory", lambda peak=peak: int(peak / 0.84))
        assert choose(monkeypatch, "auto", 4, adapter) == expected


@pytest.mark.slow
def test_data_parallel_training_resumes_without_a_shared_directory(tmp_path: Path) -> None:
    """Only rank 0 has the checkpoints, and sends them to the others."""
    run_ranks("tests.helpers.rank_trainings", tmp_path, "resume_without_a_shared_directory", world_size=2)
    expected, *others = (
        torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)
        for name in ("whole", "interrupted")
        for rank in (0, 1)
    )
    for weights in others:
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_rank_0_may_save_and_sample_for_longer_than_a_collective_waits(tmp_path: Path) -> None:
    run_ranks("tests.helpers.rank_trainings", tmp_path, "let_rank0_work_alone", world_size=2)
    assert len([*tmp_path.glob("*.done")]) == 2
