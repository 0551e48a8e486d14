"""How SIGINT and SIGTERM end a run: not in the midst of Prefect's bookkeeping, and for certain."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from prefect.exceptions import TerminationSignal

from lm.errors import UserError

STOPPED = "textmill: stopped. What is finished is kept; the same command goes on from there."

_OURS = {"lm", "tasks", "flows"}
_TICK = 0.02  # seconds
_PATIENCE = 1.0  # seconds in which what we have called comes back to us, unless it waits for something
_LIMIT = 60.0  # seconds from a signal to the end of the process

_active: list["_Stop"] = []


class Terminated(KeyboardInterrupt):
    """SIGTERM, which else would end the process without a word."""


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """A handler for SIGTERM."""
    raise Terminated


@contextmanager
def stoppable() -> Iterator[None]:
    """Within it, SIGINT raises KeyboardInterrupt and SIGTERM Terminated as soon as our own code is at work: Prefect
    forgets to give back locks, or fails of something else, where an exception meets it at an arbitrary place; other
    libraries may too. A process that has not ended a minute after the signal is ended, which loses no more than SIGKILL
    does: nothing finished. A further signal does that once the run is over. For the main thread, to which signals come.
    """
    bell, ring = os.pipe()
    stop = _Stop(ring)
    _active.append(stop)
    # Started here, as no thread can be in a handler: what it interrupts may hold the lock of those that are starting.
    threading.Thread(target=stop.see_to_it, args=(bell,), daemon=True).start()
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, stop.handle) for number in numbers}
    hook, sys.unraisablehook = sys.unraisablehook, stop.lost
    try:
        yield
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, UserError)) or not (stop.number or _is_aftermath(error)):
            raise
        raise stop.exception from error
    finally:
        _active.remove(stop)
        stop.is_over = True
        if not stop.number:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        sys.unraisablehook = hook
        os.close(ring)


def take_back() -> None:
    """Take SIGTERM back from Prefect, where the process is ``stoppable``: within a flow it has a handler of its own,
    which raises wherever it is, and gives it back afterwards. Where a worker has started the flow, that is left alone:
    by it Prefect cancels a run."""
    for stop in _active:
        signal.signal(signal.SIGTERM, stop.handle)


def _is_aftermath(error: BaseException | None) -> bool:
    """Whether it came of an exception of Prefect's own handler for SIGTERM."""
    while error and not isinstance(error, TerminationSignal):
        error = error.__cause__ or error.__context__
    return error is not None


class _Stop:
    """A run that signals may stop. Its handler rings, and a thread of its own then sees to it that the run ends."""

    def __init__(self, ring: int) -> None:
        self.number = 0
        """The first signal; 0 before it comes."""
        self.is_over = False
        self._since = 0.0
        self._is_raised = False
        self._ring = ring

    @property
    def exception(self) -> type[KeyboardInterrupt]:
        return KeyboardInterrupt if self.number == signal.SIGINT else Terminated

    def handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self._since = number, now
        if self.is_over:
            self._end()
        os.write(self._ring, b"!")
        at_work = str(frame.f_globals.get("__name__")).partition(".")[0] if frame else ""
        if at_work in _OURS or now - self._since > _PATIENCE:
            self._is_raised = True
            raise self.exception

    def lost(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Ask again where the exception came to nothing: in a destructor, or when a weak reference dies."""
        if self.number and isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._is_raised = False
            os.write(self._ring, b"!")
        else:
            sys.__unraisablehook__(unraisable)

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
