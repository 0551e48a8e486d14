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
        files = {file["path"]: file for file in output.all_files()}
        damaged: list[Finding] = []
        for name in files:
            path = "/".join((*output.location, name))
            damaged += catch_damage(path, _check_file(output, name, files, path))
        current = open_output(store, ref) if damaged else output
        if current and current.location == output.location:  # otherwise a run or gc has replaced it in the meantime
            yield from damaged


def _check_file(output: Output, name: str, files: dict[str, dict[str, Any]], path: str) -> Iterator[Finding]:
    if damage := output.store.describe_damage(files[name], *output.location):
        yield Finding("damaged", path, damage)
    elif name.endswith("/checkpoint.json"):
        directory = name.removesuffix("checkpoint.json")
        description = loads_with_checksum(output.store.read_bytes(*output.location, name) or b"")
        expected = {
            other.removeprefix(directory): {"bytes": file["bytes"], "sha256": file["sha256"]}
            for other, file in files.items()
            if other.startswith(directory) and other != name
        }
        if not description or description.get("files") != expected:
            yield Finding("damaged", path, "it does not describe the files beside it")
