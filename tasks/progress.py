"""Progress of long work: a bar in a terminal, and in Prefect's UI an artifact that moves."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext
from tqdm import tqdm

_INTERVAL = 1.0  # seconds between two updates of the artifact
_PAGE_INTERVAL = 60  # seconds between two pages


@contextmanager
def show_progress(
    title: str, total: int, unit: str, page: Callable[[], str] = lambda: ""
) -> Iterator[Callable[[int], None]]:
    """Show the progress of ``title``; the function given is told how many of ``total`` are done.

    Where output goes to a file the bar stays away. The artifact ``<title>-progress`` belongs to the run around, and so
    does ``<title>-so-far``, the Markdown that ``page`` makes when there is some. They are updated by a thread of its
    own, so that a slow or dead server never holds up the work.
    """
    done, ended = 0, threading.Event()

    def report() -> None:
        with contextlib.suppress(Exception):  # the artifact is for show
            shown, told, next_page, is_last = 0.0, "", time.monotonic() + _PAGE_INTERVAL, False
            description = f"{title}, {total:,} × {unit}"
            artifact: Any = create_progress_artifact(shown, key=f"{title}-progress", description=description)
            while not is_last:
                is_last = ended.wait(_INTERVAL)
                percent = 100.0 * done / total if total else 100.0
                if percent != shown:
                    update_progress_artifact(artifact, percent)
                    shown = percent
                if time.monotonic() >= next_page and not is_last:
                    with contextlib.suppress(Exception):
                        if (text := page()) and text != told:
                            create_markdown_artifact(text, key=f"{title}-so-far", description=f"{title}, so far")
                            told = text
                    next_page = time.monotonic() + _PAGE_INTERVAL

    if FlowRunContext.get() or TaskRunContext.get():
        threading.Thread(target=copy_context().run, args=(report,), daemon=True).start()
    with tqdm(total=total, desc=title, unit=unit, disable=None, leave=False, dynamic_ncols=True) as bar:

        def progress(number: int) -> None:
            nonlocal done
            done = number
            bar.update(number - bar.n)

        try:
            yield progress
        finally:
            ended.set()
