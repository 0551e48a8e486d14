"""The stage contract: a task whose output, a directory of files with a manifest, is reused while its key is the same.

A stage is a function ``body(out, inputs…, config…)``. The decorator ``@stage("name")`` makes it a :class:`Stage`. A
call of a stage has the same arguments without ``out``. Files of the root are passed as an
:class:`~tasks.runtime.output.Input`, such as a Ref; the body receives them open, such as an Output. The result of a
call is only a Ref: whether the output exists, and what is in it, is read from its manifest.
:mod:`flows.executor` runs calls as Prefect tasks.
"""

import functools
import inspect
import json
import logging
import platform
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from lm.common.errors import Stopped, StorageError, TransientError, UserError
from lm.hardware.memory import release_free_memory
from tasks.runtime.code_version import (
    check_not_edited,
    code_identity,
    edited_modules,
    find_modules,
    module_digests,
    stage_digest,
)
from tasks.runtime.execution import Execution
from tasks.runtime.locks import check_lease, hold_output_lease, lock_output
from tasks.runtime.output import (
    FORMAT,
    MANIFEST,
    PAGE,
    Input,
    Output,
    Ref,
    intact_digest,
    json_digest,
    open_output,
)
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.schemas import LatestOutput, read_record
from tasks.runtime.store import LOCK_FILE, Store, describe_files

log = logging.getLogger(__name__)

_RELEASES_MEMORY_AFTER = 1.0  # seconds of a stage or group: it takes milliseconds
_MAX_CHANGES = 4  # that the reason of a run names
_MAX_VALUE_LENGTH = 30  # characters of JSON of a changed parameter
group_log = logging.getLogger("tasks.groups")  # of stages mapped over groups: too many lines for a terminal
_library_version = functools.cache(metadata.version)


@dataclass(eq=False)
class Stage:
    """A stage: the key of its output, the look-up by that key, and the making of a missing output."""

    name: str
    body: Callable[..., None]
    page: Callable[..., Iterator[str]] | None = None
    """Yields the paragraphs of the output's Markdown page. Takes the arguments of the body, after the body."""
    is_mapped: bool = False
    """Whether the stage is called for each group of chunks."""
    slot: Callable[[RunContext], AbstractContextManager[Any]] = nullcontext
    """Context manager that is held while an output is made."""
    at_once: Callable[[Execution], int] | None = None
    """How many calls of a mapped stage run in threads at the same time. Default: ``execution.workers``."""
    is_resumable: bool = False
    """Whether the body can resume an unfinished attempt. Failed attempts of other stages are deleted."""
    is_retried: Callable[[Output], bool] | None = None
    """Whether an output holds a failure, which each later run tries again. Default: none does."""
    runs: tuple[str, ...] = ()
    """Modules that the stage runs although no import names them, such as those that a job file names."""

    def __post_init__(self) -> None:
        self.file = inspect.getsourcefile(self.body) or ""
        self.signature = inspect.signature(self.body)
        self.log = group_log if self.is_mapped else log
        self.__module__ = self.body.__module__  # where pickle finds the stage

    def __reduce__(self) -> str:
        # Pickled by reference: a worker of a cluster imports the stage from its own code.
        return self.body.__qualname__

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a call by parameter name, without ``out``."""
        return dict(list(self.signature.bind(None, *args, **kwargs).arguments.items())[1:])

    @functools.cached_property
    def modules(self) -> dict[str, Path]:
        """Name and file of each module of the project that the stage runs."""
        return find_modules(self.file, *self.runs)

    @functools.cached_property
    def code(self) -> dict[str, str]:
        """Digests of these modules at the first use of the stage."""
        return module_digests(self.modules)

    @functools.cached_property
    def code_digest(self) -> str:
        """Digest of these modules together, also at the first use of the stage."""
        return stage_digest(self.modules)

    def code_ingredients(self) -> dict[str, Any]:
        """Return the ingredients of a key besides the parameters: the versions of the format and the code. Libraries
        whose versions decide an output are parameters of its stage; the empty field is in the keys of older roots."""
        return {"format": FORMAT, "code": code_identity(self.name, self.code_digest), "libraries": {}}

    def key(self, run: RunContext, arguments: dict[str, Any]) -> tuple[Ref, dict[str, Any]]:
        """Return the Ref of an output and the ingredients of its key: everything that decides the content."""
        parameters = {name: _identity(value, run) for name, value in arguments.items()}
        ingredients = {"parameters": parameters, **self.code_ingredients()}
        return Ref(self.name, json_digest({"stage": self.name, **ingredients})), ingredients

    def _refresh_reason(self, run: RunContext, ref: Ref) -> str:
        """Return why an output has to be made although it is cached: once in a run. Empty if it has not."""
        if ref in run.made:
            return ""
        if self.name.partition("-")[0] in run.refresh:  # a whole stage includes its groups and sums
            return " again (--refresh)"
        is_failure = self.is_retried and (output := open_output(run.store, ref)) and self.is_retried(output)
        return " again: its last result is a failure" if is_failure else ""

    def _is_cached(self, run: RunContext, ref: Ref) -> bool:
        """Return whether an output is finished, all its files are intact, and it is not to be made again."""
        digest = None if self._refresh_reason(run, ref) else intact_digest(run.store, ref)
        if digest:
            run.digests[ref] = digest
        return digest is not None

    def look_up(self, run: RunContext, calls: Sequence[dict[str, Any]]) -> list[tuple[Ref, bool]]:
        """Return the Ref of each call's output, and whether it is cached."""
        refs = [self.key(run, arguments)[0] for arguments in calls]
        return list(zip(refs, run.store.map(lambda ref: self._is_cached(run, ref), refs), strict=True))

    def materialize(self, run: RunContext, arguments: dict[str, Any]) -> tuple[Ref, bool]:
        """Make an output unless it is cached. Return its Ref, and whether it was cached."""
        ref, ingredients = self.key(run, arguments)
        if not self._is_cached(run, ref):
            has_lease = run.lease and not run.store.is_local
            with (  # keep threads, processes, and machines that share the root from the same work
                lock_output(run.store.local_directory(*ref, LOCK_FILE), self.name, run.stopping),
                hold_output_lease(run, *ref, name=self.name) if has_lease else nullcontext(),
                self.slot(run),
            ):
                if not self._is_cached(run, ref):  # another run may have made it in the meantime
                    check_not_edited(self.modules, self.code)
                    if not self._combines_new_parts(run, arguments):  # else the log says already what runs, and why
                        self.log.info(
                            "Running %s%s.", self.name, "" if self.is_mapped else self.explain(run, arguments)
                        )
                    with self._attempt(run, ref, ingredients, arguments) as (out, inputs):
                        self.body(out, **inputs)
                    run.made.add(ref)
                    return ref, False
        self.log.info("%s: cached.", self.name)
        return ref, True

    def _combines_new_parts(self, run: RunContext, arguments: dict[str, Any]) -> bool:
        """Return whether this run made outputs of the mapped stage whose outputs this stage combines."""
        items = [item for value in arguments.values() if isinstance(value, list) for item in value]
        parts = [item for item in items if isinstance(item, Ref) and item.stage.startswith(f"{self.name}-")]
        return any(part in run.made for part in parts)

    @contextmanager
    def _attempt(
        self, run: RunContext, ref: Ref, ingredients: dict[str, Any], arguments: dict[str, Any]
    ) -> Iterator[tuple[Attempt, dict[str, Any]]]:
        """Yield a new attempt and the inputs of the body. Then publish the files, and write the manifest last."""
        store = run.store
        started, clock, cpu_clock = time.time(), time.perf_counter(), time.thread_time()
        opened: list[tuple[Input, Any]] = []
        inputs = {name: open_input(value, store, opened) for name, value in arguments.items()}
        for item, output in opened:
            if isinstance(item, Ref) and item.identity(run) != {item.stage: output.digest}:
                raise UserError(f"{output.url} changed while this run waited; run the same command again.")
        out = self._new_attempt(run, ref)
        try:
            with _translate_errors(self.name, store, opened):
                yield out, inputs
                seconds, cpu_seconds = time.perf_counter() - clock, time.thread_time() - cpu_clock
                if seconds > _RELEASES_MEMORY_AFTER:
                    release_free_memory()
                self._write_page(out, inputs)
                files = describe_files(out.directory)
                etags = store.publish(out.directory, files, *out.place)
        except BaseException:
            if not self.is_resumable:
                shutil.rmtree(out.directory, ignore_errors=True)
            raise
        manifest = {
            "stage": self.name,
            "format": FORMAT,
            "key": ref.key,
            "attempt": out.place[-1],
            "ingredients": ingredients,
            "sources": [asdict(source) for source in out.sources],
            "files": [file for file in files if file["path"] not in (PAGE, *out.records)],
            "records": [file for file in files if file["path"] in out.records],
            "page": next((file for file in files if file["path"] == PAGE), None),
            "etags": etags,
            "figures": out.figures,
            "made": {
                "run": run.name,
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "started": round(started, 3),
                "seconds": round(seconds, 3),
                "cpu_seconds": round(cpu_seconds, 3),
                "host": platform.node(),
                "python": platform.python_version(),
                **{name: _library_version(name) for name in ("torch", "numpy", "regex", "pyarrow")},
            },
        }
        check_lease(run)
        store.write_json(manifest, *ref, MANIFEST)
        if not self.is_mapped:
            self.note_latest(run, ref)

    def _new_attempt(self, run: RunContext, ref: Ref) -> Attempt:
        """Create the directory of a new attempt, and find those that it may resume."""
        newer_than, unfinished, damaged, place = "", [], set(), (*ref, new_attempt_name())
        if self.is_resumable:
            if previous := open_output(run.store, ref):
                # A refresh resumes only attempts that began after the finished one: those of an interrupted refresh.
                newer_than = previous.manifest["attempt"] if self._refresh_reason(run, ref) else ""
                directory = run.store.local_directory(*previous.location)
                damaged = {directory / name for name in previous.find_damaged()}
            unfinished = run.store.attempt_directories(*ref, newer_than=newer_than)
        return Attempt(run, place, run.store.create_attempt_directory(*place), unfinished, damaged, newer_than)

    def note_latest(self, run: RunContext, ref: Ref) -> None:
        """Remember the last output that was made, to tell later why the stage runs again."""
        run.store.write_json({"key": ref.key}, self.name, "latest.json")

    def _write_page(self, out: Attempt, inputs: dict[str, Any]) -> None:
        if not self.page:
            return
        try:
            (out.directory / PAGE).write_text("\n\n".join(self.page(out, **inputs)), encoding="utf-8")
        except Exception as error:  # the output is finished, and is worth more than its page
            is_expected = isinstance(error, (OSError, UserError))
            log.warning("The page of %s could not be made: %s", self.name, error, exc_info=not is_expected)

    def explain(self, run: RunContext, arguments: dict[str, Any]) -> str:
        """Return why this stage must run, as the end of a sentence: for example, the parameters that changed. Empty if
        it has no result yet."""
        ref, ingredients = self.key(run, arguments)
        if reason := self._refresh_reason(run, ref):
            return reason
        if open_output(run.store, ref):
            return " again: its files are damaged or missing"
        if names := [name for name in run.store.list_names(*ref) if name != LOCK_FILE]:
            return " again: its manifest is damaged" if MANIFEST in names else ": an earlier attempt did not finish"
        latest = read_record(LatestOutput, run.store, self.name, "latest.json")
        previous = latest and open_output(run.store, Ref(self.name, latest["key"]))
        if not previous:
            return ""
        before, now = dict(_flatten(previous.manifest["ingredients"])), dict(_flatten(ingredients))
        changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
        described = [_describe_change(name, before.get(name), now.get(name)) for name in changed if name[:5] != "code."]
        texts = list(dict.fromkeys(described))
        if len(described) < len(changed):
            edited = edited_modules(self.code) if "code.digest" in changed else []
            texts.append(f"edited {', '.join(edited)}" if edited else "another version of its code")
        more = f" and {len(texts) - _MAX_CHANGES} more" if len(texts) > _MAX_CHANGES else ""
        return f": {', '.join(texts[:_MAX_CHANGES])}{more}"


def _describe_change(name: str, before: str | None, now: str | None) -> str:
    """Return what changed of an ingredient: ``steps 300 → 2000``. ``before`` and ``now`` are JSON; None: missing."""
    if name == "parameters.group":
        return "new text"
    name = name.removeprefix("parameters.").removeprefix("config.")
    digests = [value for value in (before, now) if value and re.fullmatch('"[0-9a-f]{64}"', value)]
    if digests:
        return f"new content of {name.rpartition('.')[2]}"
    values = [value or "unset" for value in (before, now)]
    if max(map(len, values)) <= _MAX_VALUE_LENGTH:
        return f"{name} {' → '.join(values)}"
    return "new text" if any(re.search('"[0-9a-f]{64}"', value) for value in values) else f"another {name}"


def new_attempt_name() -> str:
    """Return the name of a new attempt: its start, and a random part."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"


def stage(name: str, **options: Any) -> Callable[[Callable[..., None]], Stage]:
    """Make a function the body of a :class:`Stage`; the options are the fields of that class."""
    return lambda body: Stage(name, body, **options)


def _identity(value: Any, run: RunContext) -> Any:
    """Return the part of an argument that decides the output, as JSON: of an :class:`Input` the content, of a config
    its ``identity`` or else its fields, each by the same rule."""
    if isinstance(value, Input):
        return value.identity(run)
    if hasattr(value, "identity"):
        return value.identity
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _identity(getattr(value, field.name), run) for field in fields(value)}
    if isinstance(value, dict):
        return {name: _identity(item, run) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return run.store.map(lambda item: _identity(item, run), value)
    return value


def open_input(value: Any, store: Store, opened: list[tuple[Input, Any]] | None = None) -> Any:
    """Return an argument as the body takes it: each :class:`Input` is opened, and noted with its result in the list."""
    if isinstance(value, list):
        return store.map(lambda item: open_input(item, store, opened), value)
    if not isinstance(value, Input):
        return value
    result = value.open(store)
    if opened is not None:
        opened.append((value, result))
    return result


@contextmanager
def _translate_errors(name: str, store: Store, opened: Sequence[tuple[Input, Any]]) -> Iterator[None]:
    """Raise StorageError for an OSError, and if an input changed while the stage read it.

    Without a failure, only the files of outputs on a local root are checked: they are read in place. Copies of files of
    a remote root are checked when they are downloaded, and a text when the end of a range is read.
    """
    failure: Exception | None = None
    try:
        yield
    except (Stopped, TransientError):
        raise
    except Exception as error:
        failure = error
    for item, value in opened:
        is_read_in_place = store.is_local and isinstance(item, Ref)
        if (failure or is_read_in_place) and (url := item.find_damaged_url(store, value)):
            raise StorageError(
                f"{url} changed or was damaged while {name} read it. Run the pipeline again."
            ) from failure
    if isinstance(failure, OSError):
        raise StorageError(f"{name} cannot continue: {failure}. Finished outputs are kept.") from failure
    if failure:
        raise failure


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, JSON) of each leaf of nested dicts."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}" if name else key)
    else:
        yield name, json.dumps(value)
