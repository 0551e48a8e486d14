"""What is below a root: whether it is as it was made, and what of it nobody needs any more."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lm.checkpoint import newest_checkpoint
from lm.errors import Unreachable, UserError
from lm.signed import read_signed
from tasks.lock import LOCK, is_held
from tasks.output import MANIFEST, Output, Ref, open_output
from tasks.records import Latest, Remembered, RunRecord, read
from tasks.store import Store

_PLACE = re.compile(r"([a-z][a-z0-9-]*)/([0-9a-f]{64})/([^/]+)(/.+)?", re.DOTALL)
_ATTEMPT = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}", re.ASCII)
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")


class Finding(NamedTuple):
    """Something that is not as a run leaves it when it is done."""

    kind: str
    """Damaged: not used, and made anew by a run that needs it. Unfinished: at most gone on from. Orphaned: not used."""
    place: str
    what: str
    bytes: int = 0
    can_go: bool = False
    """Whether :func:`garbage` has it."""


@dataclass
class Contents:
    """What is below a root, by its manifests and records; the files they name are not read."""

    outputs: dict[Ref, Output] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def look(store: Store) -> Contents:
    """Read all manifests and records below a root."""
    found, sizes = Contents(), store.files()
    entries: dict[Ref, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for path, size in sizes.items():
        if place := _PLACE.fullmatch(path):
            entries[Ref(place[1], place[2])][place[3]][path] = size
    for ref, attempts in entries.items():
        try:
            found.findings += _look_at_output(store, ref, attempts, found)
        except UserError as error:
            found.findings.append(Finding("damaged", "/".join(ref), _told(error)))
    for path, size in sizes.items():
        if path == LOCK or _PLACE.fullmatch(path):
            continue
        try:
            finding = _look_at_record(store, path, size, found)
        except UserError as error:
            finding = Finding("damaged", path, _told(error))
        found.findings += [finding] if finding else []
    return found


def _look_at_output(store: Store, ref: Ref, entries: dict[str, dict[str, int]], found: Contents) -> Iterator[Finding]:
    output = open_output(store, ref)
    if output:
        found.outputs[ref] = output
    elif MANIFEST in entries:
        yield Finding("damaged", "/".join((*ref, MANIFEST)), "it is not a manifest as it was written")
    named = output.manifest["attempt"] if output else ""
    for name, files in entries.items():
        place, size = "/".join((*ref, name)), sum(files.values())
        if _TEMPORARY.search(name):
            yield Finding("orphaned", place, "a process was killed while it wrote this", size, can_go=True)
        elif name == named and output:
            known = {f"{place}/{file['path']}" for file in output.described()}
            for extra in files.keys() - known:
                yield Finding("orphaned", extra, "its manifest does not name it")
        elif name != MANIFEST and not _ATTEMPT.fullmatch(name):
            yield Finding("orphaned", place, "it is nothing that a stage makes")
        elif name != MANIFEST and name.split("-")[0] > named.split("-")[0]:
            path = Path(store.path(place))
            newest = newest_checkpoint(path) if path in store.workplaces(*ref) else None
            more = f"; the same training would go on from its {newest.name}" if newest else ""
            yield Finding("unfinished", place, f"its stage has not finished it{more}", size, can_go=True)
        elif name != MANIFEST:
            yield Finding("orphaned", place, "another attempt has taken its place", size, can_go=True)


def _look_at_record(store: Store, path: str, size: int, found: Contents) -> Finding | None:
    directory, _, name = path.rpartition("/")
    if _TEMPORARY.search(name):
        return Finding("orphaned", path, "a process was killed while it wrote this", size, can_go=True)
    if directory == "runs" and name.endswith(".json"):
        record = read(RunRecord, store, path)
        if record is None:
            return Finding("damaged", path, "it is not a run's record as it was written; delete it")
        found.records[path] = record
        for stage, use in record["stages"].items():
            ref = Ref(stage, use["key"])
            output = found.outputs.get(ref) or open_output(store, ref)  # which may be finished by now
            if not output:
                gone = f"it names {'/'.join(ref)}, which is not there; run that again, or delete this"
                return Finding("damaged", path, gone)
            found.outputs[ref] = output
        if "report" not in record:
            return Finding("unfinished", path, "its run goes on, or died after what is written there")
    elif directory == "runs" and name.endswith(".md"):
        record = read(RunRecord, store, f"{path.removesuffix('.md')}.json")
        if not record:
            return Finding("orphaned", path, "the record of its run is gone or damaged", size, can_go=True)
        if "report" not in record:
            return Finding("unfinished", path, "the record of its run does not name it yet")
        if fault := store.fault(record["report"]["bytes"], record["report"]["sha256"], path):
            return Finding("damaged", path, f"{fault}; delete it")
    elif directory == "sources":
        if not read(Remembered, store, path):
            return Finding("damaged", path, "it is not a source's record as it was written; the source is read again")
    elif directory and name == "latest.json":
        if not read(Latest, store, path):
            return Finding("damaged", path, "it is not a record as it was written; delete it")
    else:
        return Finding("orphaned", path, "it is nothing that a run makes")
    return None


def _told(error: UserError) -> str:
    """What is wrong with one file; where the whole root is out of reach, that is said instead."""
    if isinstance(error, Unreachable):
        raise error
    return str(error)


def verify(store: Store) -> Iterator[Finding]:
    """All that is damaged, unfinished or orphaned below a root. Every file is read, whatever has been read before."""
    found = look(store)
    yield from found.findings
    for ref, output in found.outputs.items():
        damaged = list(_damaged(output))
        now = open_output(store, ref) if damaged else output
        if now and now.manifest["attempt"] == output.manifest["attempt"]:  # else it was replaced or deleted meanwhile
            yield from damaged


def _damaged(output: Output) -> Iterator[Finding]:
    files = {file["path"]: file for file in output.described()}
    for path, file in files.items():
        place = "/".join((*output.place, path))
        try:
            fault = output.store.fault(file["bytes"], file["sha256"], *output.place, path)
            if not fault and path.endswith("/checkpoint.json"):
                fault = _fault_of_checkpoint(output, path.removesuffix("checkpoint.json"), files)
        except UserError as error:
            fault = _told(error)
        if fault:
            yield Finding("damaged", place, fault)


def _fault_of_checkpoint(output: Output, directory: str, files: dict[str, dict[str, Any]]) -> str:
    """What is wrong with a checkpoint's own description, beside what the manifest says of its files."""
    description = read_signed(output.store.read_bytes(*output.place, f"{directory}checkpoint.json") or b"")
    described = {
        path.removeprefix(directory): {"bytes": file["bytes"], "sha256": file["sha256"]}
        for path, file in files.items()
        if path.startswith(directory) and path != f"{directory}checkpoint.json"
    }
    return "" if description and description.get("files") == described else "it does not describe the files beside it"


def garbage(store: Store) -> list[Finding]:
    """What no run's record needs, itself or by way of what was made from it; superseded and unfinished attempts; what
    killed processes left. Whoever deletes it must use the root alone (:func:`tasks.lock.in_use`).

    An output names what it was made from by content, so of two outputs with one content both are needed. Raises
    UserError where a manifest or record is damaged: what it needs cannot be known.
    """
    found = look(store)
    if damaged := [finding for finding in found.findings if finding.kind == "damaged"]:
        raise UserError(
            f"{damaged[0].place} is damaged: {damaged[0].what}. What it needs cannot be known, so nothing can be "
            "deleted. Run the pipeline again, or delete that if you do not need it; textmill verify lists all there is."
        )
    by_content = defaultdict(list)
    for ref, output in found.outputs.items():
        by_content[ref.stage, output.digest].append(ref)
    wanted = [Ref(stage, use["key"]) for record in found.records.values() for stage, use in record["stages"].items()]
    needed: set[Ref] = set()
    while wanted:
        ref = wanted.pop()
        if ref not in needed:
            needed.add(ref)
            parameters = found.outputs[ref].manifest["ingredients"].get("parameters")
            wanted += [made for content in _pairs(parameters) for made in by_content.get(content, ())]
    unneeded = {"/".join(ref): output for ref, output in found.outputs.items() if ref not in needed}
    return [finding for finding in found.findings if finding.can_go] + [
        Finding("orphaned", place, "no run's record needs it", sum(file["bytes"] for file in output.described()), True)
        for place, output in unneeded.items()
    ]


def _pairs(value: Any) -> Iterator[tuple[str, str]]:
    """All (name, text) in a value: what an output was made from is among them as (stage, digest)."""
    if isinstance(value, dict):
        yield from ((name, item) for name, item in value.items() if isinstance(item, str))
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _pairs(item)


def delete(store: Store, finding: Finding) -> bool:
    """Delete what is garbage; False where somebody trains there, without a run of the pipeline (``lm.train``)."""
    path = Path(store.path(finding.place))
    if any(map(is_held, [*path.glob("job.json"), *path.glob("*/job.json")])):
        return False
    if path.is_dir():
        store.remove(finding.place, MANIFEST)  # first: without it nothing counts
    store.remove(finding.place)
    return True
