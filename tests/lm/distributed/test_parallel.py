"""A training that is divided among processes in any way equals the training in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from lm.common.execution import ParallelKind
from tests.helpers.parallel import Case, run_cases

KINDS: list[ParallelKind] = ["ddp", "zero1", "zero2", "fsdp"]
ADAPTER_DTYPES: list[Literal["float32", "bfloat16", "nf4"]] = ["float32", "bfloat16", "nf4"]


def check_weights_and_figures(directory: Path, cases: list[Case], world_size: int, tolerance: float) -> None:
    def in_one_process(case: Case) -> Case:
        # With the same parts of the batch, which bfloat16 may round in another way together.
        parts = case.micro_batches * (world_size if case.adapter or case.has_autocast else 1)
        return replace(case, kind="none", is_compiled=False, micro_batches=parts)

    whole_cases = list(dict.fromkeys(map(in_one_process, cases)))
    expected = dict(zip(whole_cases, run_cases(directory / "one", whole_cases, 1), strict=True))
    for case, results in zip(cases, run_cases(directory / "many", cases, world_size), strict=True):
        for result in results:
            for name, tensor in expected[in_one_process(case)][0].items():
                error = (result[name] - tensor).abs() / tensor.abs().clamp(min=1)
                assert error.max() <= tolerance, f"{name} of {case}"


@pytest.mark.slow
def test_two_processes_have_the_weights_of_one(tmp_path: Path) -> None:
    # With AdamW a gradient that is missing in the first step is seen for long.
    cases = [Case(kind, is_tied=True, optimizer="muon", steps=4) for kind in KINDS]
    cases += [Case(kind, optimizer="adamw", steps=4, is_compiled=True) for kind in KINDS]
    cases += [Case("fsdp", steps=4, options="gemma"), Case("fsdp", steps=4, options="olmo2")]
    cases += [Case("fsdp", steps=4, options="experts"), Case("zero2", steps=4, options="experts")]
    cases += [Case(kind, steps=4, options="values", has_checkpointing=kind == "fsdp") for kind in KINDS]
    cases += [Case(kind, steps=4, has_autocast=True, is_tied=kind == "zero2") for kind in KINDS]
    cases += [Case("fsdp", steps=4, has_autocast=True, options="experts", optimizer="muon", has_checkpointing=True)]
    check_weights_and_figures(tmp_path, cases, 2, 1e-4)


@pytest.mark.slow
def test_two_processes_train_the_adapter_of_one(tmp_path: Path) -> None:
    """Its weights, those of the frozen base, and the norms of the gradients, with and without activation
    checkpointing."""
    cases = [
        Case(kind, adapter=dtype, has_checkpointing=has_checkpointing, steps=4)
        for kind in KINDS
        for dtype in ADAPTER_DTYPES
        for has_checkpointing in (False, True)
        if has_checkpointing == (kind == "ddp") or kind == "fsdp"
    ]
    cases += [Case("fsdp", adapter="float32", is_tied=True, optimizer="muon", steps=4, is_compiled=True)]
    cases += [Case(kind, adapter="nf4", options="experts", steps=4) for kind in KINDS]
    cases += [Case("fsdp", adapter="float32", options="gemma", steps=4)]
    check_weights_and_figures(tmp_path, cases, 2, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("is_double", "tolerance"), [(True, 1e-10), (False, 1e-4)])
def test_fifty_steps_equal_those_of_one_process(
    tmp_path: Path, world_size: int, is_double: bool, tolerance: float
) -> None:
    cases = [
        Case(kind, is_tied, optimizer, is_double, has_checkpointing=is_tied, steps=50)
        for kind in KINDS
        for is_tied in (False, True)
        for optimizer in ("adamw", "muon")
    ]
    check_weights_and_figures(tmp_path, cases, world_size, tolerance)
