"""Run one target on many inputs, and keep the inputs that fail with anything else than a UserError.

Atheris chooses the inputs by code coverage. Without Atheris they are random.
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

from lm.common.errors import UserError
from tests.helpers.processes import PROJECT

Target = Callable[[bytes], int]
"""A function that takes the bytes of an input and returns the number of tested cases."""

MAX_CPU_SECONDS = 5  # of an execution
MAX_MEMORY_GROWTH_BYTES = 1 << 30  # of the peak memory, in one execution
_MAX_INPUT_BYTES = 400


class Hang(BaseException):
    """An execution takes too long. It is no Exception, so that the tested code does not catch it."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise Hang after this CPU time. Wall time would depend on the load of the machine."""

    def on_timeout(number: int, frame: Any) -> None:
        raise Hang(f"The execution takes more than {seconds} s of CPU time.")

    previous = signal.signal(signal.SIGPROF, on_timeout)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


class State:
    """The progress of a run, in a memory-mapped file that remains after a crash of the process."""

    _HEADER = struct.Struct("<QQdQQQ")

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(1 << 16))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 1 << 16)
        header = self._HEADER.unpack_from(self._map)
        self.executions, self.calls, self.seconds, self.first_memory, self.memory, size = header
        self.last = bytes(self._map[self._HEADER.size : self._HEADER.size + size])

    def write(self, last: bytes) -> None:
        """Save the figures and the current input."""
        figures = (self.executions, self.calls, self.seconds, self.first_memory, self.memory, len(last))
        self._map[: self._HEADER.size] = self._HEADER.pack(*figures)
        self._map[self._HEADER.size : self._HEADER.size + len(last)] = last


def resident_bytes() -> int:
    """Return the resident size of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def save_finding(findings: Path, name: str, kind: str, data: bytes, report: str) -> None:
    """Save a failing input, if it is the shortest of its kind. ``kind`` names the error and its place."""
    path = findings / f"{name}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}"
    if not path.exists() or len(data) < path.stat().st_size:
        findings.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(f"{kind}\n{report}")


def _describe(error: BaseException) -> str:
    """Return the type of an error and the innermost line of the project in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    project_frames = [frame for frame in frames if Path(frame.filename).is_relative_to(PROJECT)]
    frame = (project_frames or frames)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"


class Trial:
    """Run a target on one input after another, until a limit of time or executions is reached."""

    def __init__(
        self, name: str, target: Target, state: State, findings: Path, seconds: float, executions: int
    ) -> None:
        self._name, self._target, self._state, self._findings = name, target, state, findings
        self._max_seconds, self._max_executions = seconds, executions
        self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @property
    def is_over(self) -> bool:
        return self._state.seconds >= self._max_seconds or self._state.executions >= self._max_executions

    def execute(self, data: bytes) -> None:
        """Run the target once. Any error except UserError is a finding."""
        state, started = self._state, time.perf_counter()
        state.write(data)
        cases = 1
        try:
            with cpu_limit(MAX_CPU_SECONDS):
                cases = self._target(data)
        except UserError:
            pass
        except (Exception, Hang) as error:
            save_finding(self._findings, self._name, _describe(error), data, traceback.format_exc()[-20_000:])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if (peak - self._peak) * 1024 > MAX_MEMORY_GROWTH_BYTES and state.calls > 10:
            save_finding(self._findings, self._name, "memory", data, f"the peak grew by {(peak - self._peak) >> 10} MB")
        self._peak = peak
        state.executions += cases
        state.calls += 1
        state.seconds += time.perf_counter() - started
        if state.calls % 256 == 0:
            state.memory = resident_bytes()
            if (
                state.calls & (state.calls - 1) == 0
            ):  # at powers of two: growth is measured over the last half of the calls
                state.first_memory = state.memory
        if self.is_over:
            state.write(b"")


def run(trial: Trial, seed: int, corpus: Path) -> None:
    """Execute inputs until the trial is over. With Atheris this ends the process."""
    source = random.Random(seed)
    try:
        import atheris
    except ImportError:
        while not trial.is_over:
            trial.execute(source.randbytes(source.randrange(_MAX_INPUT_BYTES)))
        return
    corpus.mkdir(parents=True, exist_ok=True)
    for number in range(50):
        (corpus / f"seed-{number}").write_bytes(source.randbytes(source.choice([8, 60, 200])))

    def execute(data: bytes) -> None:
        trial.execute(data)
        if trial.is_over:
            sys.stderr.flush()
            os._exit(0)  # Atheris reports an exception as a crash

    options = [f"-seed={seed % (1 << 32) or 1}", f"-max_len={_MAX_INPUT_BYTES}", "-len_control=0", "-rss_limit_mb=0"]
    options += ["-verbosity=0", f"-artifact_prefix={corpus}/"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], execute)
    atheris.Fuzz()
