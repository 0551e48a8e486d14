"""The stage contract without Prefect: keys, manifests, adoption, repair, and the reasons in the log."""

import itertools
import json
import logging
import pickle
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tenacity import wait_none

from lm.common.errors import UserError
from lm.files import retry
from tasks.runtime.execution import Execution
from tasks.runtime.locks import training_slot
from tasks.runtime.output import Input, Output, read_output
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.stage import Stage, stage
from tasks.runtime.store import Store
from tasks.runtime.training_process import _fetch_checkpoints
from tests.helpers.full_disk import full_disk
from tests.helpers.roots import CALLS, letters, materialize, run_context, upper


@pytest.fixture(autouse=True)
def _forget_calls() -> None:
    CALLS.clear()


def test_an_output_is_made_once_with_a_manifest(tmp_path: Path) -> None:
    run = run_context(tmp_path)
    ref = materialize(letters, run, "x", 3)
    assert materialize(letters, run, "x", 3) == ref
    assert CALLS == ["letters"]
    output = read_output(run.store, ref)
    assert output.path("a.txt").read_text() == "xxx"
    assert [file["path"] for file in output.manifest["files"]] == ["a.txt", "sub/b.txt"]
    assert [file["path"] for file in output.manifest["records"]] == ["time.txt"]
    assert output.manifest["ingredients"]["parameters"] == {"text": "x", "number": 3}
    assert output.manifest["made"]["run"] == "test"
    with pytest.raises(UserError, match=r"has no file z\.txt"):
        output.path("z.txt")


def test_the_key_depends_on_parameters_but_not_on_execution_or_root(tmp_path: Path) -> None:
    first = materialize(letters, run_context(tmp_path / "1"), "x", 3)
    other_root = materialize(
        letters, run_context(tmp_path / "2", execution=Execution(threads=1, log_interval=7)), "x", 3
    )
    assert other_root == first
    assert materialize(letters, run_context(tmp_path / "1"), "x", 4) != first


def test_a_refresh_makes_an_output_once_in_a_run(tmp_path: Path) -> None:
    materialize(letters, run_context(tmp_path), "x", 3)
    run = run_context(tmp_path, refresh=frozenset({"letters"}))
    for _ in range(3):
        materialize(letters, run, "x", 3)
    assert CALLS == ["letters", "letters"]
    assert letters.look_up(run, [letters.bind("x", 3)])[0][1], "cached for the rest of the run"


def test_an_output_that_holds_a_failure_is_made_again_once_in_each_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(out: Attempt, text: str) -> None:
        CALLS.append(text)
        out.figures = {"state": "refused" if len(CALLS) < 3 else "finished"}

    trying = Stage("trying", body, is_retried=lambda output: output.manifest["figures"]["state"] == "refused")
    with caplog.at_level(logging.INFO):
        for count in (1, 2, 3, 3):
            run = run_context(tmp_path)
            assert not trying.look_up(run, [trying.bind("x")])[0][1] or len(CALLS) == 3
            for _ in range(2):
                materialize(trying, run, "x")
            assert len(CALLS) == count
            assert trying.look_up(run, [trying.bind("x")])[0][1]
    assert caplog.text.count("Running trying again: its last result is a failure.") == 2


def test_records_are_not_content(tmp_path: Path) -> None:
    """Two attempts with different records have the same content digest."""
    run = run_context(tmp_path)
    ref = materialize(letters, run, "x", 3)
    before = read_output(run.store, ref)
    materialize(letters, run_context(tmp_path, refresh=frozenset({"letters"})), "x", 3)
    after = read_output(run.store, ref)
    assert CALLS == ["letters", "letters"]
    assert before.manifest["records"] != after.manifest["records"]
    assert before.manifest["attempt"] != after.manifest["attempt"]
    assert before.digest == after.digest
    assert before.is_intact(), "a refresh does not change the old attempt"


def test_the_key_depends_on_the_content_of_inputs_only(tmp_path: Path) -> None:
    run = run_context(tmp_path)
    up = materialize(upper, run, materialize(letters, run, "ab", 2), [materialize(letters, run, "q", 1)])
    same_content = materialize(letters, run, "abab", 1)  # another key, the same bytes
    assert materialize(upper, run, same_content, [materialize(letters, run, "q", 1)]) == up
    assert materialize(upper, run, same_content, []) != up
    assert CALLS.count("upper") == 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "record", "manifest"])
def test_a_damaged_output_is_made_again(tmp_path: Path, damage: str) -> None:
    run = run_context(tmp_path)
    ref = materialize(letters, run, "hello", 2)
    output = read_output(run.store, ref)
    path, content = output.path("a.txt"), output.path("a.txt").read_bytes()
    if damage == "flip":
        path.write_bytes(b"j" + content[1:])
    elif damage == "truncate":
        path.write_bytes(content[:-1])
    elif damage == "delete":
        path.unlink()
    elif damage == "record":
        output.path("time.txt").unlink()
    else:
        Path(run.store.path(*ref, "manifest.json")).write_text("{")
    assert materialize(letters, run, "hello", 2) == ref
    assert CALLS == ["letters", "letters"]
    assert read_output(run.store, ref).path("a.txt").read_bytes() == content


@pytest.mark.parametrize("body_fails", [True, False], ids=["body fails", "body succeeds"])
def test_an_output_is_not_published_if_its_input_was_damaged_in_the_meantime(tmp_path: Path, body_fails: bool) -> None:
    @stage("reading")
    def reading(out: Attempt, source: Output) -> None:
        path = source.path("a.txt")
        path.write_text("yyy")
        (out.directory / "copy.txt").write_text(path.read_text())
        if body_fails:
            raise ZeroDivisionError

    run = run_context(tmp_path)
    ref = materialize(letters, run, "x", 3)
    with pytest.raises(UserError, match=r"letters/.*/a\.txt changed or was damaged while reading read it"):
        materialize(reading, run, ref)
    assert not list(tmp_path.glob("reading/*/manifest.json"))


@pytest.mark.parametrize("is_list", [False, True])
def test_an_input_that_another_run_refreshes_during_a_wait_is_not_used(tmp_path: Path, is_list: bool) -> None:
    @stage("random")
    def random(out: Attempt) -> None:  # as a training on a GPU, which is not deterministic
        (out.directory / "a.txt").write_text(out.run.name)

    @contextmanager
    def wait_while_another_run_refreshes(run: RunContext) -> Iterator[None]:
        materialize(random, RunContext(run.root, "other", refresh))
        yield

    def body(out: Attempt, first: Output, others: list[Output]) -> None:
        (out.directory / "b.txt").touch()

    run, refresh = run_context(tmp_path), frozenset({"random"})
    fixed, changing = materialize(letters, run, "x", 3), materialize(random, run)
    inputs = (fixed, [fixed, changing]) if is_list else (changing, [fixed])
    waiting = Stage("waiting", body, slot=wait_while_another_run_refreshes)
    with pytest.raises(UserError, match=r"random/.* changed while this run waited; run the same command again"):
        materialize(waiting, run, *inputs)
    refresh = frozenset()
    materialize(waiting, run_context(tmp_path), *inputs)


def test_an_input_that_cannot_be_opened_leaves_no_directory(tmp_path: Path) -> None:
    class Damaged(Input):
        def identity(self, run: RunContext) -> str:
            return "group"

        def open(self, store: Store) -> None:
            raise UserError("damaged")

        def find_damaged_url(self, store: Store, opened: Any) -> str:
            return ""

    @stage("reading")
    def reading(out: Attempt, group: None) -> None:
        pass

    with pytest.raises(UserError, match="damaged"):
        materialize(reading, run_context(tmp_path), Damaged())
    assert not [path for path in tmp_path.glob("reading/*/*") if path.is_dir()]


def test_an_os_error_becomes_a_user_error(tmp_path: Path) -> None:
    @stage("writing")
    def writing(out: Attempt, text: str) -> None:
        raise OSError(28, "No space left on device", str(out.directory / "a.txt"))

    with pytest.raises(UserError, match=r"writing cannot continue: .*No space left on device: .*a\.txt"):
        materialize(writing, run_context(tmp_path), "x")


def test_a_copied_or_moved_root_is_used(tmp_path: Path) -> None:
    ref = materialize(letters, run_context(tmp_path / "old"), "x", 3)
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    (tmp_path / "old").rename(tmp_path / "moved")
    for place in ("copy", "moved"):
        assert materialize(letters, run_context(tmp_path / place), "x", 3) == ref
    assert CALLS == ["letters"]


def test_a_failed_attempt_has_no_manifest_and_is_passed_to_the_next(tmp_path: Path) -> None:
    seen: list[list[Path]] = []  # the unfinished attempts of each call

    @stage("failing", is_resumable=True)
    def failing(out: Attempt, text: str) -> None:
        seen.append(out.unfinished)
        (out.directory / "started.txt").write_text(text)
        if len(seen) == 1:
            raise RuntimeError("stop")

    run = run_context(tmp_path)
    with pytest.raises(RuntimeError):
        materialize(failing, run, "x")
    assert not list(tmp_path.glob("failing/*/manifest.json"))
    materialize(failing, run, "x")
    assert seen[0] == []
    assert [(path / "started.txt").read_text() for path in seen[1]] == ["x"]


@pytest.fixture
def names_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name attempts as if each began a second after the last one."""
    seconds = itertools.count(10)
    monkeypatch.setattr("tasks.runtime.stage.new_attempt_name", lambda: f"20260101T0000{next(seconds)}-00000000")


@pytest.mark.usefixtures("names_in_order")
@pytest.mark.parametrize("is_worker", [False, True])
def test_a_refresh_resumes_only_attempts_that_are_newer_than_the_finished_one(tmp_path: Path, is_worker: bool) -> None:
    seen: list[list[str]] = []  # the seconds in the names of the unfinished attempts of each call

    @stage("failing", is_resumable=True)
    def failing(out: Attempt, text: str) -> None:
        seen.append([path.name[13:15] for path in out.unfinished])
        (out.directory / "a.txt").write_text(text)
        if len(seen) in (1, 3, 4):
            raise RuntimeError("stop")

    def make(**changes: Any) -> None:
        run = run_context(tmp_path, **changes)
        materialize(failing, pickle.loads(pickle.dumps(run)) if is_worker else run, "x")

    with pytest.raises(RuntimeError):
        make()
    make()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            make(refresh=frozenset({"failing"}))
    make(refresh=frozenset({"failing"}))
    assert seen == [[], ["10"], [], ["12"], ["13", "12"]]
    make(refresh=frozenset({"failing"}))
    assert seen[5:] == [[]], "the next refresh begins at the start"


@pytest.mark.usefixtures("names_in_order")
def test_a_refresh_fetches_the_checkpoints_of_an_interrupted_one_from_the_root(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    place = "corpus/root/mirrored"

    @stage("mirrored", is_resumable=True)
    def mirrored(out: Attempt, text: str) -> None:
        _fetch_checkpoints(out)
        seen.append([path.name[13:15] for path in out.unfinished])
        (out.directory / "a.txt").write_text(text)
        bucket.pipe_file(f"{place}/{out.directory.parts[-2]}/{out.directory.name}/step-0000010/checkpoint.json", b"{}")
        if len(seen) > 1:
            raise RuntimeError("stop")

    def make(machine: str, **changes: Any) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        materialize(mirrored, run_context("s3://corpus/root", **changes), "x")

    make("a")
    for machine in "ab":
        with pytest.raises(RuntimeError):
            make(machine, refresh=frozenset({"mirrored"}))
    assert seen == [[], [], ["11"]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"number": 4}, ": number 3 → 4"),
        ({"refresh": True}, " again (--refresh)"),
        ({"delete": True}, " again: its files are damaged or missing"),
    ],
)
def test_the_log_gives_the_reason_to_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], reason: str
) -> None:
    run = run_context(tmp_path, refresh=frozenset({"letters"} if "refresh" in change else ()))
    if change:
        ref = materialize(letters, run_context(tmp_path), "x", 3)
        if "delete" in change:
            read_output(run.store, ref).path("a.txt").unlink()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        materialize(letters, run, "x", change.get("number", 3))
    assert f"Running letters{reason}." in caplog.text


def check_remote_root(root: str) -> None:
    run = RunContext(root, "test")
    ref = materialize(letters, run, "x", 3)
    up = materialize(upper, run, ref, [])
    assert read_output(run.store, up).path("A.txt").read_text() == "XXX"
    assert materialize(letters, RunContext(root, "again"), "x", 3) == ref
    assert CALLS == ["letters", "upper"]
    attempt = read_output(run.store, ref).manifest["attempt"]
    run.store.fs.pipe_file(run.store.path(*ref, attempt, "a.txt"), b"xxy")
    materialize(letters, run, "x", 3)
    assert CALLS == ["letters", "upper", "letters"]


def test_a_root_in_memory() -> None:
    """Files of a remote root are uploaded, and downloaded before they are read."""
    check_remote_root("memory://stage-test")


def test_a_root_on_s3(bucket: Any) -> None:
    check_remote_root("s3://corpus/root")


def test_an_unreachable_root_on_s3(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry.retry_request, "wait", wait_none())
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    type(bucket).clear_instance_cache()
    with pytest.raises(UserError, match=r"cannot be (reached|written)"):
        materialize(letters, RunContext("s3://corpus/root", "test"), "x", 3)


def test_a_write_to_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    store = run_context(tmp_path).store
    with full_disk(10), pytest.raises(UserError, match=r"a\.txt cannot be written"):
        store.write_text("x" * 100, "files", "a.txt")
    assert store.list_names("files") == []


def test_an_unusable_root_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(UserError, match="cannot be written"):
        materialize(letters, run_context(tmp_path / "file"), "x", 3)
    with pytest.raises(UserError, match="cannot be used"):
        RunContext("nosuch://root", "test").store.list_names()


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    run = run_context(tmp_path)
    ref = materialize(letters, run, "ü", 1)
    content = json.loads(Path(run.store.path(*ref, "manifest.json")).read_text(encoding="utf-8"))
    assert content["key"] == ref.key
    assert not list(tmp_path.rglob("*.tmp"))


def test_of_two_concurrent_runs_the_second_uses_the_output_of_the_first(tmp_path: Path) -> None:
    bodies: list[str] = []

    def body(out: Attempt, text: str) -> None:
        time.sleep(0.3)  # both have started by then
        bodies.append(text)
        (out.directory / "text.txt").write_text(text)

    limited = Stage("limited", body, slot=training_slot)
    with ThreadPoolExecutor(2) as pool:
        refs = list(pool.map(lambda name: materialize(limited, RunContext(str(tmp_path), name), "a"), ["one", "two"]))
    assert refs[0] == refs[1]
    assert bodies == ["a"]


def test_a_run_context_can_be_pickled(tmp_path: Path) -> None:
    run = RunContext(str(tmp_path), "run", frozenset({"merge"}), Execution(threads=3))
    sent = pickle.loads(pickle.dumps(run))
    assert sent == replace(run, stopping=sent.stopping, is_worker=True)
