"""Child processes that answer requests, the signals that stop a run, and actions every few seconds in a thread."""

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the request of a job scheduler, and a closed terminal or lost connection."""
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


class ChildEnded(Exception):
    """A child process ended before it answered. ``code`` is its exit code, negative for a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process ended with code {code}")
        self.code = code


class ChildProcess:
    """``python -m module``, which answers requests by :func:`serve_parent`. One thread at a time may use it.

    SIGINT, SIGTERM and SIGHUP are blocked in it. Terminals and job schedulers send these signals to all processes of a
    run, and the child must still finish its answer: it ends when its input does.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        command, environment = [sys.executable, "-m", module, *arguments], {**os.environ, **import_environment()}
        self.connection, child = Pipe()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited, so the child is never without it
        try:
            with child:
                self.process = subprocess.Popen(command, env=environment, stdin=child.fileno(), stdout=child.fileno())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.close: Callable[[], None] = weakref.finalize(self, _end, self.process, self.connection)
        """End the process. This also happens when nothing refers to the object any more."""

    @property
    def is_running(self) -> bool:
        """Whether the process can answer."""
        return self.process.poll() is None

    def send(self, message: bytes) -> None:
        """Send a message. Raises ChildEnded."""
        try:
            self.connection.send_bytes(message)
        except ConnectionError:
            raise ChildEnded(self.process.wait()) from None

    def ask(self, request: bytes) -> bytes:
        """Send a request and return its answer. Raises ChildEnded. An error, such as KeyboardInterrupt, ends the
        process: the next request must not get the answer of this one."""
        try:
            self.send(request)
            try:
                return self.connection.recv_bytes()
            except (EOFError, OSError):  # OSError: it ended within its answer
                raise ChildEnded(self.process.wait()) from None
        except BaseException:
            self.close()
            raise


def serve_parent() -> tuple[Iterator[bytes], Callable[[bytes], None]]:
    """Return (messages of the parent, function that sends an answer), for the module of a :class:`ChildProcess`.

    The process ends with its input, even in the middle of an answer, so it does not outlive its parent.
    """
    connection = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # not inherited by a process of a library, which may live longer
    os.dup2(2, 1)  # what a library prints goes to the log
    messages: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        try:
            while True:
                messages.put(connection.recv_bytes())
        finally:
            os._exit(0)  # the parent has ended, or does not wait for the answer

    threading.Thread(target=read, daemon=True).start()
    return iter(messages.get, None), connection.send_bytes


def _end(process: "subprocess.Popen[bytes]", connection: "Connection[bytes, bytes]") -> None:
    process.kill()
    connection.close()
    process.wait()


@contextmanager
def run_periodically(action: Callable[[], bool], seconds: float) -> Iterator[None]:
    """Call ``action`` in a thread every ``seconds`` during the ``with`` block, until it returns True.

    The first call is after ``seconds``. At the end of the block, a call in progress finishes first.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            if action():
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
