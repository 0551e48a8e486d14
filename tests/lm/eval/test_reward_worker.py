"""Rewards in a process: hostile responses cost their reward, and nothing else."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.common.processes import STOP_SIGNALS
from lm.eval import RewardWorker
from lm.posttrain import compute_rollout_rewards
from tests.helpers.limits import TIMEOUT_SCALE, wait_for

SECONDS = 2 * TIMEOUT_SCALE
TOWER = r"\boxed{9^{9^{9^{9}}}}"  # takes the library forever
NOTHING = {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0}
RIGHT = dict.fromkeys(NOTHING, 1.0)


def worker_process(worker: RewardWorker) -> subprocess.Popen[bytes]:
    assert worker._process is not None
    return worker._process.process


def test_rewards_are_those_of_the_function() -> None:
    with RewardWorker({"required_words": 2.0, "ends_properly": 0.5}) as worker:
        text = "Ein Wort: “日本” \x00\u2028\n🙂\ud800."
        assert worker(text, ["Wort", "日本"]) == {"reward": 2.5, "format_reward": 2.5, "answer_reward": 2.0}
        assert worker.score("x", ["y"]).rewards["reward"] == 0.0


def test_hostile_responses_cost_their_reward() -> None:
    pytest.importorskip("math_verify", reason="compares formulas")
    with RewardWorker({"boxed_math": 1.0}, SECONDS) as worker:
        assert worker.score(r"\boxed{\frac{1}{2}}", "0.5").rewards == RIGHT
        first = worker_process(worker)
        for megabyte in ("\\frac" * 200_000, "\\boxed{" + "\\frac" * 200_000 + "}", "{" * 1_000_000):
            assert worker.score(megabyte, "0.5").rewards == NOTHING
        assert worker_process(worker) is first and first.poll() is None
        start = time.monotonic()
        verdict = worker.score(TOWER, r"\frac{1}{2}")
        assert verdict.rewards == NOTHING and verdict.error == f"the reward took more than {SECONDS:g} seconds"
        assert time.monotonic() - start < 5 * SECONDS and first.poll() is not None
        assert worker.score(r"\boxed{\frac{1}{2}}", "0.5").rewards == RIGHT


def test_a_rollout_goes_on() -> None:
    pytest.importorskip("math_verify", reason="compares formulas")
    with RewardWorker({"boxed_math": 1.0}, SECONDS) as worker:
        rewards, metadata = compute_rollout_rewards(worker, [r"\boxed{2}", TOWER], ["2", r"\frac{1}{2}"])
    assert rewards.tolist() == [1.0, 0.0] and metadata["reward_errors"] == 1


def test_a_reward_that_raises_costs_its_sample() -> None:
    with RewardWorker({"required_words": 1.0}) as worker:
        verdict = worker.score("text", [])
        assert verdict.rewards == NOTHING and verdict.error is not None
        assert verdict.error.startswith("the reward raised ZeroDivisionError")
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            worker("text", [])
        assert worker("cat", ["cat"]) == RIGHT


def test_a_worker_that_dies_is_replaced() -> None:
    with RewardWorker({"exact": 1.0}) as worker:
        assert worker("a", "a") == RIGHT
        process = worker_process(worker)
        process.kill()
        process.wait()
        assert worker("a", "a") == RIGHT
        assert worker_process(worker) is not process


def test_an_interrupted_response_does_not_give_its_rewards_to_the_next() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with RewardWorker({"exact": 1.0}) as worker:
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # while the process starts
            with pytest.raises(KeyboardInterrupt):
                worker.score("right", "right")
            assert worker("wrong", "right")["reward"] == 0.0
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_a_worker_that_dies_before_it_reads_costs_one_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_and_kill(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments, **options)
        process.kill()
        return process

    start = subprocess.Popen
    with RewardWorker({"exact": 1.0}) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", start_and_kill)
            verdict = worker.score("a" * 1_000_000, "a")  # more than a pipe holds
        assert verdict.rewards == NOTHING and verdict.error == "the process of the reward ended with code -9"
        assert worker("a", "a") == RIGHT


def test_signals_to_the_whole_process_group_cost_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_and_signal(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments, **options)
        send_signals(process)  # before its first instruction
        return process

    def send_signals(process: subprocess.Popen[bytes]) -> None:
        for number in STOP_SIGNALS:
            os.kill(process.pid, number)

    start = subprocess.Popen
    with RewardWorker({"exact": 1.0}) as worker:
        monkeypatch.setattr(subprocess, "Popen", start_and_signal)
        assert worker("a", "a") == RIGHT
        process = worker_process(worker)
        send_signals(process)
        assert worker("a", "a") == RIGHT
        assert worker_process(worker) is process and process.poll() is None


def test_a_missing_library_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    with RewardWorker({"boxed_math": 1.0}) as worker, pytest.raises(UserError, match=r"install textmill\[math\]"):
        worker(r"\boxed{x}", "y")


def test_unknown_rewards_are_refused_at_once() -> None:
    with pytest.raises(UserError, match="no reward 'no'"):
        RewardWorker({"no": 1.0})


def test_threads_share_a_worker() -> None:
    with RewardWorker({"exact": 1.0}) as worker, ThreadPoolExecutor(4) as pool:
        numbers = [str(n % 7) for n in range(100)]
        rewards = list(pool.map(lambda number: worker(number, "3")["reward"], numbers))
    assert rewards == [float(number == "3") for number in numbers]


def test_the_worker_ends_with_its_parent() -> None:
    code = (
        "import sys, time\nfrom lm.eval import RewardWorker\nworker = RewardWorker({'exact': 1.0})\n"
        "worker('a', 'a')\nprint(worker._process.process.pid, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker_id = int(parent.stdout.readline())
        os.kill(worker_id, 0)
        parent.send_signal(signal.SIGKILL)

    def has_ended() -> bool:
        status = Path(f"/proc/{worker_id}/stat")
        return not status.exists() or status.read_text().rpartition(") ")[2].startswith("Z")

    wait_for(has_ended, 10, "end of the worker")
