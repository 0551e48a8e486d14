"""Processes that this one starts: what they import, and those that answer requests."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from lm.common.signals import STOP_SIGNALS

_PROJECT = str(Path(__file__).parents[2])


def import_environment() -> dict[str, str]:
    """Return the environment variables with which a Python process imports what this process imports.

    Without them, ``python -m`` looks into the working directory first: a script called tokenize.py, or the ``lm`` of
    another checkout, would run in place of the library of that name.
    """
    paths = [str(Path(path).absolute()) for path in sys.path if path]  # "": the working directory, after python -c
    if _PROJECT not in paths:
        paths.insert(0, _PROJECT)
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}


def start_child(module: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start ``python -m module`` with pipes to its input and output, and with SIGINT, SIGTERM and SIGHUP blocked.

    Terminals and job schedulers send these signals to all processes of a run. The child must still finish its answer:
    it ends when its input does. The new process inherits the mask, so there is no moment without it.
    """
    environment = {**os.environ, **import_environment()}
    command = [sys.executable, "-m", module, *arguments]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
