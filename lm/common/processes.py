"""Child processes that answer requests, the signals that stop a run, and actions every few seconds in a thread."""

import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import IO, cast

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the request of a job scheduler, and a closed terminal or lost connection."""
_PROJECT = str(Path(__file__).parents[2])
_LENGTH = struct.Struct("<q")  # of a message, before its bytes


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
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited, so the child is never without it
        try:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.close: Callable[[], None] = weakref.finalize(self, _end, self.process)
        """End the process. This also happens when nothing refers to the object any more."""

    @property
    def is_running(self) -> bool:
        """Whether the process can answer."""
        return self.process.poll() is None

    def send(self, message: bytes) -> None:
        """Send a message. Raises ChildEnded."""
        try:
            _write_message(cast(IO[bytes], self.process.stdin), message)
        except BrokenPipeError:
            raise ChildEnded(self.process.wait()) from None

    def ask(self, request: bytes) -> bytes:
        """Send a request and return its answer. Raises ChildEnded. An error, such as KeyboardInterrupt, ends the
        process: the next request must not get the answer of this one."""
        try:
            self.send(request)
            answer = _read_message(cast(IO[bytes], self.process.stdout))
            if answer is None:
                raise ChildEnded(self.process.wait())
        except BaseException:
            self.close()
            raise
        return answer


def serve_parent() -> tuple[Iterator[bytes], Callable[[bytes], None]]:
    """Return (messages of the parent, function that sends an answer), for the module of a :class:`ChildProcess`.

    The process ends with its input, even in the middle of an answer, so it does not outlive its parent.
    """
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints goes to the log
    messages: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        try:
            while (message := _read_message(sys.stdin.buffer)) is not None:
                messages.put(message)
        finally:
            os._exit(0)  # the parent has ended, or does not wait for the answer

    threading.Thread(target=read, daemon=True).start()
    return iter(messages.get, None), partial(_write_message, output)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):  # it ended before it read all
            cast(IO[bytes], pipe).close()
    process.wait()


def _write_message(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(_LENGTH.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def _read_message(pipe: IO[bytes]) -> bytes | None:
    """Return the next message, or None at the end of the pipe."""
    length = pipe.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        return None
    message = pipe.read(_LENGTH.unpack(length)[0])
    return message if len(message) == _LENGTH.unpack(length)[0] else None


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
