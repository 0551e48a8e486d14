"""Training in several processes of this machine, which end when the process that started them ends."""

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from lm.common.errors import DivergedError, MachineError, Stopped, TransientError, UserError
from lm.common.processes import import_environment
from lm.distributed.process_group import RENDEZVOUS_VARIABLE

log = logging.getLogger(__name__)

INTERRUPTED_EXIT_CODE = 75  # saved and stopped, the same command resumes (EX_TEMPFAIL of sysexits.h)
ERROR_EXIT_CODES: dict[int, type[UserError]] = {
    74: MachineError,  # EX_IOERR
    65: DivergedError,  # EX_DATAERR
    2: UserError,
}
FINAL_MESSAGE_PREFIX = "lm.train: "  # starts the last message of a process
PARENT_PIPE_VARIABLE = "TEXTMILL_PARENT"  # environment variable: set if standard input is a pipe from the parent

_POLL_SECONDS = 0.2
_SAVE_SECONDS = 60.0  # for the processes to finish a step and save


def run_processes(
    module: str, job_path: Path, world_size: int, poll: Callable[[], None], stop_event: threading.Event
) -> None:
    """Train the job of a file in ``world_size`` processes ``python -m MODULE``; call ``poll`` every 0.2 seconds.

    Raises UserError for a user's mistake, MachineError for a full disk or a process that fails, TransientError for one
    that a signal kills, and Stopped after ``stop_event`` is set and the processes have saved. The processes end with
    this call. They also end with this process, because their standard input is a pipe from it.
    """
    # The processes meet through a file: another program may take a free port before they listen on it.
    rendezvous = tempfile.TemporaryDirectory(prefix="textmill-", ignore_cleanup_errors=True)
    workers: list[_Worker] = []
    try:
        common = {RENDEZVOUS_VARIABLE: f"file://{rendezvous.name}/rendezvous", PARENT_PIPE_VARIABLE: "stdin"}
        common |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
        for rank in range(world_size):
            environment = common | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            workers.append(_Worker(module, job_path, environment, group=workers[0].process.pid if workers else 0))
        exit_codes = _wait(workers, poll, stop_event)
    finally:
        if workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(workers[0].process.pid, signal.SIGKILL)
        for worker in workers:
            with worker.process:  # closes the pipes and waits for the process
                worker.reader.join()
        rendezvous.cleanup()
    if exit_codes[0] == INTERRUPTED_EXIT_CODE:
        raise Stopped(workers[0].final_message())
    is_any_killed = any(code is not None and code < 0 for code in exit_codes)
    for code, kind in reversed(ERROR_EXIT_CODES.items()):  # a mistake may be why another process cannot save
        if code in exit_codes and not is_any_killed:  # others fail because of a killed process, e.g. while they save
            rank = exit_codes.index(code)
            is_of_all = exit_codes.count(code) == world_size  # e.g. a mistake in the config, not a lack of memory
            prefix = "" if is_of_all else f"Training process {rank} of {world_size}: "
            raise kind(prefix + workers[rank].final_message())
    if stop_event.is_set() and any(code != 0 for code in exit_codes):
        raise Stopped("The training was stopped before it could save; it resumes from its last checkpoint.")
    if failures := [(code, rank) for rank, code in enumerate(exit_codes) if code]:
        code, rank = min(failures)  # a signal has a negative code and is the cause of the other failures
        kind = TransientError if code < 0 else MachineError
        raise kind(
            f"Training process {rank} of {world_size} ended with code {code}; start the training again to resume from "
            "its last checkpoint. The last lines of the process:\n" + "\n".join(workers[rank].lines[-20:])
        )


class _Worker:
    """One training process, and a thread that copies its output to the log."""

    def __init__(self, module: str, job_path: Path, environment: dict[str, str], group: int) -> None:
        self.lines: list[str] = []
        self._is_stopped = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(job_path)],
            env=os.environ | import_environment() | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",  # e.g. in the output of a compiler
            process_group=group,  # a terminal's Ctrl-C reaches only the parent, which passes it on
        )
        self.reader = threading.Thread(target=self._read_output, args=(self.process.stdout,), daemon=True)
        self.reader.start()

    def _read_output(self, output: IO[str]) -> None:
        with output:
            for line in output:
                self.lines.append(line.rstrip("\n"))
                log.info("%s", self.lines[-1])
                del self.lines[:-100]

    def log_stop(self, rank: int) -> None:
        """Log a warning when a signal such as SIGSTOP has stopped the process: the others then wait for it."""
        pid = self.process.pid
        if self.process.returncode is not None or not hasattr(os, "waitid"):  # macOS has it from Python 3.13 on
            return
        is_stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        if is_stopped and not self._is_stopped:
            log.warning(
                "Training process %d is stopped by a signal, and the others wait for it. kill -CONT %d continues it.",
                rank,
                pid,
            )
        self._is_stopped = is_stopped

    def final_message(self) -> str:
        """Return the message that the process printed before it ended, or its last lines."""
        starts = [index for index, line in enumerate(self.lines) if line.startswith(FINAL_MESSAGE_PREFIX)]
        return "\n".join(self.lines[starts[-1] if starts else -20 :]).removeprefix(FINAL_MESSAGE_PREFIX)


def _wait(workers: list[_Worker], poll: Callable[[], None], stop_event: threading.Event) -> list[int | None]:
    """Wait until all processes have ended or their time is over; return the exit codes, None for a running process.

    The time is limited after a process has failed, and after the processes are asked to stop.
    """
    deadline, is_stop_sent = math.inf, False
    while True:
        exit_codes = [worker.process.poll() for worker in workers]
        for rank, worker in enumerate(workers):
            worker.log_stop(rank)
        poll()
        if None not in exit_codes or time.monotonic() >= deadline:
            return exit_codes
        if any(code not in (None, 0, INTERRUPTED_EXIT_CODE) for code in exit_codes):
            deadline = min(deadline, time.monotonic() + 5)  # for the others to end
        if stop_event.is_set() and not is_stop_sent:
            for worker in workers:
                worker.process.send_signal(signal.SIGTERM)
            deadline, is_stop_sent = min(deadline, time.monotonic() + _SAVE_SECONDS), True
        time.sleep(_POLL_SECONDS)
