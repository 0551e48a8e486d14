"""A process that has imported the command line and forks itself for each run of it: the imports take longer than the
rest. What is forked ends as any process does.

Reads lines of JSON, ``[arguments, path of a FIFO for what it says]``; answers each by two lines: the process's id, and
once it has ended its exit code, negative for a signal.
"""

import faulthandler
import json
import os
import signal
import sys
from importlib import import_module

from tenacity import wait_random

from flows.cli import main
from tasks.store import patiently

_LATER = ("matplotlib.figure", "s3fs", "torch._dynamo")  # imported where they are first used

if __name__ == "__main__":
    for name in _LATER:
        import_module(name)
    patiently.wait = wait_random(0, 0.5)  # as often, but all in less time than a round should take
    for line in sys.stdin:
        arguments, fifo = json.loads(line)
        if not (child := os.fork()):
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background process ignores
            for place, flags, numbers in ((os.devnull, os.O_RDONLY, (0,)), (fifo, os.O_WRONLY, (1, 2))):
                for number in numbers:
                    os.dup2(os.open(place, flags), number)
            faulthandler.enable()  # SIGABRT tells where it hangs
            sys.exit(main(arguments))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
