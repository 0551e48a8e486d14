"""The run that a stage belongs to, and one attempt to make the output of a stage."""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm.text.sources import Source
from tasks.runtime.execution import Execution
from tasks.runtime.store import Store


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
    label: str = "textmill"
    """Prefix of the keys of the run's Prefect artifacts. Other roots and configurations have other labels."""
    lease: str = ""
    """Name of the run's lease, see :mod:`tasks.runtime.lease`. Empty: locks of the operating system suffice."""
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

    def __reduce__(self) -> tuple[Callable[..., "RunContext"], tuple[Any, ...]]:
        # An event cannot be pickled. A worker of a cluster gets its own, which the run's lease sets.
        copy = functools.partial(RunContext, label=self.label, lease=self.lease, is_worker=True)
        return copy, (self.root, self.name, self.refresh, self.execution)


@dataclass
class Attempt:
    """One attempt to make an output. The body writes files below ``directory`` and sets the fields with a default."""

    directory: Path
    url: str
    """Path or URL below the root where the files will be."""
    run: RunContext
    unfinished: list[Path]
    """Directories of earlier attempts at the same output that are unfinished or damaged, newest first."""
    damaged: set[Path]
    """Files in these directories that are known to be damaged. Others may be damaged too."""
    newer_than: str = ""
    """Name of the finished attempt that a refresh replaces: it resumes only newer ones. Empty: it resumes any."""
    sources: list[Source] = field(default_factory=list)
    """Input files that the output refers to and does not copy."""
    records: list[str] = field(default_factory=list)
    """Files that describe the run, such as timings and plots. They are checked but are not content."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Figures for the manifest. They are not content."""

    @property
    def stage(self) -> str:
        """Name of the stage."""
        return self.directory.parts[-3]
