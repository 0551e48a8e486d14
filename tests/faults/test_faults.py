"""A few rounds of the fault suite; ``python -m tests.faults`` plays all."""

from collections.abc import Iterator

import pytest

from tests.faults.bench import Bench
from tests.faults.rounds import play


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    for name, why in (("moto.server", "moto, which plays S3,"), ("s3fs", "s3fs")):
        pytest.importorskip(name, reason=f"{why} is not installed")
    found = Bench(tmp_path_factory.mktemp("bench"), is_warm=True)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        ("count", "SIGKILL"),
        ("train", "disk full"),
        ("merge", "flip"),
        ("encode", "S3 500"),
        ("train", "SIGTERM"),
    ],
)
def test_a_round(bench: Bench, stage: str, fault: str) -> None:
    found = play(bench, seed=0, number=0, stage=stage, name=fault)
    assert not found.wrong, found.said
