"""Rewards computed in a process of its own, so that a hostile response costs its reward and not the run.

``python -m lm.eval.reward_worker WEIGHTS SECONDS`` reads a JSON object of ``response`` and ``ground_truth`` in each
line of its input, and writes its rewards, or an ``error``, in a line of its output. A timer of the operating system
kills the process if a response takes too long, whatever it is doing; so it also ends without its parent.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import TracebackType
from typing import IO, Any, cast

from lm.common.errors import UserError
from lm.common.processes import start_child
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
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "RewardWorker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        request = json.dumps({"response": response, "ground_truth": ground_truth}).encode() + b"\n"
        with self._lock:
            if self._process and self._process.poll() is not None:  # it died after its last answer
                self._stop()
            process = self._process = self._process or self._start()
            stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
            line = b""
            try:
                with contextlib.suppress(BrokenPipeError):  # it ended before it read the request
                    stdin.write(request)
                    stdin.flush()
                    line = stdout.readline()
            except BaseException:  # e.g. KeyboardInterrupt: the next response must not get this one's rewards
                self._stop()
                raise
            if not line:
                code = process.wait()
                self._stop()
                return _failure(_describe_exit(code, self.seconds))
        answer = json.loads(line)
        if "user_error" in answer:
            raise UserError(answer["user_error"])
        return _failure(answer["error"]) if "error" in answer else Verdict(answer)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _start(self) -> "subprocess.Popen[bytes]":
        return start_child(__spec__.name, json.dumps(self.weights), str(self.seconds))

    def _stop(self) -> None:
        if self._process:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError), self._process:  # closes the pipes and waits for the process
                pass
            self._process = None


def _failure(error: str) -> Verdict:
    return Verdict(dict.fromkeys(REWARD_KEYS, 0.0), error)


def _describe_exit(code: int, seconds: float) -> str:
    if code == -signal.SIGALRM:
        return f"the reward took more than {seconds:g} seconds"
    return f"the process of the reward ended with code {code}"


def main(weights: str, seconds: str) -> None:
    """Answer requests until the input ends."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints goes to the log
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _limit_memory()
    reward = combine_rewards(json.loads(weights))
    for library in {REWARD_LIBRARIES[name] for name in json.loads(weights) if name in REWARD_LIBRARIES}:
        with contextlib.suppress(ImportError):  # the reward explains it
            import_module(library)  # does not count as a response's time
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        try:
            answer: Mapping[str, Any] = reward(request["response"], request["ground_truth"])
        except UserError as error:
            answer = {"user_error": str(error)}
        except Exception as error:  # hostile responses raise anything
            answer = {"error": f"the reward raised {error!r}"[:1000]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        output.write(json.dumps(dict(answer)).encode() + b"\n")
        output.flush()


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        resource = import_module("resource")
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
