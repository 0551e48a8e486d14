"""One round of ``python -m tests.end_to_end.concurrency``."""

import pytest

from tests.end_to_end.concurrency import Rounds

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    return Rounds(tmp_path_factory.mktemp("rounds"))


def test_two_runs_at_once_with_verify_and_gc(rounds: Rounds) -> None:
    assert rounds.play("different over garbage")["cleaned"]


def test_the_two_configurations_have_different_outputs(rounds: Rounds) -> None:
    assert rounds.expected[0] != rounds.expected[1]
