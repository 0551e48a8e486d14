"""Stop a training on a signal, or when its parent process ends, after it has saved."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lm.common.processes import STOP_SIGNALS
from lm.distributed.launch import INTERRUPTED_EXIT_CODE

_SAVE_SECONDS = 20.0  # to finish the step and save


@contextmanager
def stop_on_signals(stop_event: threading.Event, ignore_repeats: bool = False) -> Iterator[list[int]]:
    """Set ``stop_event`` on the first SIGINT, SIGTERM or SIGHUP; yield the list of received signals.

    The next signal has its previous effect, or none with ``ignore_repeats``. A signal that was ignored before stays
    ignored, as by nohup, or SIGINT in a background process of a script. Outside the main thread, which alone
    receives signals, this does nothing.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handle(number: int, frame: Any) -> None:
        if received and ignore_repeats:
            return
        if received:
            signal.signal(number, previous_handlers[signal.Signals(number)])
            signal.raise_signal(number)
        received.append(number)
        stop_event.set()

    previous_handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    previous_handlers = {number: old for number, old in previous_handlers.items() if old != signal.SIG_IGN}
    for number in previous_handlers:
        signal.signal(number, handle)
    try:
        yield received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def stop_with_parent(stop_event: threading.Event) -> None:
    """Wait until the parent process, which holds the other end of standard input, ends; then stop this process."""
    os.read(0, 1)  # sys.stdin has a lock that would block the exit of this process
    stop_event.set()
    time.sleep(_SAVE_SECONDS)
    os._exit(INTERRUPTED_EXIT_CODE)
