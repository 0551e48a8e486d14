"""What groups of texts lose to a comparison of all groups: an array for each group that loses something."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.runtime.inputs import OpenTextGroup, TextGroup
from tasks.runtime.output import Input, Ref, read_output
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.store import Store

_LOSING = "losing_groups.json"


@dataclass(frozen=True)
class LosingTexts(Input):
    """A group of texts, and the array of what it loses."""

    group: TextGroup
    losses: Ref
    """Output of the comparison."""
    number: int
    """Of the group."""
    digest: str
    """Of the array: a change of another group's array changes nothing here."""

    def identity(self, run: RunContext) -> Any:
        """Return the part that enters a key."""
        return [self.group.digest, self.digest]

    def open(self, store: Store) -> tuple[OpenTextGroup, Any]:
        """Return the group and the array."""
        return self.group.open(store), np.load(read_output(store, self.losses).path(_file_name(self.number)))

    def find_damaged_url(self, store: Store, opened: tuple[OpenTextGroup, Any]) -> str:
        """Return the path or URL of a damaged file of the text; empty if there is none."""
        return self.group.find_damaged_url(store, opened[0])


def _file_name(number: int) -> str:
    return f"removed-{number:05}.npy"


def write_losses(out: Attempt, losses: Sequence[Any]) -> None:
    """Write the array of each group, unless it is empty, and ``losing_groups.json``."""
    losing = [number for number, array in enumerate(losses) if len(array)]
    for number in losing:
        np.save(out.directory / _file_name(number), losses[number])
    out.write_json(_LOSING, {"groups": losing})


def read_losing_texts(store: Store, groups: Sequence[TextGroup], losses: Ref) -> list[LosingTexts]:
    """Return the groups that lose something, from an output with the files of :func:`write_losses`."""
    output = read_output(store, losses)
    digests = {file["path"]: file["sha256"] for file in output.manifest["files"]}
    losing = output.json(_LOSING)["groups"]
    return [LosingTexts(groups[number], losses, number, digests[_file_name(number)]) for number in losing]
