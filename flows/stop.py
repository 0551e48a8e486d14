"""How SIGINT and SIGTERM end a run: not in the midst of Prefect's bookkeeping, and for certain."""

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from lm.errors import UserError

STOPPED = "textmill: stopped. What is finished is kept; the same command goes on from there."

_OURS = {"lm", "tasks", "flows"}
_TICK = 0.02  # seconds
_PATIENCE = 1.0  # seconds in which Prefect comes back to us, unless it waits for tasks
_LIMIT = 60.0  # seconds from a signal to the end of the process


class Terminated(KeyboardInterrupt):
    """SIGTERM, which else would end the process without a word."""


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """A handler for SIGTERM."""
    raise Terminated


def _is_in_prefect(frame: FrameType | None) -> bool:
    """Whether Prefect's code, or what it has called, is interrupted, and not ours that it has called."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package == "prefect" or package in _OURS:
            return package == "prefect"
        frame = frame.f_back
    return False


@contextmanager
def stoppable() -> Iterator[None]:
    """Within it, SIGINT raises KeyboardInterrupt and SIGTERM Terminated as soon as our own code is at work: Prefect
    forgets to give back locks, or fails of something else, where an exception meets it at an arbitrary place. A process
    that has not ended a minute after the signal is ended, which loses no more than SIGKILL does: nothing finished. A
    further signal does that once the run is over.

    Signals come to the main thread: in another one this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    bell, ring = os.pipe()
    stop = _Stop(ring)
    # Started here, as no thread can be in a handler: what it interrupts may hold the lock of those that are starting.
    threading.Thread(target=stop.see_to_it, args=(bell,), daemon=True).start()
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, stop.handle) for number in numbers}
    try:
        yield
    except BaseException as error:
        if not stop.number or isinstance(error, (KeyboardInterrupt, UserError)):
            raise
        raise stop.exception from error  # which is an aftermath of the signal
    finally:
        stop.is_over = True
        if not stop.number:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        os.close(ring)


class _Stop:
    def __init__(self, ring: int) -> None:
        self.number = 0
        """The first signal."""
        self.is_over = False
        self._since = 0.0
        self._is_raised = False
        self._ring = ring

    @property
    def exception(self) -> type[KeyboardInterrupt]:
        return Terminated if self.number == signal.SIGTERM else KeyboardInterrupt

    def handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self._since = number, now
        if self.is_over:
            self._end()
        os.write(self._ring, b"!")
        if _is_in_prefect(frame) and now - self._since < _PATIENCE:
            return
        self._is_raised = True
        raise self.exception

    def see_to_it(self, bell: int) -> None:
        """In a thread: send a signal again that was not obeyed yet; end the process when its time is over."""
        ends: float | None = None
        while select.select([bell], [], [], ends and max(0.0, ends - time.monotonic()))[0]:
            if not os.read(bell, 1):
                break  # the run is over; what ends with the process is not yet
            ends = ends or time.monotonic() + _LIMIT
            time.sleep(_TICK)
            if not (self._is_raised or self.is_over):
                signal.pthread_kill(threading.main_thread().ident or 0, self.number)
        os.close(bell)
        if ends:
            time.sleep(max(0.0, ends - time.monotonic()))
            self._end()

    def _end(self) -> NoReturn:
        os.write(2, f"{STOPPED}\n".encode())  # not by way of sys.stderr, whose lock may be what is waited for
        os._exit(128 + self.number)
