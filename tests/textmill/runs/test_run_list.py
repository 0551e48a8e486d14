"""``textmill runs``: the list, other names, and deletion of what only one run holds."""

import errno
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lm.common.errors import UserError
from tasks.runs.models import resolve_model
from tasks.runs.run_record import find_run, read_run
from tasks.runtime.locks import lock_root
from tasks.runtime.output import Ref
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.stage import stage
from tests.helpers.roots import letters, materialize, run_context, write_run_record
from textmill.cli.main import main
from textmill.runs.run_list import delete_run, rename_run, summarize_runs

FIRST, SECOND, THIRD = "20260101-000000-full-red-fox", "20260102-000000-full-mine", "20260103-000000-train-gray-owl"


@stage("merge")
def merge(out: Attempt) -> None:
    (out.directory / "a.txt").write_text("merge")


@stage("train")
def train(out: Attempt, number: int) -> None:
    (out.directory / "a.txt").write_text(str(number) * 1000)
    out.figures = {"valid_loss": 1.25 + number}


def record(run: RunContext, name: str, *refs: Ref, cached: tuple[str, ...] = ()) -> None:
    write_run_record(run, name, *refs)
    content = read_run(run.store, name)
    assert content
    for cached_stage in cached:
        content["stages"][cached_stage]["state"] = "cached"
    more = {"at": "2026-01-01T00:00:00+00:00", "state": "finished"}
    run.store.write_json(content | more, "runs", f"{name}.json")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunContext]:
    """A root with three runs: two trainings that share a tokenizer, and a run that found the first one cached."""
    run = run_context(tmp_path / "root")
    shared = materialize(merge, run)
    first, second = (materialize(train, run, number) for number in (0, 1))
    record(run, FIRST, shared, first)
    record(run, SECOND, shared, second, cached=("merge",))
    record(run, THIRD, shared, first, cached=("merge", "train"))
    yield run


def test_a_run_that_nothing_runs_any_more_was_killed(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> str:
        return next(summary.state for summary in summarize_runs(run.store) if summary.run == FIRST)

    content = read_run(run.store, FIRST)
    assert content and state() == "finished"
    run.store.write_json(content | {"state": "running"}, "runs", f"{FIRST}.json")
    assert state() == "killed"
    with lock_root(run.store):
        assert state() == "running"

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert state() == "running"


def test_the_list_has_the_newest_run_first(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    assert [(summary.name, summary.loss) for summary in summarize_runs(run.store)] == [
        ("gray-owl", 1.25),
        ("mine", 2.25),
        ("red-fox", 1.25),
    ]
    assert main(["runs", "--root", run.root]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "last", "stage", "started", "state", "loss", "size"]
    assert all(len(line) <= 80 for line in lines)
    assert main(["runs", "--root", run.root, "--json"]) == 0
    assert [entry["run"] for entry in json.loads(capsys.readouterr().out)] == [THIRD, SECOND, FIRST]


def test_an_empty_root_has_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--root", str(tmp_path)]) == 0
    assert "There are no runs" in capsys.readouterr().out


def test_a_damaged_record_is_left_out(run: RunContext) -> None:
    Path(run.root, "runs", f"{SECOND}.json").write_text("{")
    assert [summary.run for summary in summarize_runs(run.store)] == [THIRD, FIRST]


def test_a_given_name_serves_wherever_a_run_is_named(run: RunContext) -> None:
    assert find_run(run.store, "mine") == find_run(run.store, SECOND) == SECOND
    assert find_run(run.store, "min") is None
    assert resolve_model("red-fox", run.root).name == FIRST
    record(run, "20260104-000000-full-mine")
    assert find_run(run.store, "mine") == "20260104-000000-full-mine"


def test_a_run_that_made_nothing_does_not_change_the_default_model(run: RunContext) -> None:
    assert resolve_model("", run.root).name == SECOND
    run.store.delete_file("runs", f"{SECOND}.json")
    assert resolve_model("", run.root).name == FIRST
    run.store.delete_file("runs", f"{FIRST}.json")
    assert resolve_model("", run.root).name == THIRD, "the model that a run used, if no run made one"
    later, content = "20260104-000000-full-later", read_run(run.store, THIRD)
    assert content
    run.store.write_json(content, "runs", f"{later}.json")
    assert resolve_model("", run.root).name == later, "the latest of these"


def test_a_renamed_run_keeps_its_record(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    content = read_run(run.store, FIRST)
    assert content
    run.store.write_json(content, "runs", "latest.json")
    assert main(["runs", "rename", "red-fox", "baseline", "--root", run.root]) == 0
    latest = read_run(run.store, "latest")
    assert latest and latest["title"] == "baseline", "the copy of the record is renamed too"
    assert f"{FIRST} is called baseline now." in capsys.readouterr().out
    assert (find_run(run.store, "baseline"), find_run(run.store, "red-fox")) == (FIRST, None)
    assert rename_run(run.store, "baseline", "base-2") == FIRST
    for wrong in ("", "a b", "../x", "20260101-000000-full-x"):
        with pytest.raises(UserError, match="A run cannot be called"):
            rename_run(run.store, "mine", wrong)
    with pytest.raises(UserError, match="is called 'base-2' already"):
        rename_run(run.store, "mine", "base-2")
    with pytest.raises(UserError, match=r"There is no run 'mime' \(did you mean 'mine'\?\)"):
        rename_run(run.store, "mime", "x")


def test_deletion_keeps_what_other_runs_hold(run: RunContext) -> None:
    garbage = materialize(letters, run, "unused", 1)
    name, findings = delete_run(run.store, "mine", is_confirmed=False)
    assert (name, [finding.path.split("/")[0] for finding in findings]) == (SECOND, ["train"])
    assert read_run(run.store, SECOND), "nothing is deleted yet"
    delete_run(run.store, "mine", is_confirmed=True)
    assert not read_run(run.store, SECOND)
    assert not Path(run.root, "runs", f"{SECOND}.md").exists()
    assert not Path(run.root, findings[0].path).exists()
    assert Path(run.root, *garbage, "manifest.json").exists(), "gc deletes what no run needs"
    assert delete_run(run.store, "red-fox", is_confirmed=True)[1] == [], "the other run uses its outputs"
    assert resolve_model("", run.root).name == THIRD


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "is_deleted"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_deletion_asks_at_a_terminal(
    run: RunContext, answer: str, is_deleted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert main(["runs", "delete", "mine", "--root", run.root]) == (0 if is_deleted else 2)
    assert (read_run(run.store, SECOND) is None) == is_deleted


def test_deletion_without_a_terminal_needs_a_flag(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "delete", "mine", "--root", run.root]) == 2
    assert "add --yes" in capsys.readouterr().err
    assert main(["runs", "delete", "mine", "--root", run.root, "--yes"]) == 0
    assert main(["runs", "delete", "--root", run.root]) == 2
    assert "The command is textmill runs delete RUN." in capsys.readouterr().err
