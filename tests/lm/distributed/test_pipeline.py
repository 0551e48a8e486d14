"""A training with pipeline parallelism equals the training in one process."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lm.common.errors import UserError
from lm.distributed import PipelineParallel
from lm.distributed.pipeline_parallel import divide_layers
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from tests.helpers.model_parallel import Case, check_cases

_SMALL: dict[str, Any] = {"d_model": 32, "num_heads": 4, "d_ff": 96}


@pytest.mark.slow
def test_two_processes_have_the_weights_of_one(tmp_path: Path) -> None:
    cases = [
        Case("1f1b", has_qk_norm=True),
        Case("1f1b", is_tied=True, num_kv_heads=2, has_checkpointing=True, batches_per_step=2),
        Case("gpipe", is_double=False, optimizer="torch.AdamW"),
        Case("1f1b", is_tied=True, is_gemma=True),
    ]
    check_cases(tmp_path, cases, 2)


@pytest.mark.slow
@pytest.mark.parametrize("is_double", [True, pytest.param(False, marks=pytest.mark.long)])
def test_four_processes_have_the_weights_of_one(tmp_path: Path, is_double: bool) -> None:
    cases = [
        Case(kind, is_tied, has_qk_norm=is_tied, has_checkpointing=is_tied, is_double=is_double, steps=10)
        for kind in ("1f1b", "gpipe")
        for is_tied in (False, True)
    ]
    cases.append(Case("1f1b", feed_forward="relu2", norm_placement="post", logit_softcap=3.0, is_double=is_double))
    if is_double:  # in float32 the products of Muon are in bfloat16
        cases.append(Case("1f1b", optimizer="muon"))
    check_cases(tmp_path, cases, 4)


def test_a_pipeline_in_one_process_is_refused() -> None:
    with pytest.raises(UserError, match="at least 2 processes"):
        PipelineParallel(TransformerLM(ModelConfig(33, num_layers=2, **_SMALL)), 4)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_too_few_micro_batches_are_refused(schedule: str) -> None:
    model = TransformerLM(ModelConfig(33, num_layers=4, **_SMALL))
    with (
        patch("lm.distributed.pipeline_parallel.get_world_size", return_value=4),
        pytest.raises(UserError, match="micro-batches are too few"),
    ):
        PipelineParallel(model, 3 if schedule == "1f1b" else 0, schedule)  # type: ignore[arg-type]


def test_a_model_whose_blocks_need_more_than_their_input_is_refused() -> None:
    model = TransformerLM(ModelConfig(33, num_layers=4, value_residual=True, **_SMALL))
    with (
        patch("lm.distributed.pipeline_parallel.get_world_size", return_value=2),
        pytest.raises(UserError, match=r"model\.value_residual"),
    ):
        PipelineParallel(model, 4)


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(UserError, match=r"model.num_layers 2 cannot be divided among 3 processes"):
        divide_layers(ModelConfig(33, num_layers=2, **_SMALL), 3)


@pytest.mark.parametrize("stage_count", [2, 3, 5, 12])
@pytest.mark.parametrize("vocab_size", [33, 1000, 5000])
def test_the_slowest_stage_is_as_fast_as_in_any_division(stage_count: int, vocab_size: int) -> None:
    config = ModelConfig(vocab_size, context_length=64, num_layers=12, **_SMALL)
    head = 2 * vocab_size * config.d_model
    block = 2 * (4 * config.d_model**2 + 3 * config.d_model * config.d_ff + config.d_model * config.context_length)

    def slowest(counts: Sequence[int]) -> int:
        return max(*(count * block for count in counts[:-1]), counts[-1] * block + head)

    divisions = (
        [stop - start for start, stop in pairwise((0, *cuts, 12))]
        for cuts in combinations(range(1, 12), stage_count - 1)
    )
    stages = divide_layers(config, stage_count)
    assert [layer for stage in stages for layer in stage] == list(range(12))
    assert slowest([len(stage) for stage in stages]) == min(map(slowest, divisions))
