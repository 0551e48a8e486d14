"""A few rounds of the fault suite; ``python -m tests.faults`` plays all."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.bench import Bench
from tests.faults.faults import flipped, replaced
from tests.faults.judge import differences, digests
from tests.faults.rounds import play


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    for name, why in (("moto.server", "moto, which plays S3,"), ("s3fs", "s3fs")):
        pytest.importorskip(name, reason=f"{why} is not installed")
    found = Bench(tmp_path_factory.mktemp("bench"))
    yield found
    found.close()


def test_the_judge_sees_a_changed_byte_and_a_missing_output(bench: Bench, tmp_path: Path) -> None:
    expected, copy = digests(str(bench.reference)), tmp_path / "copy"
    shutil.copytree(bench.reference, copy)
    assert not differences(expected, str(copy))
    shards = next(copy.glob("encode-chunk/*/*/tokens.bin"))
    replaced(shards, flipped(shards.read_bytes(), random.Random(0)))
    place = "/".join(shards.parts[-4:-2])
    assert differences(expected, str(copy)) == [f"{place}: tokens.bin differs"]
    (copy / place / "manifest.json").unlink()
    assert differences(expected, str(copy)) == [f"no output {place}"]


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        ("train", "disk full"),
        ("merge", "flip"),
        ("encode", "S3 500"),
        ("train", "SIGTERM"),
    ],
)
def test_a_round(bench: Bench, stage: str, fault: str) -> None:
    found = play(bench, seed=0, number=0, stage=stage, name=fault)
    assert not found.wrong, found.said
