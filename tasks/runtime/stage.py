"""The stage contract: a task whose output is a directory of files with a key and a manifest.

A stage is a function ``body(out, inputs…, config…)``. The decorator ``@stage("name")`` makes it a :class:`Stage`. A
call of a stage has the same arguments without ``out``. An input is passed as a :class:`Ref`; the body receives the
:class:`Output`. The result of a call is only a Ref: whether the output exists, and what is in it, is read from its
manifest. :mod:`flows.executor` runs calls as Prefect tasks.
"""

import functools
import inspect
import json
import logging
import platform
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
from tasks.runtime.code_version import (
    check_not_edited,
    code_identity,
    edited_modules,
    find_modules,
    module_digests,
    stage_digest,
)
from tasks.runtime.context import Attempt, RunContext
from tasks.runtime.execution import Execution
from tasks.runtime.lease import check_lease, hold_output_lease
from tasks.runtime.output import (
    FORMAT,
    MANIFEST,
    PAGE,
    Output,
    Ref,
    intact_digest,
    json_digest,
    open_output,
    read_output,
)
from tasks.runtime.root_lock import lock_output
from tasks.runtime.schemas import LatestOutput, read_record
from tasks.runtime.store import LOCK_FILE, Store, describe_files

log = logging.getLogger(__name__)
group_log = logging.getLogger("tasks.groups")  # of stages mapped over groups: too many lines for a terminal
_library_version = functools.cache(metadata.version)


@dataclass(eq=False)
class Stage:
    """A stage: the key of its output, the look-up by that key, and the making of a missing output."""

    name: str
    body: Callable[..., None]
    libraries: tuple[str, ...] = ()
    """Libraries whose versions enter the key."""
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
        return find_modules(self.file)

    @functools.cached_property
    def code(self) -> dict[str, str]:
        """Digests of these modules at the first use of the stage."""
        return module_digests(self.modules)

    @functools.cached_property
    def code_digest(self) -> str:
        """Digest of these modules together, also at the first use of the stage."""
        return stage_digest(self.modules)

    def code_ingredients(self) -> dict[str, Any]:
        """Return the ingredients of a key besides the parameters: the versions of the format, code and libraries."""
        return {
            "format": FORMAT,
            "code": code_identity(self.name, self.code_digest),
            "libraries": {name: _library_version(name) for name in self.libraries},
        }

    def _key(self, run: RunContext, arguments: dict[str, Any]) -> tuple[Ref, dict[str, Any]]:
        """Return the Ref of an output and the ingredients of its key: everything that decides the content."""
        parameters = {name: _identity(value, run) for name, value in arguments.items()}
        ingredients = {"parameters": parameters, **self.code_ingredients()}
        return Ref(self.name, json_digest({"stage": self.name, **ingredients})), ingredients

    def _is_refreshed(self, run: RunContext, ref: Ref) -> bool:
        """Return whether an output has to be made although it is cached: once in a run."""
        return ref not in run.made and (self._is_in_refresh(run) or self._holds_failure(run, ref))

    def _is_in_refresh(self, run: RunContext) -> bool:
        return self.name.partition("-")[0] in run.refresh  # a whole stage includes its groups and sums

    def _holds_failure(self, run: RunContext, ref: Ref) -> bool:
        output = open_output(run.store, ref) if self.is_retried else None
        return bool(output and self.is_retried and self.is_retried(output))

    def _cached_output(self, run: RunContext, ref: Ref) -> Output | None:
        output = None if self._is_refreshed(run, ref) else open_output(run.store, ref)
        return output if output and output.is_intact() else None

    def look_up(self, run: RunContext, calls: Sequence[dict[str, Any]]) -> list[tuple[Ref, bool]]:
        """Return the Ref of each call's output, and whether it is cached: finished, and all its files intact."""
        refs = [self._key(run, arguments)[0] for arguments in calls]
        digests = run.store.map(
            lambda ref: None if self._is_refreshed(run, ref) else intact_digest(run.store, ref), refs
        )
        run.digests.update((ref, digest) for ref, digest in zip(refs, digests, strict=True) if digest)
        return [(ref, digest is not None) for ref, digest in zip(refs, digests, strict=True)]

    def materialize(self, run: RunContext, arguments: dict[str, Any]) -> tuple[Ref, bool]:
        """Make an output unless it is cached. Return its Ref, and whether it was cached."""
        ref, ingredients = self._key(run, arguments)
        output = self._cached_output(run, ref)
        if not output:
            with self._lock(run, ref), self.slot(run):
                output = self._cached_output(run, ref)  # another run may have made it in the meantime
                if not output:
                    check_not_edited(self.modules, self.code)
                    if self.is_mapped:
                        self.log.info("%s runs.", self.name)
                    else:
                        self.log.info("%s runs: %s.", self.name, self._explain(run, ref, ingredients))
                    self._make(run, ref, ingredients, arguments)
                    run.made.add(ref)
                    return ref, False
        message = "%s is cached: run %s made it, and nothing that decides it has changed."
        self.log.info(message, self.name, output.manifest["made"]["run"])
        return ref, True

    @contextmanager
    def _lock(self, run: RunContext, ref: Ref) -> Iterator[None]:
        """Keep other threads and processes of this machine, and machines that share the root, from the same work."""
        has_lease = run.lease and not run.store.is_local
        with (
            lock_output(run.store.lock_file(*ref), self.name, run.stopping),
            hold_output_lease(run, *ref, name=self.name) if has_lease else nullcontext(),
        ):
            yield

    def _make(self, run: RunContext, ref: Ref, ingredients: dict[str, Any], arguments: dict[str, Any]) -> None:
        """Run the body in a new attempt directory, publish the files, and write the manifest last."""
        store, previous = run.store, open_output(run.store, ref)
        # A refresh resumes only attempts that began after the finished one: those of an interrupted refresh.
        newer_than = previous.manifest["attempt"] if previous and self._is_refreshed(run, ref) else ""
        unfinished = store.attempt_directories(*ref, newer_than=newer_than) if self.is_resumable else []
        damaged = (
            {store.local_directory(*previous.location) / name for name in previous.find_damaged()}
            if previous
            else set()
        )
        started, clock, cpu_clock = time.time(), time.perf_counter(), time.thread_time()
        inputs = {name: open_input(value, store) for name, value in arguments.items()}
        _check_inputs(inputs, ingredients["parameters"])
        attempt = new_attempt_name()
        directory, url = store.create_attempt_directory(*ref, attempt), store.url(*ref, attempt)
        out = Attempt(directory, url, run, unfinished, damaged, newer_than)
        try:
            with _translate_errors(self.name, store, arguments, inputs):
                self.body(out, **inputs)
                seconds, cpu_seconds = time.perf_counter() - clock, time.thread_time() - cpu_clock
                self._write_page(out, inputs)
                files = describe_files(out.directory)
                etags = store.publish(out.directory, files, *ref, attempt)
        except BaseException:
            if not self.is_resumable:
                shutil.rmtree(out.directory, ignore_errors=True)
            raise
        manifest = {
            "stage": self.name,
            "format": FORMAT,
            "key": ref.key,
            "attempt": attempt,
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
        """Return why this stage must run, for the log: for example, the names of the parameters that changed."""
        return self._explain(run, *self._key(run, arguments))

    def _explain(self, run: RunContext, ref: Ref, ingredients: dict[str, Any]) -> str:
        if self._is_refreshed(run, ref):
            return "a refresh was asked for" if self._is_in_refresh(run) else "its last result is a failure"
        if open_output(run.store, ref):
            return "its files are damaged or missing"
        if names := [name for name in run.store.list_names(*ref) if name != LOCK_FILE]:
            return "its manifest is damaged" if MANIFEST in names else "an earlier attempt has not finished"
        latest = read_record(LatestOutput, run.store, self.name, "latest.json")
        previous = latest and open_output(run.store, Ref(self.name, latest["key"]))
        if not previous:
            return "it has no result yet"
        before, now = dict(_flatten(previous.manifest["ingredients"])), dict(_flatten(ingredients))
        changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
        if changed == ["parameters.group"]:
            return "new text"
        if "code.digest" in changed and (edited := edited_modules(self.code)):
            changed[changed.index("code.digest") : changed.index("code.digest") + 1] = [
                f"code.{name}" for name in edited
            ]
        return f"changed since its last result: {', '.join(changed[:6])}{' …' if len(changed) > 6 else ''}"


def new_attempt_name() -> str:
    """Return the name of a new attempt: its start, and a random part."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"


def stage(name: str, **options: Any) -> Callable[[Callable[..., None]], Stage]:
    """Make a function the body of a :class:`Stage`; the options are the fields of that class."""
    return lambda body: Stage(name, body, **options)


def _identity(value: Any, run: RunContext) -> Any:
    """Return the part of an argument that decides the output, as JSON: an input's content digest, an object's
    ``identity``, or the fields of a config."""
    if isinstance(value, Ref):
        if value not in run.digests:
            run.digests[value] = intact_digest(run.store, value) or read_output(run.store, value).digest
        return {value.stage: run.digests[value]}
    if hasattr(value, "identity") or (is_dataclass(value) and not isinstance(value, type)):
        return _config_identity(value)
    if isinstance(value, (list, tuple)):
        return run.store.map(lambda item: _identity(item, run), value)
    return value


def _config_identity(value: Any) -> Any:
    """Return the ``identity`` of an object, or the fields of a config, each by the same rule."""
    if hasattr(value, "identity"):
        return value.identity
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _config_identity(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {name: _config_identity(item) for name, item in value.items()}
    return [_config_identity(item) for item in value] if isinstance(value, (list, tuple)) else value


def open_input(value: Any, store: Store) -> Any:
    """Return an argument as the body takes it: a Ref becomes an Output, and a group of chunks its ranges."""
    if isinstance(value, Ref):
        return read_output(store, value)
    if hasattr(value, "open"):
        return value.open(store)
    if isinstance(value, list):
        return store.map(lambda item: open_input(item, store), value)
    return value


def _check_inputs(inputs: dict[str, Any], parameters: dict[str, Any]) -> None:
    """Raise UserError if an output that was opened is not the one in the key: another run may have refreshed it."""
    for name, value in inputs.items():
        items, identities = (value, parameters[name]) if isinstance(value, list) else ([value], [parameters[name]])
        for item, identity in zip(items, identities, strict=False):  # of ranges, the identity is one digest
            if isinstance(item, Output) and identity != {item.ref.stage: item.digest}:
                raise UserError(f"{item.url} changed while this run waited; run the same command again.")


@contextmanager
def _translate_errors(name: str, store: Store, arguments: dict[str, Any], inputs: dict[str, Any]) -> Iterator[None]:
    """Raise StorageError for an OSError, and if an input changed while the stage read it."""
    failure: Exception | None = None
    try:
        yield
    except (Stopped, TransientError):
        raise
    except Exception as error:
        failure = error
    if url := _find_damaged_input(store, arguments, inputs, failure is not None):
        raise StorageError(f"{url} changed or was damaged while {name} read it. Run the pipeline again.") from failure
    if isinstance(failure, OSError):
        raise StorageError(f"{name} cannot continue: {failure}. Finished outputs are kept.") from failure
    if failure:
        raise failure


def _find_damaged_input(store: Store, arguments: dict[str, Any], inputs: dict[str, Any], has_failed: bool) -> str:
    """Return the path or URL of an input file that has changed; empty if there is none.

    Without a failure, only the files of a local root are checked: they are read in place. Copies of files of a remote
    root are checked when they are downloaded, and a text when the end of a range is read.
    """
    outputs = [item for item in _flat(inputs) if isinstance(item, Output)] if has_failed or store.is_local else []
    if url := next(filter(None, (output.find_damaged_url() for output in outputs)), ""):
        return url
    groups = [item for item in _flat(arguments) if hasattr(item, "find_damaged_url")] if has_failed else []
    return next(filter(None, (group.find_damaged_url(store) for group in groups)), "")


def _flat(values: dict[str, Any]) -> list[Any]:
    return [item for value in values.values() for item in (value if isinstance(value, list) else [value])]


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, JSON) of each leaf of nested dicts."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}" if name else key)
    else:
        yield name, json.dumps(value)
