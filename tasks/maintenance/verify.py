"""Read all files below a root and list the damage."""

from collections.abc import Iterator
from typing import Any

from lm.files.checksum import loads_with_checksum
from tasks.maintenance.scan import Finding, catch_damage, scan
from tasks.runtime.output import Output, open_output
from tasks.runtime.store import Store


def verify(store: Store) -> Iterator[Finding]:
    """Yield everything below a root that is damaged, unfinished or orphaned. Each file of each output is read."""
    result = scan(store)
    yield from result.findings
    for ref, output in result.outputs.items():
        damaged = list(_find_damaged(output))
        current = open_output(store, ref) if damaged else output
        if current and current.location == output.location:  # otherwise a run or gc has replaced it in the meantime
            yield from damaged


def _find_damaged(output: Output) -> Iterator[Finding]:
    files = {file["path"]: file for file in output.all_files()}
    for file in files.values():
        path = "/".join((*output.location, file["path"]))
        yield from catch_damage(path, _check_file(output, file, files, path))


def _check_file(output: Output, file: dict[str, Any], files: dict[str, dict[str, Any]], path: str) -> Iterator[Finding]:
    if damage := output.store.describe_damage(file, *output.location):
        yield Finding("damaged", path, damage)
    elif file["path"].endswith("/checkpoint.json"):
        directory = file["path"].removesuffix("checkpoint.json")
        description = loads_with_checksum(output.store.read_bytes(*output.location, file["path"]) or b"")
        expected = {
            name.removeprefix(directory): {"bytes": other["bytes"], "sha256": other["sha256"]}
            for name, other in files.items()
            if name.startswith(directory) and name != file["path"]
        }
        if not description or description.get("files") != expected:
            yield Finding("damaged", path, "it does not describe the files beside it")
