"""Two rounds of ``python -m tests.concurrency``: the hardest kinds."""

from pathlib import Path

import pytest

from tests.concurrency import KINDS, Rounds


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    return Rounds(tmp_path_factory.mktemp("rounds"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "nobody needs" in kind])
def test_two_runs_at_once_while_verify_and_gc_go_round(rounds: Rounds, kind: str) -> None:
    assert rounds.play(kind)["cleaned"]


def test_the_comparison_sees_a_difference(rounds: Rounds, tmp_path: Path) -> None:
    assert rounds.expected[0] != rounds.expected[1]
