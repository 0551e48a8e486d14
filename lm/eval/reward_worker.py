"""Rewards computed in a process of its own, so that a hostile response costs its reward and not the run.

``python -m lm.eval.reward_worker WEIGHTS SECONDS`` answers a JSON object of ``response`` and ``ground_truth`` with its
rewards, or an ``error``; see :class:`lm.common.processes.ChildProcess`. A timer of the operating system kills the
process if a response takes too long, whatever it is doing.
"""

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lm.common.errors import UserError
from lm.common.processes import ChildEnded, ChildProcess, serve_parent
from lm.eval.rewards import REWARD_KEYS, REWARD_LIBRARIES, combine_rewards

_MAX_MEMORY_BYTES = 4 << 30  # of the worker's address space


@dataclass(frozen=True)
class Verdict:
    """The rewards of a response, and why they are 0 if computing them failed."""

    rewards: dict[str, float]
    error: str | None = None


class RewardWorker:
    """Computes a weighted sum of named rewards, see :func:`lm.eval.rewards.combine_rewards`, in a process.

    A response that takes longer than ``seconds`` ends the process; the next response starts another. Threads may share
    a worker; it computes one reward at a time. Close it, or use it in a ``with``. Raises UserError for an unknown
    reward.
    """

    def __init__(self, weights: Mapping[str, float], seconds: float = 10.0) -> None:
        combine_rewards(weights)  # checks the names
        self.weights = dict(weights)
        self.seconds = seconds
        self._process: ChildProcess | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "RewardWorker":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, response: str, ground_truth: Any) -> dict[str, float]:
        """Return the rewards. Raises RuntimeError with the reason if computing them failed."""
        verdict = self.score(response, ground_truth)
        if verdict.error:
            raise RuntimeError(verdict.error)
        return verdict.rewards

    def score(self, response: str, ground_truth: Any) -> Verdict:
        """Return the rewards, all 0 with a reason if computing them raised, took too long or too much memory.

        Raises UserError if a library is missing.
        """
        request = json.dumps({"response": response, "ground_truth": ground_truth}).encode()
        with self._lock:
            if not (self._process and self._process.is_running):  # it may have died after its last answer
                self._process = ChildProcess(__spec__.name, json.dumps(self.weights), str(self.seconds))
            try:
                answer = json.loads(self._process.ask(request))
            except ChildEnded as error:
                if error.code == -signal.SIGALRM:
                    return _failure(f"the reward took more than {self.seconds:g} seconds")
                return _failure(f"the process of the reward ended with code {error.code}")
        if "user_error" in answer:
            raise UserError(answer["user_error"])
        return _failure(answer["error"]) if "error" in answer else Verdict(answer)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process:
                self._process.close()


def _failure(error: str) -> Verdict:
    return Verdict(dict.fromkeys(REWARD_KEYS, 0.0), error)


def main(weights: str, seconds: str) -> None:
    """Answer requests until the input ends."""
    requests, send_answer = serve_parent()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        resource = import_module("resource")
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    reward = combine_rewards(json.loads(weights))
    for library in {REWARD_LIBRARIES[name] for name in json.loads(weights) if name in REWARD_LIBRARIES}:
        with contextlib.suppress(ImportError):  # the reward explains it
            import_module(library)  # does not count as a response's time
    for message in requests:
        request = json.loads(message)
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        try:
            answer: Mapping[str, Any] = reward(request["response"], request["ground_truth"])
        except UserError as error:
            answer = {"user_error": str(error)}
        except Exception as error:  # hostile responses raise anything
            answer = {"error": f"the reward raised {error!r}"[:1000]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        send_answer(json.dumps(dict(answer)).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
