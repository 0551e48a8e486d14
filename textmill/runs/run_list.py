"""The runs below a root: list them, rename one, and delete one with the outputs that no other run needs."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lm.common.errors import UserError
from tasks.maintenance.gc import delete, find_garbage
from tasks.maintenance.scan import Finding, scan
from tasks.runs.models import RESULT_STAGES
from tasks.runs.run_record import file_name, find_run, given_name, list_runs, read_run, require_run
from tasks.runtime.locks import may_be_used, own_root
from tasks.runtime.output import Ref
from tasks.runtime.schemas import RUN_NAME
from tasks.runtime.store import Store

_LOSSES = ("valid_loss", "train_loss")


@dataclass(frozen=True)
class RunSummary:
    """A line of ``textmill runs``."""

    name: str
    """Given name."""
    run: str
    """Whole name, which begins with the start in UTC."""
    stages: str
    """Last stage that the run finished, and how many of its stages it made."""
    started: str
    """ISO format, UTC; empty if the record does not say."""
    state: str
    """running, finished, stopped, failed, or killed: the record says running, but no run uses the root. Below a root in
    an object store, which has no locks, and beside another run, a killed run stays running."""
    loss: float | None
    """Loss of the run's model on the validation text, in nats per token."""
    bytes: int
    """Size of the outputs that the run made."""


def summarize_runs(store: Store) -> list[RunSummary]:
    """Return the runs below a root, the newest first. Damaged records are left out: ``textmill verify`` lists them."""
    sizes: dict[str, int] = defaultdict(int)
    result = scan(store)
    for output in result.outputs.values():
        sizes[output.manifest["made"]["run"]] += sum(file["bytes"] for file in output.all_files())
    is_used = may_be_used(store)
    summaries = []
    for name in reversed(list_runs(store)):
        if (record := read_run(store, name)) is None:
            continue
        stages = record["stages"]
        model = next((Ref(stage, stages[stage]["key"]) for stage, _ in RESULT_STAGES if stage in stages), None)
        figures = result.outputs[model].manifest["figures"] if model in result.outputs else {}
        losses = [figures[loss] for loss in _LOSSES if isinstance(figures.get(loss), float)]
        made = sum(stage["state"] == "made" for stage in stages.values())
        done = f"{next(reversed(stages))}, {made} of {len(stages)}" if stages else "–"
        summaries.append(
            RunSummary(
                given_name(name, record),
                name,
                done,
                record.get("at", ""),
                "killed" if record.get("state") == "running" and not is_used else record.get("state", ""),
                losses[0] if losses else None,
                sizes[name],
            )
        )
    return summaries


def rename_run(store: Store, reference: str, title: str) -> str:
    """Give a run another name, and return the name of its record, which stays. Raise UserError if another run has the
    name."""
    name = require_run(store, reference)
    if not title or title != file_name(title) or RUN_NAME.fullmatch(title):
        raise UserError(f"A run cannot be called {title!r}: a name has letters, digits, dots, underscores and dashes.")
    if other := find_run(store, title):
        raise UserError(f"The run {other} is called {title!r} already.")
    _rewrite(store, name, title)
    return name


def _rewrite(store: Store, name: str, title: str) -> None:
    for file in (name, "latest"):
        record = read_run(store, file)
        if record and record["name"] == name:
            store.write_json(record | {"title": title}, "runs", f"{file}.json")


def delete_run(store: Store, reference: str, is_confirmed: bool) -> tuple[str, list[Finding]]:
    """Delete a run: its record, its report, and the outputs that only it needs. Return its name and what is deleted, or
    unless ``is_confirmed``, what would be.

    Raises UserError if a run uses the root, or if a manifest or record is damaged: what it needs is unknown.
    """
    name = require_run(store, reference)
    with own_root(store) as check_ownership:
        before = {finding.path for finding in find_garbage(store)}
        findings = [finding for finding in find_garbage(store, without=name) if finding.path not in before]
        if is_confirmed:
            for file in _record_files(store, name):
                store.delete_file("runs", file)
            for finding in findings:
                check_ownership()
                delete(store, finding)
    return name, findings


def _record_files(store: Store, name: str) -> Iterator[str]:
    latest: dict[str, Any] | None = read_run(store, "latest")
    if latest and latest["name"] == name:
        yield "latest.json"
    yield from (f"{name}.json", f"{name}.md")
