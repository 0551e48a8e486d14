"""Find and delete the files that no run needs."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm.common.errors import UserError
from tasks.maintenance.scan import Finding, scan
from tasks.runtime.locks import is_locked
from tasks.runtime.output import MANIFEST, Ref
from tasks.runtime.store import Store


def find_garbage(store: Store, without: str = "") -> list[Finding]:
    """Return the outputs that no run record needs, replaced and unfinished attempts, and files of killed processes.

    A run record needs its outputs, all others that the run has made, such as the trainings of a sweep that was stopped,
    and the inputs of each. An output names its inputs by content, so if two outputs have the same content, both are
    needed. ``without`` names a run that counts as deleted. Hold the root exclusively
    (:func:`tasks.runtime.locks.own_root`) until the garbage is deleted. Raises UserError if a manifest or run record is
    damaged: the outputs that it needs are unknown.
    """
    result = scan(store)
    if damaged := [finding for finding in result.findings if finding.kind == "damaged"]:
        raise UserError(
            f"{damaged[0].path} is damaged: {damaged[0].problem}. The outputs that it needs are unknown, so nothing "
            "can be deleted. Run the pipeline again, or delete that path. textmill verify lists all damage."
        )
    records = [record for record in result.records.values() if record["name"] != without]
    by_content = defaultdict(list)
    for ref, output in result.outputs.items():
        by_content[ref.stage, output.digest].append(ref)
    unvisited = [Ref(stage, use["key"]) for record in records for stage, use in record["stages"].items()]
    names = {record["name"] for record in records}
    unvisited += [ref for ref, output in result.outputs.items() if output.manifest["made"]["run"] in names]
    needed: set[Ref] = set()
    while unvisited:
        ref = unvisited.pop()
        if ref not in needed:
            needed.add(ref)
            parameters = result.outputs[ref].manifest["ingredients"].get("parameters")
            unvisited += [source for content in _string_items(parameters) for source in by_content.get(content, ())]
    return [finding for finding in result.findings if finding.is_garbage] + [
        Finding(
            "orphaned", "/".join(ref), "no run record needs it", sum(file["bytes"] for file in output.all_files()), True
        )
        for ref, output in result.outputs.items()
        if ref not in needed
    ]


def _string_items(value: Any) -> Iterator[tuple[str, str]]:
    """Yield all (key, string) in nested dicts and lists. The inputs of an output are among them as (stage, digest)."""
    if isinstance(value, dict):
        yield from ((key, item) for key, item in value.items() if isinstance(item, str))
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _string_items(item)


def delete(store: Store, finding: Finding) -> bool:
    """Delete garbage. Return False if ``lm.train`` is running there, which uses no root lock."""
    path = Path(store.path(finding.path))
    if store.is_local and any(map(is_locked, [*path.glob("job.json"), *path.glob("*/job.json")])):
        return False
    store.delete_file(finding.path, MANIFEST)  # first: without it there is no output
    store.remove(finding.path)
    return True
