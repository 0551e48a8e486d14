"""A process that imports the command line once and forks a child for each run, as the imports take most of the time.

It reads lines of JSON, ``[arguments, path of a FIFO for the output, changes of the environment]``. For each it prints
two lines: the process id of the child, and after its end the exit code, which is negative for a signal. SIGUSR1 has the
main thread of a child call a kernel of some seconds.
"""

import faulthandler
import json
import os
import signal
import sys
from importlib import import_module
from types import FrameType

from matplotlib.figure import Figure
from numba import njit
from prefect.context import refresh_global_settings_context
from tenacity import wait_random

from lm.files.retry import retry_reading, retry_request
from tests.helpers.figures import save_tiny_image
from textmill.cli.main import main

_LAZY_IMPORTS = ("s3fs", "torch._dynamo", "flows.posttrain")  # imported on first use

KERNEL_LINE = "A kernel runs."


@njit("int64(int64)", nogil=True)
def _kernel(count: int) -> int:
    total = 0
    for i in range(count):
        total ^= i * total + 1
    return total


def _call_kernel(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{KERNEL_LINE}\n".encode())
    _kernel(1 << 31)


def _change_environment(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    refresh_global_settings_context()


if __name__ == "__main__":
    for name in _LAZY_IMPORTS:
        import_module(name)
    Figure.savefig = save_tiny_image  # type: ignore[assignment,method-assign]
    # Retry as often as usual, but faster.
    retry_reading.wait = retry_request.wait = wait_random(0, 0.5)
    for line in sys.stdin:
        arguments, fifo, environment = json.loads(line)
        if not (child := os.fork()):
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores SIGINT
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
            signal.signal(signal.SIGUSR1, _call_kernel)
            if environment:
                _change_environment(environment)
            for path, flags, descriptors in ((os.devnull, os.O_RDONLY, (0,)), (fifo, os.O_WRONLY, (1, 2))):
                for descriptor in descriptors:
                    os.dup2(os.open(path, flags), descriptor)
            faulthandler.enable()  # SIGABRT prints the stacks of a run that hangs
            sys.exit(main(arguments))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
