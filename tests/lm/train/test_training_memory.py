"""The predicted peak of memory equals the measured one."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lm.common.execution import Execution, ParallelKind
from lm.model.config import ModelConfig, MoEConfig
from lm.train.config import TrainConfig
from lm.train.training_memory import TrainingMemory, largest_micro_batch, predict_training_memory
from tests.helpers.ranks import run_ranks
from tests.helpers.training_memory import Case, measure_peak

QUICK_CASES: list[dict[str, Any]] = [{}, {"adapter": {"rank": 8}}]
SLOW_CASES: list[dict[str, Any]] = [
    {"is_bfloat16": True},
    {"has_checkpointing": True, "average_tail": 0.1},
    {"vocab_size": 4096, "sequences": 4, "optimizer": "muon"},
    {"model": {"tied_embeddings": True}, "vocab_size": 2000, "sequences": 2},
    {"model": {"moe": {"num_experts": 8}}, "sequences": 16},
    {"adapter": {"rank": 64, "dtype": "nf4"}, "has_checkpointing": True, "model": {"num_layers": 12}},
    {"adapter": {"rank": 16, "dtype": "bfloat16"}, "sequences": 2, "model": {"d_model": 256, "d_ff": 704}},
    {"adapter": {"rank": 4, "dropout": 0.1, "dtype": "nf4"}, "is_bfloat16": True},
    {"adapter": {"rank": 4, "targets": ["q_proj", "v_proj"], "dropout": 0.1}, "sequences": 16},
    {"gradient_accumulation_steps": 2},
    {"vocab_size": 4096, "sequences": 1},
    {"model": {"num_layers": 12}, "vocab_size": 300, "sequences": 2},
    {"model": {"num_layers": 8}, "sequences": 1, "optimizer": "muon"},
    {"model": {"num_kv_heads": 1, "feed_forward": "relu2", "head_dim": 96, "qk_norm": True}},
    {"model": {"norm_placement": "none"}, "is_bfloat16": True},
    {"model": {"moe": {"num_experts": 8, "num_shared_experts": 1}}, "is_bfloat16": True},
    {
        "model": {"moe": {"num_experts": 8, "num_dense_layers": 1, "num_shared_experts": 1}},
        "has_checkpointing": True,
        "optimizer": "muon",
    },
    {"model": {"norm_placement": "sandwich", "feed_forward": "geglu", "zero_centered_norm": True}},
    {"model": {"value_residual": True}, "is_bfloat16": True},
    {"model": {"norm_placement": "output", "qk_norm": True, "qk_norm_per_head": False}, "is_bfloat16": True},
    {"model": {"sliding_window": 64, "context_length": 512}, "sequences": 1},
    {"model": {"attention_softcap": 20.0}},
    {"model": {"attention_softcap": 20.0, "sliding_window": 32}, "is_bfloat16": True},
    {"model": {"multipliers": {"embedding": 2.0, "attention": 0.1, "residual": 0.5, "logits_divisor": 2.0}}},
    {"model": {"qk_norm": True}, "optimizer": "muon", "is_bfloat16": True, "has_checkpointing": True},
    {"model": {"d_model": 256, "d_ff": 704}, "vocab_size": 4096, "sequences": 4, "is_bfloat16": True},
    {"adapter": {"rank": 8}, "is_bfloat16": True},
    {"adapter": {"rank": 8}, "is_bfloat16": True, "has_checkpointing": True},
    {"adapter": {"rank": 8, "dtype": "bfloat16"}, "is_bfloat16": True, "has_checkpointing": True},
    {"adapter": {"rank": 4}, "model": {"moe": {"num_experts": 8}}},
    {"adapter": {"rank": 4, "dtype": "nf4"}, "model": {"moe": {"num_experts": 8, "num_shared_experts": 1}}},
    {"adapter": {"rank": 4}, "model": {"qk_norm": True, "feed_forward": "relu2", "norm_placement": "none"}},
    {"adapter": {"rank": 16}, "optimizer": "muon"},
    {"optimizer": "normuon"},
    {"optimizer": "soap_muon", "is_bfloat16": True},
]


@pytest.mark.parametrize(
    "fields", [*QUICK_CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)], ids=str
)
def test_the_peak_of_one_process(fields: dict[str, Any]) -> None:
    case = Case(**fields)
    assert case.predict_peak() == pytest.approx(measure_peak(case), rel=0.1)


def test_a_dense_block_beside_a_block_of_experts_needs_no_less() -> None:
    """Gathered weights have the size of the largest block."""
    moe = MoEConfig(num_experts=64, d_expert=64)
    alone = ModelConfig(300, 16, d_model=64, num_layers=1, num_heads=2, d_ff=128, moe=moe)
    beside = replace(alone, num_layers=2, moe=replace(moe, num_dense_layers=1))
    peaks = [
        predict_training_memory(1, Execution(), TrainConfig(), config, "fsdp", 4, "cpu").peak
        for config in (alone, beside)
    ]
    assert peaks[0] <= peaks[1] < 1.2 * peaks[0]


@pytest.mark.parametrize("fields", [{}, {"is_bfloat16": True, "optimizer": "muon"}, {"has_checkpointing": True}])
def test_the_largest_micro_batch_fits_and_one_more_sequence_does_not(fields: dict[str, Any]) -> None:
    def predict(sequences: int) -> TrainingMemory:
        return Case(sequences=sequences, **fields).predict(1)

    peaks = [predict(sequences).peak for sequences in range(1, 70)]
    assert peaks == sorted(peaks)
    assert largest_micro_batch(peaks[0] - 1, predict) == 0
    for available in (*peaks[:-1], *(peak - 1 for peak in peaks)):
        assert largest_micro_batch(available, predict) == sum(peak <= available for peak in peaks)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_peak_of_a_divided_training(tmp_path: Path, world_size: int) -> None:
    """Of the rank with the lowest peak: gloo may hold a buffer for longer in the others."""
    kinds: list[ParallelKind] = ["ddp", "zero1", "zero2", "fsdp"]
    options: list[dict[str, Any]] = [
        {},
        {"vocab_size": 4096, "sequences": 2, "optimizer": "muon"},
        {"model": {"num_layers": 8}, "sequences": 1},
        {"model": {"num_layers": 8}, "sequences": 1, "has_checkpointing": True},
        {"is_bfloat16": True},
        {"model": {"num_layers": 8}, "sequences": 1, "is_bfloat16": True},
        {"adapter": {"rank": 8}},
        {"adapter": {"rank": 64}, "model": {"num_layers": 8}, "sequences": 1, "has_checkpointing": True},
        {"adapter": {"rank": 8, "dtype": "bfloat16"}, "vocab_size": 4096, "sequences": 2},
        {"adapter": {"rank": 8, "dtype": "nf4"}, "vocab_size": 2000, "sequences": 2, "has_checkpointing": True},
        {"adapter": {"rank": 16}, "model": {"num_layers": 8}, "sequences": 1, "is_bfloat16": True},
    ]
    cases = [Case(kind, **fields) for kind in kinds for fields in options]
    (tmp_path / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    run_ranks("tests.helpers.training_memory", tmp_path, world_size=world_size)
    peaks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world_size)]
    for case, *measured in zip(cases, *peaks, strict=True):
        assert case.predict_peak(world_size) == pytest.approx(min(measured), rel=0.1), case
