"""A process that imports the command line once and forks a child for each run, as the imports take most of the time.

It reads lines of JSON, ``[arguments, path of a FIFO for the output]``. For each it prints two lines: the process id of
the child, and after its end the exit code, which is negative for a signal.
"""

import faulthandler
import json
import os
import signal
import sys
from importlib import import_module

from tenacity import wait_random

from flows.cli.main import main
from lm.text.retry import retry_reading, retry_request

_LAZY_IMPORTS = ("matplotlib.figure", "s3fs", "torch._dynamo", "flows.posttrain")  # imported on first use

if __name__ == "__main__":
    for name in _LAZY_IMPORTS:
        import_module(name)
    # Retry as often as usual, but faster.
    retry_reading.wait = retry_request.wait = wait_random(0, 0.5)
    for line in sys.stdin:
        arguments, fifo = json.loads(line)
        if not (child := os.fork()):
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores SIGINT
            for path, flags, descriptors in ((os.devnull, os.O_RDONLY, (0,)), (fifo, os.O_WRONLY, (1, 2))):
                for descriptor in descriptors:
                    os.dup2(os.open(path, flags), descriptor)
            faulthandler.enable()  # SIGABRT prints the stacks of a run that hangs
            sys.exit(main(arguments))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
