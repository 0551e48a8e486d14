"""Graceful shutdown: SIGINT, SIGTERM and SIGHUP stop a run, and never inside Prefect's bookkeeping.

Prefect loses locks or fails in other ways if an exception interrupts it at an arbitrary place. So the signal handler
raises only while the project's own code runs, or after a grace period. A watchdog thread sends the signal again until
the handler has raised, and ends a process that hangs. Python calls no handler while the main thread is inside a kernel
or other C code, so the interpreter itself wakes the watchdog (``signal.set_wakeup_fd``).
"""

import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from lm.common.errors import UserError
from lm.common.processes import STOP_SIGNALS

STOPPED_MESSAGE = "textmill: stopped. Finished work is kept; run the same command again to continue."

_LIBRARY_GRACE_SECONDS = 1.0  # a library call that takes longer than this waits for something and may be interrupted

_active_shutdowns: list["GracefulShutdown"] = []


class Terminated(KeyboardInterrupt):
    """Raised for SIGTERM, and for SIGHUP, which a closed terminal or a lost connection sends."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)
        self.number = number


def handle_termination() -> None:
    """Raise Terminated for SIGTERM and SIGHUP, also outside of :class:`GracefulShutdown`."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)


def _interrupt(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)


class GracefulShutdown:
    """Context manager: raise KeyboardInterrupt for SIGINT, and Terminated for SIGTERM and SIGHUP, as soon as project
    code runs. A signal that was ignored before stays ignored.

    A process that is still alive ``exit_seconds`` after the first signal is ended; finished stages are safe, as after
    SIGKILL. A second signal after the ``with`` block ends the process immediately. Use this in the main thread, which
    receives the signals.
    """

    def __init__(self, exit_seconds: float = 60.0) -> None:
        self._exit_seconds = exit_seconds
        self._signal_number = 0  # the first signal
        self._first_signal_time = 0.0
        self._is_raised = False
        self._is_block_over = False

    def __enter__(self) -> None:
        read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        _active_shutdowns.append(self)
        # Start the thread now: a signal handler may interrupt code that holds the lock which a thread start needs.
        threading.Thread(target=self._run_watchdog, args=(read_fd,), daemon=True).start()
        self._old_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._old_handlers = {number: signal.signal(number, self.handle) for number in numbers}
        self._old_hook, sys.unraisablehook = sys.unraisablehook, self._handle_unraisable

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        _active_shutdowns.remove(self)
        self._is_block_over = True
        if not self._signal_number:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
        sys.unraisablehook = self._old_hook
        signal.set_wakeup_fd(self._old_wakeup_fd)
        os.close(self._write_fd)
        if error is None or isinstance(error, KeyboardInterrupt):
            return
        if self._signal_number and not isinstance(error, UserError):
            raise _interrupt(self._signal_number) from error
        if interrupt := find_interrupt(error):
            raise _interrupt(signal_number(interrupt)) from error

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        now = time.monotonic()
        self._signal_number = self._signal_number or number
        self._first_signal_time = self._first_signal_time or now
        if self._is_block_over:
            self._exit()
        package = str(frame.f_globals.get("__name__")).partition(".")[0] if frame else ""
        if package in {"lm", "tasks", "flows", "textmill"} or now - self._first_signal_time > _LIBRARY_GRACE_SECONDS:
            self._is_raised = True
            raise _interrupt(self._signal_number)

    def _handle_unraisable(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Have the watchdog send the signal again if a destructor or a weak reference callback lost the exception."""
        if self._signal_number and isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._is_raised = False
            os.write(self._write_fd, bytes([self._signal_number]))
        else:
            sys.__unraisablehook__(unraisable)

    def _run_watchdog(self, read_fd: int) -> None:
        """Send the signal again until it has raised an exception. End the process at the deadline."""
        deadline: float | None = None
        while not deadline or time.monotonic() < deadline:  # a signal that is sent again makes the pipe ready at once
            is_ready = select.select([read_fd], [], [], deadline and max(0.0, deadline - time.monotonic()))[0]
            if not is_ready or not (received := os.read(read_fd, 1)):
                break  # the with block is over, but the process may still hang while it ends
            if signal.getsignal(received[0]) != self.handle:  # e.g. a training handles it: it saves first
                continue
            self._signal_number = self._signal_number or received[0]
            deadline = deadline or time.monotonic() + self._exit_seconds
            time.sleep(0.02)
            if not (self._is_raised or self._is_block_over):
                signal.pthread_kill(threading.main_thread().ident or 0, self._signal_number)
        if deadline:  # the pipe stays open: a late signal is still written to it
            time.sleep(max(0.0, deadline - time.monotonic()))
            self._exit()
        os.close(read_fd)

    def _exit(self) -> NoReturn:
        with suppress(OSError):  # the terminal may be closed
            os.write(2, f"{STOPPED_MESSAGE}\n".encode())  # sys.stderr may be locked by the code that hangs
        os._exit(128 + self._signal_number)


def reinstall_sigterm_handler() -> None:
    """Replace Prefect's SIGTERM handler, which raises at any place, by the handler of :class:`GracefulShutdown`.

    Prefect installs its handler while a flow runs. Outside of :class:`GracefulShutdown` that handler stays: a worker
    cancels runs with it.
    """
    for shutdown in _active_shutdowns:
        signal.signal(signal.SIGTERM, shutdown.handle)


def find_interrupt(error: BaseException | None) -> BaseException | None:
    """Return the KeyboardInterrupt or Prefect's TerminationSignal that caused an error; None if neither did.

    Libraries wrap an interrupt in their own errors: it is the cause or the context of the error, or in an exception
    group.
    """
    pending, seen = [error], set()
    while pending:
        candidate = pending.pop()
        if candidate is None or id(candidate) in seen:  # causes can form a cycle
            continue
        if isinstance(candidate, KeyboardInterrupt) or _is_prefect_termination(candidate):
            return candidate
        seen.add(id(candidate))
        pending += [candidate.__context__, candidate.__cause__]
        if isinstance(candidate, BaseExceptionGroup):
            pending += candidate.exceptions
    return None


def signal_number(interrupt: BaseException) -> int:
    """Return the signal that caused an interrupt which :func:`find_interrupt` found."""
    if isinstance(interrupt, Terminated):
        return interrupt.number
    return signal.SIGTERM if _is_prefect_termination(interrupt) else signal.SIGINT


def _is_prefect_termination(error: BaseException) -> bool:
    """Return whether Prefect's own SIGTERM handler raised this. Compares names, as importing Prefect takes seconds."""
    return type(error).__name__ == "TerminationSignal"
