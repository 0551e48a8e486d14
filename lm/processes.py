"""One training in several processes of this machine, that end with the one that started them, however it ends."""

import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from lm.errors import UserError
from lm.metrics import read_metrics
from lm.train import INTERRUPTED, PARENT, SAYS
from lm.trainer import Interrupted

log = logging.getLogger(__name__)

_POLL = 0.2  # seconds
_GRACE = 60.0  # seconds that processes have to finish a step and save
_REST = 5.0  # seconds that the others have to end when one has ended badly


def run_processes(
    job: Path, number: int, progress: Callable[[int], None], stopping: threading.Event, metrics: Path
) -> None:
    """Train the job of a file in ``number`` processes; ``progress`` is told the steps found in ``metrics``.

    Raises UserError for a mistake that they name or a process that dies, Interrupted once ``stopping`` is set and they
    have saved. No process outlives this call, nor this process: they end with their standard input, a pipe from here.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks: list[_Rank] = []
    try:
        for rank in range(number):
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, PARENT: "stdin"}
            environment = {name: str(value) for name, value in (world | meeting).items()}
            ranks.append(_Rank(job, environment, group=ranks[0].process.pid if ranks else 0))
        codes = _wait(ranks, progress, stopping, metrics)
    finally:
        if ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ranks[0].process.pid, signal.SIGKILL)
        for started in ranks:
            with started.process:  # closes its pipes and waits for it
                started.relay.join()
    if codes[0] == INTERRUPTED:
        raise Interrupted(ranks[0].message())
    for code, ended in zip(codes, ranks, strict=True):
        if code == 2:
            raise UserError(ended.message())
    if stopping.is_set() and any(code != 0 for code in codes):
        raise Interrupted("The training was stopped before it could save; it goes on from its last checkpoint.")
    failed = [(code, rank) for rank, code in enumerate(codes) if code]
    if failed:
        code, rank = min(failed)  # a signal first, which the others then fail of
        raise UserError(
            f"Training process {rank} of {number} ended with code {code}; the training goes on from its last "
            "checkpoint when it is started again. Its last lines:\n" + "\n".join(ranks[rank].lines[-20:])
        )


class _Rank:
    """One of the processes, what it said last, and the thread that passes that on to our log."""

    def __init__(self, job: Path, environment: dict[str, str], group: int) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lm.train", str(job)],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",  # a compiler's words, say
            process_group=group,  # Ctrl-C in a terminal comes by way of us
        )
        self.relay = threading.Thread(target=self._relay, args=(self.process.stdout,), daemon=True)
        self.relay.start()

    def _relay(self, said: IO[str]) -> None:
        with said:
            for line in said:
                self.lines.append(line.rstrip("\n"))
                log.info("%s", self.lines[-1])
                del self.lines[:-100]

    def message(self) -> str:
        """What it said of its end."""
        starts = [place for place, line in enumerate(self.lines) if line.startswith(SAYS)]
        return "\n".join(self.lines[starts[-1] if starts else -20 :]).removeprefix(SAYS)


def _wait(
    ranks: list[_Rank], progress: Callable[[int], None], stopping: threading.Event, metrics: Path
) -> list[int | None]:
    """Wait until all have ended, or one badly and the others with it, or those asked to stop have had their time;
    returns their exit codes, None for what still runs."""
    deadline, is_asked, size = math.inf, False, 0
    while True:
        codes = [rank.process.poll() for rank in ranks]
        if metrics.exists() and metrics.stat().st_size != size and (rows := read_metrics(metrics)):
            size = metrics.stat().st_size
            progress(rows[-1]["step"])
        if None not in codes or time.monotonic() >= deadline:
            return codes
        if any(code not in (None, 0, INTERRUPTED) for code in codes):
            deadline = min(deadline, time.monotonic() + _REST)
        if stopping.is_set() and not is_asked:
            for rank in ranks:
                rank.process.send_signal(signal.SIGTERM)
            deadline, is_asked = min(deadline, time.monotonic() + _GRACE), True
        time.sleep(_POLL)
