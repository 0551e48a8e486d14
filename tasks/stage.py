"""The stage contract: a Prefect task whose output is a directory of files, found again by a key and described by a
manifest.

A stage is a function ``body(out, inputs…, config…)``; ``@stage("name")`` makes it a Prefect task that is called without
``out`` and with ``run=Run(…)`` in addition. Inputs are :class:`Ref`, in the body :class:`Output`. The task's own result
is only the Ref: the manifest on the store is the truth.
"""

import functools
import inspect
import json
import logging
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect import Task
from prefect.context import TaskRunContext
from prefect.results import get_result_store

from lm.corpus import Source
from lm.errors import UserError
from lm.execution import Execution
from tasks.output import FORMAT, MANIFEST, PAGE, Output, Ref, digest_of, open_output, read_output
from tasks.records import Latest, read
from tasks.source_digest import source_digests
from tasks.store import Store, describe_files

log = logging.getLogger(__name__)
# The parts of a mapped stage speak to their own task runs; in a terminal thousands of them would drown the rest.
part_log = logging.getLogger("tasks.parts")


class Stopped(Exception):
    """The run is being stopped, and with it this part of its work."""


@dataclass(frozen=True)
class Run:
    """What a stage is told about the run it is part of; never in a key."""

    root: str
    name: str
    refresh: frozenset[str] = frozenset()
    execution: Execution = field(default_factory=Execution)
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the run has failed or is cancelled: parts that still run in threads end early."""

    @functools.cached_property
    def store(self) -> Store:
        """The files below the root."""
        return Store(self.root)

    def __reduce__(self) -> tuple[type["Run"], tuple[Any, ...]]:
        return Run, (self.root, self.name, self.refresh, self.execution)  # on another machine, an event of its own


@dataclass
class Draft:
    """The output of a stage in the making: write files below ``directory`` and say the rest here."""

    directory: Path
    execution: Execution
    stopping: threading.Event
    unfinished: list[Path]
    """Directories of earlier attempts at this very output that did not finish or were damaged, the newest first."""
    damaged: set[Path] = field(default_factory=set)
    """Files in them that are known to be damaged; others may be."""
    sources: list[Source] = field(default_factory=list)
    """Input that is referred to and not copied."""
    records: list[str] = field(default_factory=list)
    """Files that tell of the run (timings, plots): kept and checked, but no part of the content."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Figures for the manifest, outside the content."""


class Stage:
    """A stage: its key, and how its output is made. ``task`` is the Prefect task over it.

    The versions of ``libraries`` decide the output too. ``page`` takes what the body takes, when that is done, and
    yields paragraphs of Markdown. ``run_name``, a format of the arguments, names the task runs of a stage that is
    mapped over parts. ``turn`` is entered before an output is made, and left when it is. ``options`` go to the task.
    """

    def __init__(
        self,
        name: str,
        body: Callable[..., None],
        libraries: tuple[str, ...] = (),
        page: Callable[..., Iterator[str]] | None = None,
        run_name: str | None = None,
        turn: Callable[[Execution], AbstractContextManager[Any]] = nullcontext,
        **options: Any,
    ) -> None:
        self.name = name
        self.libraries = libraries
        self.body = body
        self.page = page
        self.turn = turn
        self.log = part_log if run_name else log
        # Taken when the code is imported: what runs is that, even where a file is edited meanwhile.
        self.source = source_digests(inspect.getsourcefile(body) or "")
        self.signature = inspect.signature(body)
        parameters = list(self.signature.parameters.values())[1:]
        run = inspect.Parameter("run", inspect.Parameter.KEYWORD_ONLY, annotation=Run)

        def task_body(*args: Any, **kwargs: Any) -> dict[str, str]:
            return self.make(kwargs.pop("run"), self.named(args, kwargs))._asdict()

        functools.update_wrapper(task_body, body)
        task_body.__signature__ = inspect.Signature([*parameters, run])  # type: ignore[attr-defined]
        self.task: Task[..., dict[str, str]] = Task(
            task_body,
            name=name,
            task_run_name=run_name or name,
            cache_key_fn=self._prefect_key,
            persist_result=True,
            result_serializer="json",
            **options,
        )

    def _prefect_key(self, context: TaskRunContext, inputs: dict[str, Any]) -> str:
        """Prefect's cache key: the stage's own, with a one-time suffix where there is a record that must not count."""
        arguments = dict(inputs)
        run: Run = arguments.pop("run")
        ref = self.ref(arguments, run)
        key = f"{ref.stage}-{ref.key}"
        output = self.found(ref, run)
        if output:
            message = "%s is cached: run %s made it, and nothing that decides it has changed."
            self.log.info(message, self.name, output.manifest["made"]["run"])
            return key
        return f"{key}-{uuid.uuid4().hex}" if get_result_store().exists(key) else key

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """The arguments of a call by the names of the body's parameters."""
        arguments = self.signature.bind(None, *args, **(kwargs or {})).arguments
        return dict(list(arguments.items())[1:])

    def ingredients(self, arguments: dict[str, Any], run: Run) -> dict[str, Any]:
        """All that decides the output, by name: what the key is the digest of."""
        return {
            "format": FORMAT,
            "parameters": {name: _identity(value, run.store) for name, value in arguments.items()},
            "source": self.source,
            "libraries": {name: version(name) for name in self.libraries},
        }

    def ref(self, arguments: dict[str, Any], run: Run) -> Ref:
        """Where the output for these arguments is, or will be."""
        return self._ref(self.ingredients(arguments, run))

    def _ref(self, ingredients: dict[str, Any]) -> Ref:
        return Ref(self.name, digest_of({"stage": self.name, **ingredients}))

    def found(self, ref: Ref, run: Run) -> Output | None:
        """The output that is there, all its files intact; None where this run is asked to make it anew."""
        output = None if self._is_refreshed(run) else open_output(run.store, ref)
        return output if output and output.is_intact() else None

    def _is_refreshed(self, run: Run) -> bool:
        return self.name.removesuffix("-chunk") in run.refresh  # the parts of a mapped stage go with it

    def make(self, run: Run, arguments: dict[str, Any]) -> Ref:
        """Return the output for ``arguments``: the intact one on the store, or a new one."""
        ingredients = self.ingredients(arguments, run)
        ref = self._ref(ingredients)
        if not self.found(ref, run):
            with self.turn(run.execution):
                there = open_output(run.store, ref)  # which another run may have made meanwhile
                if self._is_refreshed(run) or not (there and there.is_intact()):
                    self.log.info("%s runs: %s.", self.name, self.reason(ref, there, ingredients, run))
                    self._make(ref, there, ingredients, run, arguments)
        return ref

    def _make(
        self, ref: Ref, there: Output | None, ingredients: dict[str, Any], run: Run, arguments: dict[str, Any]
    ) -> None:
        store = run.store
        attempt = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"
        unfinished = [] if self._is_refreshed(run) else store.workplaces(*ref)
        damaged = {Path(store.path(*there.place, name)) for name in there.damaged()} if there else set()
        draft = Draft(store.workplace(*ref, attempt), run.execution, run.stopping, unfinished, damaged)
        started, clock, cpu = time.time(), time.perf_counter(), time.thread_time()
        inputs = {name: _opened(value, store) for name, value in arguments.items()}
        with _blaming(self.name, inputs):
            self.body(draft, **inputs)
            seconds, cpu_seconds = time.perf_counter() - clock, time.thread_time() - cpu
            self._write_page(draft, inputs)
            files = {file["path"]: file for file in describe_files(draft.directory)}
            page = files.pop(PAGE, None)
            store.publish(draft.directory, *ref, attempt)
        manifest = {
            "stage": self.name,
            "format": FORMAT,
            "key": ref.key,
            "attempt": attempt,
            "ingredients": ingredients,
            "sources": [asdict(source) for source in draft.sources],
            "files": [file for path, file in files.items() if path not in draft.records],
            "records": [file for path, file in files.items() if path in draft.records],
            "page": page,
            "figures": draft.figures,
            "made": {
                "run": run.name,
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "started": round(started, 3),
                "seconds": round(seconds, 3),
                "cpu_seconds": round(cpu_seconds, 3),
                "host": platform.node(),
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "numpy", "regex", "pyarrow")},
            },
        }
        store.write_json(manifest, *ref, MANIFEST)
        store.write_json({"key": ref.key}, self.name, "latest.json")

    def _write_page(self, draft: Draft, inputs: dict[str, Any]) -> None:
        if self.page:
            try:
                (draft.directory / PAGE).write_text("\n\n".join(self.page(draft, **inputs)), encoding="utf-8")
            except (OSError, UserError) as error:  # the work is done and is worth more than its description
                log.warning("The page of %s could not be written: %s", self.name, error)
            except Exception:
                log.warning("The page of %s could not be made.", self.name, exc_info=True)

    def reason(self, ref: Ref, there: Output | None, ingredients: dict[str, Any], run: Run) -> str:
        """Why the output must be made, whatever is ``there``: a refresh, damage, or which ingredients changed since the
        last result."""
        if self._is_refreshed(run):
            return "a refresh was asked for"
        if there:
            return "its files are damaged or missing"
        if names := run.store.names(*ref):
            return "its manifest is damaged" if MANIFEST in names else "an earlier attempt has not finished"
        latest = read(Latest, run.store, self.name, "latest.json")
        before_last = latest and open_output(run.store, Ref(self.name, latest["key"]))
        if not before_last:
            return "it has no result yet"
        before, now = dict(_flat(before_last.manifest["ingredients"])), dict(_flat(ingredients))
        changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
        if changed == ["parameters.chunk"]:
            return "a chunk of text that is new"
        return f"changed since its last result: {', '.join(changed[:6])}{' …' if len(changed) > 6 else ''}"


def stage(name: str, **options: Any) -> Callable[[Callable[..., None]], Stage]:
    """Make a stage of a body; see the module's docstring, and :class:`Stage` for the options."""
    return lambda body: Stage(name, body, **options)


def _identity(value: Any, store: Store) -> Any:
    """What of an argument decides the output, as JSON: an upstream output's content, an object's ``identity``, a
    config's fields."""
    if isinstance(value, Ref):
        return {value.stage: read_output(store, value).digest}
    if hasattr(value, "identity"):
        return value.identity
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, (list, tuple)):
        return [_identity(item, store) for item in value]
    return value


def _opened(value: Any, store: Store) -> Any:
    if isinstance(value, Ref):
        return read_output(store, value)
    if isinstance(value, list):
        return [_opened(item, store) for item in value]
    return value


@contextmanager
def _blaming(name: str, inputs: dict[str, Any]) -> Iterator[None]:
    """Within it, a file system that fails is a user's to mend, and so are inputs that are damaged when it ends: what
    was made of them counts for nothing."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    values = [part for value in inputs.values() for part in (value if isinstance(value, list) else [value])]
    for output in (value for value in values if isinstance(value, Output) and value.store.is_local):
        if not output.is_intact():
            raise UserError(
                f"{output.url} was damaged while {name} read it; run the pipeline again, which makes both anew."
            ) from failure
    if isinstance(failure, OSError):
        raise UserError(f"{name} cannot go on: {failure}. What is finished is kept.") from failure
    if failure:
        raise failure


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Name and value of every leaf: what a person can be told has changed."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else key)
    else:
        yield name, json.dumps(value)
