"""The stage contract, without Prefect: keys, manifests, adoption, repair, and the reasons given."""

import json
import logging
import pickle
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tenacity import wait_none

from lm.chunks import Range, cut_chunks
from lm.errors import UserError
from lm.execution import Execution
from tasks import source_digest, store
from tasks.count import count_chunk
from tasks.encode import encode_chunk
from tasks.machine import training_turn
from tasks.output import Output, open_output, read_output
from tasks.sample import sample
from tasks.stage import Draft, Run, Stage, Stopped, stage
from tasks.texts import Chunk, open_ranges
from tasks.train import train
from tests.roots import CALLS, a_run, letters, make, upper


@pytest.fixture(autouse=True)
def _forget_calls() -> None:
    CALLS.clear()


def test_an_output_is_made_once_and_described(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    ref = make(letters, run, "x", 3)
    assert make(letters, run, "x", 3) == ref
    assert CALLS == ["letters"]
    output = read_output(run.store, ref)
    assert output.path("a.txt").read_text() == "xxx"
    assert [file["path"] for file in output.manifest["files"]] == ["a.txt", "sub/b.txt"]
    assert [file["path"] for file in output.manifest["records"]] == ["time.txt"]
    assert output.manifest["ingredients"]["parameters"] == {"text": "x", "number": 3}
    assert output.manifest["made"]["run"] == "test"
    with pytest.raises(UserError, match=r"has no file z\.txt"):
        output.path("z.txt")


def test_the_key_follows_parameters_and_no_execution_or_root(tmp_path: Path) -> None:
    first = make(letters, a_run(tmp_path / "1"), "x", 3)
    other_root = make(letters, a_run(tmp_path / "2", execution=Execution(threads=1, log_interval=7)), "x", 3)
    assert other_root == first
    assert make(letters, a_run(tmp_path / "1"), "x", 4) != first


def test_records_and_source_places_are_outside_the_content(tmp_path: Path) -> None:
    """Two makings differ in their records and attempts, and have one digest."""
    run = a_run(tmp_path)
    ref = make(letters, run, "x", 3)
    before = read_output(run.store, ref)
    make(letters, a_run(tmp_path, refresh=frozenset({"letters"})), "x", 3)
    after = read_output(run.store, ref)
    assert CALLS == ["letters", "letters"]
    assert before.manifest["records"] != after.manifest["records"]
    assert before.manifest["attempt"] != after.manifest["attempt"]
    assert before.digest == after.digest
    assert before.is_intact(), "a refresh leaves the old attempt alone"


def test_downstream_follows_the_content_of_upstream_only(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    up = make(upper, run, make(letters, run, "ab", 2), [make(letters, run, "q", 1)])
    same_content = make(letters, run, "abab", 1)  # another key, the same bytes
    assert make(upper, run, same_content, [make(letters, run, "q", 1)]) == up
    assert make(upper, run, same_content, []) != up
    assert CALLS.count("upper") == 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "record", "manifest"])
def test_damage_is_noticed_and_repaired(tmp_path: Path, damage: str) -> None:
    run = a_run(tmp_path)
    ref = make(letters, run, "hello", 2)
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
    assert make(letters, run, "hello", 2) == ref
    assert CALLS == ["letters", "letters"]
    assert read_output(run.store, ref).path("a.txt").read_bytes() == content


@pytest.mark.parametrize("is_noticed", [True, False], ids=["body fails", "body succeeds"])
def test_what_is_made_of_an_input_that_is_damaged_meanwhile_is_not_kept(tmp_path: Path, is_noticed: bool) -> None:
    @stage("reading")
    def reading(out: Draft, source: Output) -> None:
        path = source.path("a.txt")
        path.write_text("yyy")
        (out.directory / "copy.txt").write_text(path.read_text())
        if is_noticed:
            raise ZeroDivisionError

    run = a_run(tmp_path)
    ref = make(letters, run, "x", 3)
    with pytest.raises(UserError, match=r"letters/.* was damaged while reading read it"):
        make(reading, run, ref)
    assert open_output(run.store, reading.ref(reading.named((ref,)), run)) is None


def test_a_file_system_that_fails_is_named_in_one_message(tmp_path: Path) -> None:
    @stage("writing")
    def writing(out: Draft, text: str) -> None:
        raise OSError(28, "No space left on device", str(out.directory / "a.txt"))

    with pytest.raises(UserError, match=r"writing cannot go on: .*No space left on device: .*a\.txt"):
        make(writing, a_run(tmp_path), "x")


def test_a_copied_or_moved_root_is_used(tmp_path: Path) -> None:
    ref = make(letters, a_run(tmp_path / "old"), "x", 3)
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    (tmp_path / "old").rename(tmp_path / "moved")
    for place in ("copy", "moved"):
        assert make(letters, a_run(tmp_path / place), "x", 3) == ref
    assert CALLS == ["letters"]


def test_a_failed_body_leaves_no_manifest_and_the_next_is_told(tmp_path: Path) -> None:
    seen: list[list[Path]] = []  # the earlier attempts that each call is told of

    @stage("failing")
    def failing(out: Draft, text: str) -> None:
        seen.append(out.unfinished)
        (out.directory / "begun.txt").write_text(text)
        if len(seen) == 1:
            raise RuntimeError("stop")

    run = a_run(tmp_path)
    with pytest.raises(RuntimeError):
        make(failing, run, "x")
    ref = failing.ref(failing.named(("x",)), run)
    assert open_output(run.store, ref) is None
    make(failing, run, "x")
    assert seen[0] == []
    assert [(path / "begun.txt").read_text() for path in seen[1]] == ["x"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "it has no result yet"),
        ({"number": 4}, "changed since its last result: parameters.number"),
        ({"refresh": True}, "a refresh was asked for"),
        ({"delete": True}, "its files are damaged or missing"),
    ],
)
def test_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], reason: str
) -> None:
    run = a_run(tmp_path, refresh=frozenset({"letters"} if "refresh" in change else ()))
    if change:
        ref = make(letters, a_run(tmp_path), "x", 3)
        if "delete" in change:
            read_output(run.store, ref).path("a.txt").unlink()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        make(letters, run, "x", change.get("number", 3))
    assert f"letters runs: {reason}." in caplog.text


def test_an_object_enters_the_key_by_its_identity(tmp_path: Path) -> None:
    @stage("sized")
    def sized(out: Draft, chunk: Chunk) -> None:
        CALLS.append("sized")
        (out.directory / "size.txt").write_text(str(chunk.bytes))

    run = a_run(tmp_path)
    here = Chunk("train", 1, 9, [("/a/x.txt", Range(0, 10, 20, True, "cd" * 32))])
    moved = Chunk("valid", 7, 8, [("/b/y.txt", Range(3, 0, 10, True, "cd" * 32))])
    unended = Chunk("train", 1, 9, [("/a/x.txt", Range(0, 10, 20, False, "cd" * 32))])
    assert make(sized, run, here) == make(sized, run, moved)
    assert CALLS == ["sized"]
    assert make(sized, run, unended) != make(sized, run, here)


def check_remote_root(root: str) -> None:
    run = Run(root, "test")
    ref = make(letters, run, "x", 3)
    up = make(upper, run, ref, [])
    assert read_output(run.store, up).path("A.txt").read_text() == "XXX"
    assert make(letters, Run(root, "again"), "x", 3) == ref
    assert CALLS == ["letters", "upper"]
    attempt = read_output(run.store, ref).manifest["attempt"]
    run.store.fs.pipe_file(run.store.path(*ref, attempt, "a.txt"), b"xxy")
    make(letters, run, "x", 3)
    assert CALLS == ["letters", "upper", "letters"]


def test_a_root_in_memory() -> None:
    """A root that is not a local directory: files are uploaded, and fetched to be read."""
    check_remote_root("memory://stage-test")


def test_a_root_on_s3(bucket: Any) -> None:
    check_remote_root("s3://corpus/root")


def test_a_root_on_s3_out_of_reach(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.patiently, "wait", wait_none())
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    type(bucket).clear_instance_cache()
    with pytest.raises(UserError, match=r"cannot be (reached|written)"):
        make(letters, Run("s3://corpus/root", "test"), "x", 3)


def test_an_unwritable_root_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(UserError, match="cannot be written"):
        make(letters, a_run(tmp_path / "file"), "x", 3)
    with pytest.raises(UserError, match="cannot be used"):
        Run("nosuch://root", "test").store.names()


def test_the_digests_of_the_real_stages_hold_what_they_use() -> None:
    assert {"lm.corpus", "lm.counts", "lm.pretokens", "tasks.texts"} <= set(count_chunk.source)
    assert {"lm.corpus", "lm.shards", "lm.tokenizer"} <= set(encode_chunk.source)
    assert {"lm.shards", "lm.trainer", "lm.model", "lm.optim"} <= set(train.source)
    assert "lm.trainer" not in sample.source
    for used in (count_chunk, encode_chunk, train, sample):
        assert not {"tasks.stage", "tasks.store", "tasks.progress", "lm.execution"} & set(used.source)


def test_a_text_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one two")
    (ranges,) = cut_chunks([str(path)], [], 100)
    chunk = Chunk("train", 1, 1, [(str(path), part) for part in ranges])
    assert [b"".join(blocks) for blocks, _ in open_ranges(chunk, threading.Event())] == [b"one two"]
    path.write_text("one too")
    with pytest.raises(UserError, match=r"text\.txt changed while the pipeline ran"):
        for blocks, _ in open_ranges(chunk, threading.Event()):
            b"".join(blocks)


def test_a_chunk_ends_early_when_the_run_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one two")
    (ranges,) = cut_chunks([str(path)], [], 100)
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(Stopped):
        for blocks, _ in open_ranges(Chunk("train", 1, 1, [(str(path), part) for part in ranges]), stopping):
            b"".join(blocks)


def _project(directory: Path) -> Path:
    package = directory / "lm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "used.py").write_text("import lm.deep\n\nVALUE = 1  # a comment\n")
    (package / "deep.py").write_text('TEXT = """a\n\n# no comment\n"""\n')
    (package / "lazy.py").write_text("LAZY = 1\n")
    (package / "other.py").write_text("OTHER = 1\n")
    stage_file = directory / "stage_file.py"
    stage_file.write_text("import os\nimport prefect\nfrom lm.used import VALUE\n\ndef f():\n    from lm import lazy\n")
    return stage_file


@pytest.mark.parametrize(
    ("module", "old", "new", "changes"),
    [
        ("used", "VALUE = 1", "VALUE = 2", {"lm.used"}),
        ("used", "# a comment", "# another one", set()),
        ("used", "\n\nVALUE", "\n\n\n    # more\n\nVALUE", set()),
        ("deep", "# no comment", "# changed text", {"lm.deep"}),
        ("deep", "a\n\n#", "a\n#", {"lm.deep"}),
        ("lazy", "LAZY = 1", "LAZY = 2", {"lm.lazy"}),
        ("other", "OTHER = 1", "OTHER = 2", set()),
    ],
)
def test_editing_a_module_changes_the_stages_that_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, old: str, new: str, changes: set[str]
) -> None:
    stage_file = _project(tmp_path)
    monkeypatch.setattr(source_digest, "PROJECT", tmp_path)
    source_digest.source_digests.cache_clear()
    before = source_digest.source_digests(str(stage_file))
    assert set(before) == {"stage", "lm", "lm.used", "lm.deep", "lm.lazy"}
    path = tmp_path / "lm" / f"{module}.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    source_digest.source_digests.cache_clear()
    after = source_digest.source_digests(str(stage_file))
    source_digest.source_digests.cache_clear()
    assert {name for name in before if before[name] != after[name]} == changes


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    ref = make(letters, run, "ü", 1)
    content = json.loads(Path(run.store.path(*ref, "manifest.json")).read_text(encoding="utf-8"))
    assert content["key"] == ref.key
    assert not list(tmp_path.rglob("*.tmp"))


def test_of_two_runs_at_once_the_second_takes_what_the_first_made_in_its_turn(tmp_path: Path) -> None:
    bodies: list[str] = []

    def body(out: Draft, text: str) -> None:
        time.sleep(0.3)  # long enough for both to have begun
        bodies.append(text)
        (out.directory / "text.txt").write_text(text)

    alone = Stage("alone", body, turn=lambda execution: training_turn(execution.max_trainings))
    with ThreadPoolExecutor(2) as pool:
        refs = list(pool.map(lambda name: alone.make(Run(str(tmp_path), name), {"text": "a"}), ["one", "two"]))
    assert refs[0] == refs[1]
    assert bodies == ["a"]


def test_what_a_stage_is_told_can_be_sent_to_another_machine(tmp_path: Path) -> None:
    run = Run(str(tmp_path), "run", frozenset({"merge"}), Execution(threads=3))
    sent = pickle.loads(pickle.dumps(run))
    assert sent == replace(run, stopping=sent.stopping)
