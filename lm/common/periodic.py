"""Run an action every few seconds in a background thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
