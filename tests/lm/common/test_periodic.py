"""An action that runs every few seconds in a background thread."""

import threading
import time

import pytest

from lm.common.periodic import run_periodically
from tests.helpers.limits import TIMEOUT_SCALE


def test_the_action_runs_until_the_block_ends() -> None:
    calls = threading.Semaphore(0)

    def act() -> bool:
        calls.release()
        return False

    with pytest.raises(KeyError), run_periodically(act, 0.01):
        for _ in range(3):
            assert calls.acquire(timeout=10 * TIMEOUT_SCALE)
        raise KeyError
    while calls.acquire(blocking=False):
        pass
    assert not calls.acquire(timeout=0.1)


def test_the_action_is_not_called_again_after_it_returned_true() -> None:
    calls = threading.Semaphore(0)

    def act() -> bool:
        calls.release()
        return True

    with run_periodically(act, 0.01):
        assert calls.acquire(timeout=10 * TIMEOUT_SCALE)
        assert not calls.acquire(timeout=0.1)


def test_a_short_block_makes_no_call_and_does_not_wait() -> None:
    started = time.monotonic()
    with run_periodically(lambda: bool(pytest.fail("called")), 1000):
        pass
    assert time.monotonic() - started < 10 * TIMEOUT_SCALE


def test_a_call_in_progress_finishes_before_the_block_is_left() -> None:
    is_called, results = threading.Event(), []

    def act() -> bool:
        is_called.set()
        time.sleep(0.2)
        results.append("finished")
        return True

    with run_periodically(act, 0.01):
        assert is_called.wait(10 * TIMEOUT_SCALE)
    assert results == ["finished"]
