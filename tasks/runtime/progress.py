"""Progress of long work: a bar in the terminal, and artifacts in Prefect's UI."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from tqdm import tqdm

_UPDATE_SECONDS = 1.0
_PAGE_SECONDS = 60


@contextmanager
def show_progress(
    title: str, total: int, unit: str, label: str, page: Callable[[], str] = lambda: ""
) -> Iterator[Callable[[int], None]]:
    """Show the progress of ``title``. Yields a function to call with the number of units that are done so far.

    ``total`` is the number of all units. A terminal shows a bar; a log file shows none. In a Prefect
    run, two artifacts are updated: ``<label>-<title>-progress`` shows the percentage, and ``<label>-<title>-so-far``
    shows the Markdown that ``page`` returns. A separate thread updates them, so a slow or dead server does not delay
    the work.
    """
    # Imported here, as a look-up of outputs does not need Prefect.
    from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
    from prefect.context import FlowRunContext, TaskRunContext

    done, ended = 0, threading.Event()
    key = f"{label}-{title}".replace("_", "-")  # Prefect's keys have no underscores

    def update_artifacts() -> None:
        with contextlib.suppress(Exception):  # a failing artifact must not fail the work
            shown_percent, shown_page, page_time, is_last = 0.0, "", time.monotonic() + _PAGE_SECONDS, False
            description = f"{title}, {total:,} × {unit}"
            artifact: Any = create_progress_artifact(0.0, key=f"{key}-progress", description=description)
            while not is_last:
                is_last = ended.wait(_UPDATE_SECONDS)
                percent = 100.0 * done / total if total else 100.0
                if percent != shown_percent:
                    update_progress_artifact(artifact, percent)
                    shown_percent = percent
                if time.monotonic() >= page_time and not is_last:
                    with contextlib.suppress(Exception):
                        if (text := page()) and text != shown_page:
                            create_markdown_artifact(text, key=f"{key}-so-far", description=f"{title}, so far")
                            shown_page = text
                    page_time = time.monotonic() + _PAGE_SECONDS

    if FlowRunContext.get() or TaskRunContext.get():
        threading.Thread(target=copy_context().run, args=(update_artifacts,), daemon=True).start()
    with tqdm(total=total, desc=title, unit=unit, disable=None, leave=False, dynamic_ncols=True) as bar:

        def progress(number: int) -> None:
            nonlocal done
            done = number
            bar.update(number - bar.n)

        try:
            yield progress
        finally:
            ended.set()
