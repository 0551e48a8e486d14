"""The ledger of the gate below a root: each look at a comparison, with its verdict, in the order of the looks.

An entry is a file of its own, ``gate-ledger/000001.json``, created only if no other writer has taken the number. So it
works on object stores too, which cannot append, and nothing ever changes or removes an entry.
"""

import math
import re
from typing import Any

from lm.common.errors import UserError
from lm.files.checksum import dumps_with_checksum
from tasks.runtime.schemas import GateEntry, read_record
from tasks.runtime.store import Store

LEDGER = "gate-ledger"


def read_ledger(store: Store) -> list[dict[str, Any]]:
    """Return all entries, the oldest first. Raises UserError for a damaged one: what it spent is unknown."""
    return [entry for _, entry in _read(store)]


def _read(store: Store) -> list[tuple[int, dict[str, Any]]]:
    names = [name for name in store.list_names(LEDGER) if re.fullmatch(r"\d{6}\.json", name)]
    entries = store.map(lambda name: read_record(GateEntry, store, LEDGER, name), names)
    numbered = []
    for name, entry in zip(names, entries, strict=True):
        if entry is None:
            raise UserError(
                f"{store.url(LEDGER, name)} is damaged, so how much error the gate has spent is unknown. Restore it, "
                "or delete it if its comparison will not be judged again."
            )
        numbered.append((int(name.removesuffix(".json")), entry))
    return numbered


def find_spent(store: Store, comparison: str, evidence: str) -> float:
    """Return the error that earlier looks at a comparison have spent: all but one at the same evidence, and later ones.

    A look at evidence that the ledger has is the same look again, and costs nothing.
    """
    return _spent([entry for _, entry in _read(store)], comparison, evidence)


def _spent(entries: list[dict[str, Any]], comparison: str, evidence: str) -> float:
    spent = 0.0
    for entry in entries:
        if entry["comparison"] == comparison:
            if entry["evidence"] == evidence:
                break
            spent += entry["level"]
    return spent


def append_entry(store: Store, entry: dict[str, Any], spent: float) -> None:
    """Append a look unless the ledger has it. ``spent`` is what :func:`find_spent` returned before the look.

    Raises UserError if another run has looked at the same comparison since.
    """
    keys = entry["comparison"], entry["evidence"]
    while True:
        numbered = _read(store)
        entries = [earlier for _, earlier in numbered]
        if not math.isclose(_spent(entries, *keys), spent, abs_tol=1e-12):
            raise UserError("Another run judged the same variant in the meantime. Run the same command again.")
        if any((earlier["comparison"], earlier["evidence"]) == keys for earlier in entries):
            return
        number = numbered[-1][0] + 1 if numbered else 1
        if store.create_file(dumps_with_checksum(entry).encode(), LEDGER, f"{number:06d}.json"):
            return
