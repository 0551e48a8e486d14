"""List the outputs and run records below a root, and the files that do not belong to them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lm.common.errors import TransientError, UserError
from tasks.runtime.gate_ledger import LEDGER
from tasks.runtime.locks import is_locked
from tasks.runtime.output import MANIFEST, Output, Ref, open_output
from tasks.runtime.schemas import (
    ATTEMPT_NAME,
    RUN_NAME,
    STAGE_NAME,
    GateEntry,
    LatestOutput,
    RunRecord,
    SourceRecord,
    read_record,
)
from tasks.runtime.store import LEASES, LOCK_FILE, Store

_TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{32}\.tmp")


class Finding(NamedTuple):
    """A path below a root that is not as a finished run leaves it."""

    kind: str
    """``damaged``: a run that needs it makes it again. ``unfinished``: a training may resume from it. ``orphaned``: no
    run uses it."""
    path: str
    problem: str
    bytes: int = 0
    is_garbage: bool = False
    """Whether ``textmill gc`` deletes it."""


@dataclass
class Scan:
    """The outputs and run records below a root, and what does not belong to them."""

    outputs: dict[Ref, Output] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def scan(store: Store) -> Scan:
    """Read all manifests and run records below a root, but not the files of the outputs."""
    result, sizes = Scan(), store.list_files()
    entries: dict[Ref, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    others = {}
    for path, size in sizes.items():
        if match := re.fullmatch(f"({STAGE_NAME})/([0-9a-f]{{64}})/([^/]+)(/.+)?", path, re.DOTALL):
            entries[Ref(match[1], match[2])][match[3]][path] = size
        elif path not in {LOCK_FILE, "README.md", ".gitignore", ".gitkeep"}:  # a root may be kept in git
            others[path] = size
    for ref, names in entries.items():
        result.findings += catch_damage("/".join(ref), _scan_key_directory(store, ref, names, result))
    for path, size in others.items():
        result.findings += catch_damage(path, _scan_file(store, path, size, result))
    return result


def catch_damage(path: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings. A UserError that ends them becomes a finding itself, unless the root cannot be reached."""
    try:
        yield from findings
    except TransientError:
        raise
    except UserError as error:
        yield Finding("damaged", path, str(error))


def _scan_key_directory(store: Store, ref: Ref, names: dict[str, dict[str, int]], result: Scan) -> Iterator[Finding]:
    """``names`` has the entries of the directory, each with the sizes of its files."""
    from lm.checkpoint.training_checkpoint import newest_checkpoint

    output = open_output(store, ref)
    if output:
        result.outputs[ref] = output
    current_attempt = output.manifest["attempt"] if output else ""
    for name, files in names.items():
        path, size = "/".join((*ref, name)), sum(files.values())
        if name == MANIFEST:
            if not output:
                yield Finding("damaged", path, "it is not a valid manifest")
        elif _TEMPORARY_NAME.search(name):
            yield Finding("orphaned", path, "a process was killed while it wrote this", size, is_garbage=True)
        elif name == LOCK_FILE:
            if _is_left_behind(store, path):
                yield Finding("orphaned", path, "a process was killed while it held this lock", size, is_garbage=True)
        elif output and name == current_attempt:
            known = {f"{path}/{file['path']}" for file in output.all_files()}
            for extra in files.keys() - known:
                yield Finding("orphaned", extra, "its manifest does not name it")
        elif not ATTEMPT_NAME.fullmatch(name):
            yield Finding("orphaned", path, "no stage makes such a file")
        elif name.split("-")[0] > current_attempt.split("-")[0]:
            directory = Path(store.path(path))
            newest = newest_checkpoint(directory) if directory in store.attempt_directories(*ref) else None
            hint = f"; the same training would resume from its {newest.name}" if newest else ""
            yield Finding("unfinished", path, f"its stage has not finished it{hint}", size, is_garbage=True)
        else:
            yield Finding("orphaned", path, "a later attempt has replaced it", size, is_garbage=True)


def _is_left_behind(store: Store, path: str) -> bool:
    """Return whether the holder of an output's lock, or lease, has ended without deleting it."""
    if store.is_local:
        lock = Path(store.path(path))
        return not is_locked(lock) and lock.exists()  # its holder may have ended, and deleted it, since it was listed
    holder = store.read_bytes(path)
    return holder is not None and store.read_bytes(LEASES, f"{holder.decode('utf-8', 'replace')}.json") is None


def _scan_file(store: Store, path: str, size: int, result: Scan) -> Iterator[Finding]:
    """Check a file outside the key directories: a run record or report, a source record, an entry of the gate's ledger,
    or a ``latest.json``."""
    store.path(path)  # raises UserError for a link: what lies behind it is unknown
    directory, _, name = path.rpartition("/")
    if directory == LEASES:
        return  # gc deletes those that nobody renews
    if _TEMPORARY_NAME.search(name):
        yield Finding("orphaned", path, "a process was killed while it wrote this", size, is_garbage=True)
    elif re.fullmatch(f"{STAGE_NAME}/[0-9a-f]{{64}}", path):
        yield Finding("orphaned", path, "its stage failed and left no files", size, is_garbage=True)
    elif directory == "runs" and name.endswith(".json"):
        yield from _scan_run_record(store, path, result)
    elif directory == "runs" and name.endswith(".md"):
        record = read_record(RunRecord, store, f"{path.removesuffix('.md')}.json")
        if not record and not RUN_NAME.fullmatch(name.removesuffix(".md")):
            yield Finding("orphaned", path, "no run makes such a file")
        elif not record:
            yield Finding("orphaned", path, "the record of its run is missing or damaged", size, is_garbage=True)
        elif not record.get("report"):
            yield Finding("unfinished", path, "the record of its run does not name it yet")
        elif damage := store.describe_damage({**record["report"], "path": name}, directory):
            yield Finding("damaged", path, f"{damage}; delete it")
    elif directory == "sources":
        if not read_record(SourceRecord, store, path):
            yield Finding("damaged", path, "it is not a valid source record; the next run reads the source again")
    elif directory == LEDGER:
        if not read_record(GateEntry, store, path):
            yield Finding("damaged", path, "it is not a valid entry of the gate's ledger; restore it, or delete it")
    elif directory and name == "latest.json":
        if not read_record(LatestOutput, store, path):
            yield Finding("damaged", path, "it is not a valid record; delete it")
    else:
        yield Finding("orphaned", path, "no run makes such a file")


def _scan_run_record(store: Store, path: str, result: Scan) -> Iterator[Finding]:
    record = read_record(RunRecord, store, path)
    if record is None:
        yield Finding("damaged", path, "it is not a valid run record; delete it")
        return
    result.records[path] = record
    for stage, stage_result in record["stages"].items():
        ref = Ref(stage, stage_result["key"])
        output = result.outputs.get(ref) or open_output(store, ref)  # it may have been finished during the scan
        if not output:
            problem = f"it names {'/'.join(ref)}, which is missing; run that again, or delete this"
            yield Finding("damaged", path, problem)
            return
        result.outputs[ref] = output
    if not record.get("report"):
        yield Finding("unfinished", path, "its run is still at work, or was killed")
