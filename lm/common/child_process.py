"""Processes that answer requests of this one."""

import os
import signal
import subprocess
import sys

from lm.common.signals import STOP_SIGNALS


def start_child(module: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start ``python -m module`` with pipes to its input and output, and with SIGINT, SIGTERM and SIGHUP blocked.

    Terminals and job schedulers send these signals to all processes of a run. The child must still finish its answer:
    it ends when its input does. The new process inherits the mask, so there is no moment without it. It imports what
    this process would, wherever it starts.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-m", module, *arguments]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
