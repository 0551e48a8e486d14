"""One training in several processes of this machine, that end with the one that started them, however it ends."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

from lm.errors import UserError
from lm.metrics import read_metrics
from lm.train import INTERRUPTED, PARENT
from lm.trainer import Interrupted

log = logging.getLogger(__name__)

_POLL = 0.2  # seconds
_GRACE = 60.0  # seconds that processes have to finish a step and save


def run_processes(
    job: Path, number: int, progress: Callable[[int], None], stopping: threading.Event, metrics: Path
) -> None:
    """Train the job of a file in ``number`` processes; ``progress`` is told the steps found in ``metrics``.

    Raises UserError for a mistake that they name or a process that dies, Interrupted once ``stopping`` is set and they
    have saved. No process outlives this call, nor this process: all hold the reading end of a pipe, and end when its
    other end closes.
    """
    reading, writing = os.pipe()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[subprocess.Popen[str]] = []
    lines: list[list[str]] = [[] for _ in range(number)]
    try:
        for rank in range(number):
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, PARENT: reading}
            process = subprocess.Popen(
                [sys.executable, "-m", "lm.train", str(job)],
                env={**os.environ, **{name: str(value) for name, value in (world | meeting).items()}},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=(reading,),
                process_group=processes[0].pid if processes else 0,  # Ctrl-C in a terminal comes by way of us
            )
            processes.append(process)
            threading.Thread(target=_relay, args=(process, lines[rank]), daemon=True).start()
        codes = _wait(processes, progress, stopping, metrics)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        os.close(reading)
        os.close(writing)
    for code, said in zip(codes, lines, strict=True):
        if code == INTERRUPTED:
            raise Interrupted(said[-1].removeprefix("lm.train: ") if said else "The training was stopped and saved.")
        if code == 2:
            raise UserError(said[-1].removeprefix("lm.train: "))
    if any(codes):
        rank, code = min(((rank, code) for rank, code in enumerate(codes) if code), key=itemgetter(1))  # signals first
        raise UserError(
            f"Training process {rank} of {number} ended with code {code}; the training goes on from its last "
            f"checkpoint when it is started again. Its last lines:\n" + "\n".join(lines[rank][-20:])
        )


def _relay(process: "subprocess.Popen[str]", lines: list[str]) -> None:
    """Pass on what a process says to our log."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        log.info("%s", lines[-1])
        del lines[:-100]


def _wait(
    processes: "list[subprocess.Popen[str]]",
    progress: Callable[[int], None],
    stopping: threading.Event,
    metrics: Path,
) -> list[int]:
    """Wait until all have ended, or one badly, or those asked to stop have had their time; returns their exit codes, 0
    for what still runs."""
    deadline = None
    while any(process.poll() is None for process in processes):
        if any(process.returncode not in (None, 0, INTERRUPTED) for process in processes):
            time.sleep(_POLL)  # the others may have ended first, and say why
            break
        if stopping.is_set() and deadline is None:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + _GRACE
        if deadline is not None and time.monotonic() > deadline:
            break
        if rows := read_metrics(metrics):
            progress(rows[-1]["step"])
        time.sleep(_POLL)
    return [process.poll() or 0 for process in processes]
