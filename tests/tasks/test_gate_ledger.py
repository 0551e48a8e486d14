"""The gate's ledger: looks stay in their order, and what they spend adds up, also with several writers."""

import threading
from pathlib import Path
from typing import Any

import pytest

from lm.common.errors import UserError
from tasks.maintenance.gc import find_garbage
from tasks.maintenance.scan import scan
from tasks.runtime.gate_ledger import LEDGER, append_entry, find_spent, read_ledger
from tasks.runtime.store import Store

FIRST, OTHER = "a" * 64, "b" * 64


def entry(comparison: str = FIRST, evidence: str = "1", level: float = 0.005, **changes: Any) -> dict[str, Any]:
    return {
        "comparison": comparison,
        "evidence": evidence * 64,
        "at": "2026-11-30T12:00:00+00:00",
        "run": "20261130-120000-full-red-fox",
        "variant": {"train.beta2": 0.99},
        "sizes": [{"model.d_model": 32}, {"model.d_model": 64}],
        "seeds": 12,
        "level": level,
        "verdict": "undecided",
        "reason": "more seeds may decide",
        "p": [0.2, 0.3],
        "speedups": [1.1, None],
        "speedups_in_time": [1.0, None],
        **changes,
    }


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return the store of an empty root: a directory, or an object store without conditional writes."""
    return Store(str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}")


def test_looks_add_up_for_each_comparison(store: Store) -> None:
    assert read_ledger(store) == [] and find_spent(store, FIRST, "1" * 64) == 0
    append_entry(store, entry(), 0.0)
    append_entry(store, entry(OTHER, "2", 0.003), 0.0)
    append_entry(store, entry(FIRST, "3", 0.002), 0.005)
    assert [line["comparison"] for line in read_ledger(store)] == [FIRST, OTHER, FIRST]
    assert find_spent(store, FIRST, "4" * 64) == pytest.approx(0.007)
    assert find_spent(store, OTHER, "4" * 64) == 0.003


def test_the_same_evidence_is_the_same_look(store: Store) -> None:
    append_entry(store, entry(), 0.0)
    append_entry(store, entry(FIRST, "2", 0.002), 0.005)
    assert find_spent(store, FIRST, "1" * 64) == 0, "before it, not after"
    assert find_spent(store, FIRST, "2" * 64) == 0.005
    before = read_ledger(store)
    append_entry(store, entry(run="20261130-130000-full-blue-owl"), 0.0)
    assert read_ledger(store) == before


def test_a_look_in_the_meantime_ends_with_an_error(store: Store) -> None:
    append_entry(store, entry(), 0.0)
    with pytest.raises(UserError, match="Another run judged the same variant in the meantime"):
        append_entry(store, entry(FIRST, "2", 0.0075), 0.0)
    assert len(read_ledger(store)) == 1


def test_several_writers_lose_no_entry_and_spend_no_error_twice(tmp_path: Path) -> None:
    refused: list[UserError] = []

    def write(number: int) -> None:
        store = Store(str(tmp_path))
        append_entry(store, entry(f"{number:064x}"), 0.0)
        try:
            append_entry(store, entry(FIRST, f"{number:x}", 0.005), 0.0)
        except UserError as error:
            refused.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = read_ledger(Store(str(tmp_path)))
    assert len({line["comparison"] for line in entries}) == 9
    assert [line["comparison"] for line in entries].count(FIRST) == 1 and len(refused) == 7
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == [f"{number:06d}.json" for number in range(1, 10)]


def test_a_damaged_entry_is_named_by_readers_and_by_verify(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    append_entry(store, entry(), 0.0)
    assert scan(store).findings == [] and find_garbage(store) == [], "gc deletes no entry"
    path = tmp_path / LEDGER / "000001.json"
    path.write_text(path.read_text().replace("0.005", "0.000"))
    with pytest.raises(UserError, match=r"000001\.json is damaged, so how much error"):
        find_spent(store, OTHER, FIRST)
    (finding,) = scan(store).findings
    assert (finding.kind, finding.path, finding.is_garbage) == ("damaged", f"{LEDGER}/000001.json", False)
