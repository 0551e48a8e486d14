"""Two small stages, and the roots that tests make with them."""

import hashlib
import os
from pathlib import Path
from typing import Any

from lm.text.sources import Source
from tasks.runtime.output import Output, Ref
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.stage import Stage, stage

CALLS: list[str] = []


@stage("letters")
def letters(out: Attempt, text: str, number: int) -> None:
    CALLS.append("letters")
    (out.directory / "a.txt").write_text(text * number)
    (out.directory / "sub").mkdir()
    (out.directory / "sub" / "b.txt").write_text("b")
    (out.directory / "time.txt").write_text(os.urandom(8).hex())
    out.records = ["time.txt"]
    out.sources = [Source("/somewhere/x.txt", 3, "ab" * 32)]


@stage("upper")
def upper(out: Attempt, source: Output, parts: list[Output]) -> None:
    CALLS.append("upper")
    (out.directory / "A.txt").write_text(source.path("a.txt").read_text().upper() * (1 + len(parts)))


def materialize(stage_: Stage, run: RunContext, *arguments: Any) -> Ref:
    """Make the output of a stage unless it is cached."""
    return stage_.materialize(run, stage_.bind(*arguments))[0]


def run_context(root: Path | str, **changes: Any) -> RunContext:
    return RunContext(str(root), "test", **changes)


def write_run_record(run: RunContext, name: str, *refs: Ref) -> None:
    """Write the record and the report of a run that used these outputs."""
    stages = {ref.stage: {"key": ref.key, "state": "made", "seconds": 0.5} for ref in refs}
    run.store.write_text("a report", "runs", f"{name}.md")
    report = {"path": f"{name}.md", "bytes": 8, "sha256": hashlib.sha256(b"a report").hexdigest()}
    run.store.write_json({"name": name, "stages": stages, "report": report}, "runs", f"{name}.json")
