"""Two small stages, and roots that they have made, for the tests of what is below a root."""

import hashlib
import os
from pathlib import Path
from typing import Any

from lm.corpus import Source
from tasks.output import Output, Ref
from tasks.stage import Draft, Run, Stage, stage

CALLS: list[str] = []


@stage("letters")
def letters(out: Draft, text: str, number: int) -> None:
    CALLS.append("letters")
    (out.directory / "a.txt").write_text(text * number)
    (out.directory / "sub").mkdir()
    (out.directory / "sub" / "b.txt").write_text("b")
    (out.directory / "time.txt").write_text(os.urandom(8).hex())
    out.records = ["time.txt"]
    out.sources = [Source("/somewhere/x.txt", 3, "ab" * 32)]


@stage("upper")
def upper(out: Draft, source: Output, parts: list[Output]) -> None:
    CALLS.append("upper")
    (out.directory / "A.txt").write_text(source.path("a.txt").read_text().upper() * (1 + len(parts)))


def make(stage_: Stage, run: Run, *arguments: Any) -> Ref:
    return stage_.make(run, stage_.named(arguments))


def a_run(root: Path | str, **changes: Any) -> Run:
    return Run(str(root), "test", **changes)


def record(run: Run, name: str, *refs: Ref) -> None:
    """The record of a run that has used these outputs."""
    stages = {ref.stage: {"key": ref.key, "state": "made", "seconds": 0.5} for ref in refs}
    run.store.write_text("a report", "runs", f"{name}.md")
    report = {"path": f"{name}.md", "bytes": 8, "sha256": hashlib.sha256(b"a report").hexdigest()}
    run.store.write_json({"name": name, "stages": stages, "report": report}, "runs", f"{name}.json")
