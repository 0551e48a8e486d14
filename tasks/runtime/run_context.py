"""The run that a stage belongs to, one attempt to make the output of a stage, and the progress of long work."""

import contextlib
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lm.text.sources import Source
from tasks.runtime.execution import Execution
from tasks.runtime.store import Store

_UPDATE_SECONDS = 10.0  # each update is a line of prefect deployment run --watch
_PAGE_SECONDS = 60


@dataclass(frozen=True)
class RunContext:
    """The run that a stage belongs to. Nothing in it enters a key."""

    root: str
    name: str
    refresh: frozenset[str] = frozenset()
    """Stages that run even if their output is cached."""
    execution: Execution = field(default_factory=Execution)
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the run fails or is cancelled. Work in threads then ends early."""
    lease: str = ""
    """Name of the run's lease, see :mod:`tasks.runtime.locks`. Empty: locks of the operating system suffice."""
    digests: dict[tuple[str, str], str] = field(default_factory=dict, compare=False)
    """Content digests of the outputs that this run has checked or used, by their Refs."""
    made: set[tuple[str, str]] = field(default_factory=set, compare=False)
    """Refs of the outputs that this run has made: a refresh makes each once."""
    is_worker: bool = False
    """Whether this is the copy of the run in a worker of a cluster."""

    @functools.cached_property
    def store(self) -> Store:
        """The store that reads and writes the files of this run's root."""
        return Store(self.root, is_full=self.execution.verify == "full")

    @property
    def label(self) -> str:
        """The start of the keys of the run's Prefect artifacts: its name, in the characters that Prefect allows."""
        return re.sub("[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def __reduce__(self) -> tuple[Callable[..., "RunContext"], tuple[Any, ...]]:
        # An event cannot be pickled. A worker of a cluster gets its own, which the run's lease sets.
        copy = functools.partial(RunContext, lease=self.lease, is_worker=True)
        return copy, (self.root, self.name, self.refresh, self.execution)


@dataclass
class Attempt:
    """One attempt to make an output. The body writes files below ``directory`` and sets the fields with a default."""

    run: RunContext
    place: tuple[str, str, str]
    """Stage, key and name of the attempt: the path of the files below the root."""
    directory: Path
    """The local directory of the files: in place on a local root, otherwise an upload directory."""
    unfinished: list[Path]
    """Directories of earlier attempts at the same output that are unfinished or damaged, newest first."""
    damaged: set[Path]
    """Files in these directories that are known to be damaged. Others may be damaged too."""
    newer_than: str
    """Name of the finished attempt that a refresh replaces: it resumes only newer ones. Empty: it resumes any."""
    sources: list[Source] = field(default_factory=list)
    """Input files that the output refers to and does not copy."""
    records: list[str] = field(default_factory=list)
    """Files that describe the run, such as timings and plots. They are checked but are not content."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Figures for the manifest. They are not content."""

    def write_json(self, name: str, content: Any, **options: Any) -> None:
        """Write a JSON file. ``options``: see :func:`json.dumps`."""
        (self.directory / name).write_text(json.dumps(content, **options), encoding="utf-8")

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file that the body wrote."""
        return json.loads((self.directory / name).read_text(encoding="utf-8"))


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
    from prefect import get_client
    from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
    from prefect.client.schemas.actions import ArtifactUpdate
    from prefect.context import FlowRunContext, TaskRunContext

    done, ended = 0, threading.Event()
    key = f"{label}-{title}".replace("_", "-")  # Prefect's keys have no underscores

    def update_artifacts() -> None:
        with contextlib.suppress(Exception):  # a failing artifact must not fail the work
            shown_percent, shown_page, page_time, is_last = 0.0, "", time.monotonic() + _PAGE_SECONDS, False
            description = f"{title}, {total:,} × {unit}"
            so_far: Any = None
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
                            if not so_far:
                                so_far = create_markdown_artifact(text, f"{key}-so-far", f"{title}, so far")
                            else:  # in its place, so that the run's list of artifacts has it once
                                with get_client(sync_client=True) as client:
                                    client.update_artifact(so_far, ArtifactUpdate(data=text))
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
