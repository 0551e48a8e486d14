"""A round of ``python -m tests.concurrency``, of the hardest kind."""

from pathlib import Path

import pytest

from tests.concurrency import Rounds


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    return Rounds(tmp_path_factory.mktemp("rounds"))


def test_two_runs_at_once_while_verify_and_gc_go_round(rounds: Rounds) -> None:
    assert rounds.play("different over what nobody needs")["cleaned"]


def test_the_comparison_sees_a_difference(rounds: Rounds, tmp_path: Path) -> None:
    assert rounds.expected[0] != rounds.expected[1]
