"""Runs one target: hands it bytes, and keeps what made it fail otherwise than with a message for the user.

Atheris chooses the bytes by what they reach in the code. Where it is not installed they are random.
"""

import hashlib
import mmap
import os
import random
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lm.errors import UserError

Target = Callable[[bytes], int]
"""Takes bytes, works through them, returns how many cases that were."""

HANG = 5  # seconds of processor time
MEMORY = 1 << 30  # bytes that an execution may add to the most that the process has had
_LONGEST = 400  # bytes handed to a target


class Hang(BaseException):
    """An execution takes too long. No Exception, which what is tested might catch."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises Hang after so much processor time: that of a machine that has other things to do does not count."""

    def late(number: int, frame: Any) -> None:
        raise Hang(f"It takes more than {seconds} s.")

    previous = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


class State:
    """What a run has done so far, in a file, so that it is known where the process ends in whatever way."""

    _HEAD = struct.Struct("<QQdQQQ")

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(1 << 16))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 1 << 16)
        head = self._HEAD.unpack_from(self._map)
        self.executions, self.calls, self.seconds, self.first_memory, self.memory, size = head
        self.last = bytes(self._map[self._HEAD.size : self._HEAD.size + size])

    def write(self, last: bytes) -> None:
        """Keep the figures, and the bytes that are tried now."""
        figures = (self.executions, self.calls, self.seconds, self.first_memory, self.memory, len(last))
        self._map[: self._HEAD.size] = self._HEAD.pack(*figures)
        self._map[self._HEAD.size : self._HEAD.size + len(last)] = last


def memory_now() -> int:
    """Bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def keep(found: Path, name: str, kind: str, data: bytes, report: str) -> None:
    """Keep a case, the shortest of its kind: ``kind`` tells where it failed."""
    path = found / f"{name}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}"
    if not path.exists() or len(data) < path.stat().st_size:
        found.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(f"{kind}\n{report}")


def _place(error: BaseException) -> str:
    """The kind of an error and the innermost line of the project that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    folders = ("lm", "tasks", "flows", "kernels", "fuzz")
    ours = [frame for frame in frames if Path(frame.filename).parent.name in folders]
    frame = (ours or frames)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"


class Trial:
    """Tries a target on bytes, one after the other, until the time or the executions are over."""

    def __init__(self, name: str, target: Target, state: State, found: Path, seconds: float, executions: int) -> None:
        self._name, self._target, self._state, self._found = name, target, state, found
        self._seconds, self._most = seconds, executions
        self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @property
    def is_over(self) -> bool:
        return self._state.seconds >= self._seconds or self._state.executions >= self._most

    def one(self, data: bytes) -> None:
        """An execution: fine where it ends, or ends with a UserError."""
        state, started = self._state, time.perf_counter()
        state.write(data)
        cases = 1
        try:
            with limited(HANG):
                cases = self._target(data)
        except UserError:
            pass
        except (Exception, Hang) as error:
            keep(self._found, self._name, _place(error), data, traceback.format_exc()[-20_000:])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if (peak - self._peak) * 1024 > MEMORY and state.calls > 10:
            keep(self._found, self._name, "memory", data, f"{(peak - self._peak) >> 10} MB more")
        self._peak = peak
        state.executions += cases
        state.calls += 1
        state.seconds += time.perf_counter() - started
        if state.calls % 256 == 0:
            state.memory = memory_now()
            if state.calls & (state.calls - 1) == 0:  # so that growth is that of the latter half of the calls
                state.first_memory = state.memory
        if self.is_over:
            state.write(b"")


def run(trial: Trial, seed: int, corpus: Path) -> None:
    """Try bytes until the trial is over; with Atheris this ends the process."""
    source = random.Random(seed)
    try:
        import atheris
    except ImportError:
        while not trial.is_over:
            trial.one(source.randbytes(source.randrange(_LONGEST)))
        return
    corpus.mkdir(parents=True, exist_ok=True)
    for number in range(50):
        (corpus / f"seed-{number}").write_bytes(source.randbytes(source.choice([8, 60, 200])))

    def one(data: bytes) -> None:
        trial.one(data)
        if trial.is_over:
            sys.stderr.flush()
            os._exit(0)  # an exception would pass for a finding

    options = [f"-seed={seed % (1 << 32) or 1}", f"-max_len={_LONGEST}", "-len_control=0", "-rss_limit_mb=0"]
    options += ["-verbosity=0", f"-artifact_prefix={corpus}/"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one)
    atheris.Fuzz()
