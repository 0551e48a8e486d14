"""A few rounds of fault injection; ``python -m tests.faults`` runs all."""

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.bench import Bench
from tests.faults.checks import check_outputs, compute_digests
from tests.faults.faults import flip_bit, overwrite
from tests.faults.flows import CURATE, PIPELINE, POSTTRAIN, TestedFlow
from tests.faults.rounds import run_round

pytestmark = pytest.mark.slow


@contextmanager
def start_bench(home: Path, flow: TestedFlow) -> Iterator[Bench]:
    for name in ("moto.server", "s3fs"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    bench = Bench(home, flow, has_kernels=True)
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with start_bench(tmp_path_factory.mktemp("bench"), PIPELINE) as bench:
        yield bench


def test_check_outputs_finds_a_changed_byte_and_a_missing_output(bench: Bench, tmp_path: Path) -> None:
    expected, copy = compute_digests(str(bench.reference)), tmp_path / "copy"
    shutil.copytree(bench.reference, copy)
    assert not check_outputs(expected, str(copy))
    shards = next(copy.glob("encode-group/*/*/tokens.bin"))
    overwrite(str(shards), flip_bit(shards.read_bytes(), random.Random(0)))
    output = "/".join(shards.parts[-4:-2])
    assert check_outputs(expected, str(copy)) == [f"{output}: tokens.bin differs"]
    (copy / output / "manifest.json").unlink()
    assert check_outputs(expected, str(copy)) == [f"output {output} is missing"]


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        pytest.param("train", "disk full", marks=pytest.mark.long),
        pytest.param("merge", "flip", marks=pytest.mark.long),
        ("encode", "S3 500"),
        ("train", "SIGTERM"),
        pytest.param("train", "SIGHUP", marks=pytest.mark.long),
        pytest.param("encode", "signal in kernel", marks=pytest.mark.long),
        pytest.param("train", "temporary server killed", marks=pytest.mark.long),
    ],
)
def test_a_run_recovers_from_a_fault(bench: Bench, stage: str, fault: str) -> None:
    result = run_round(bench, seed=0, number=0, stage=stage, name=fault)
    assert not result.problems, result.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "fault"), [("filter", "SIGKILL"), ("deduplicate", "S3 500"), ("repeats", "flip"), ("export", "disk full")]
)
def test_a_curation_recovers_from_a_fault(tmp_path: Path, stage: str, fault: str) -> None:
    with start_bench(tmp_path, CURATE) as bench:
        result = run_round(bench, seed=0, number=0, stage=stage, name=fault)
    assert not result.problems, result.output


@pytest.mark.long
def test_a_post_training_recovers_from_a_fault(tmp_path: Path) -> None:
    with start_bench(tmp_path, POSTTRAIN) as bench:
        result = run_round(bench, seed=0, number=0, stage="reinforce", name="S3 reset")
    assert not result.problems, result.output
