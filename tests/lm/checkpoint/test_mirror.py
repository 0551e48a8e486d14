"""The mirror of checkpoints on an object store."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tenacity import wait_none

from lm.checkpoint import mirror as mirror_module
from lm.checkpoint.mirror import CheckpointMirror
from lm.checkpoint.training_checkpoint import read_description
from lm.common.errors import TransientError
from lm.files import retry
from lm.files.atomic_dir import atomic_directory
from lm.files.checksum import dumps_with_checksum, file_checksum
from tests.helpers.limits import wait_for


def write_checkpoint(directory: Path, name: str, content: str = "") -> None:
    with atomic_directory(directory / name) as temporary:
        files = {}
        for file in ("model.safetensors", "optimizer.pt"):
            (temporary / file).write_text(f"{name} {file} {content}")
            size = (temporary / file).stat().st_size
            files[file] = {"bytes": size, "sha256": file_checksum((temporary / file).open("rb"))}
        description = {"step": int(name.removeprefix("step-")), "model": {}, "files": files}
        (temporary / "checkpoint.json").write_text(dumps_with_checksum(description))


def files_below(place: Path) -> dict[str, str]:
    return {str(path.relative_to(place)): path.read_text() for path in sorted(place.rglob("*")) if path.is_file()}


def test_another_machine_gets_the_same_checkpoints(bucket: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_checkpoint(first, "step-0000010")
    write_checkpoint(first, "step-0000020")
    (first / "metrics.jsonl").write_text("{}\n")
    CheckpointMirror(first, "s3://corpus/out").upload()
    CheckpointMirror(second, "s3://corpus/out").download()
    assert files_below(second) == files_below(first)


def test_deleted_checkpoints_are_deleted_at_the_url(bucket: Any, tmp_path: Path) -> None:
    mirror = CheckpointMirror(tmp_path, "s3://corpus/out")
    write_checkpoint(tmp_path, "step-0000010")
    mirror.upload()
    for path in (tmp_path / "step-0000010").iterdir():
        path.unlink()
    (tmp_path / "step-0000010").rmdir()
    mirror.upload()
    assert bucket.glob("corpus/out/step-*"), "the last checkpoint stays until there is a newer one"
    write_checkpoint(tmp_path, "step-0000020")
    mirror.upload()
    assert {path.split("/")[-2] for path in bucket.glob("corpus/out/step-*/*")} == {"step-0000020"}


def test_a_checkpoint_that_was_copied_in_part_does_not_count(bucket: Any, tmp_path: Path) -> None:
    bucket.pipe_file("corpus/out/step-0000010/model.safetensors", b"half of it")
    mirror = CheckpointMirror(tmp_path / "local", "s3://corpus/out")
    mirror.download()
    assert files_below(tmp_path / "local") == {}


def test_a_checkpoint_that_is_deleted_during_the_upload_leaves_no_files(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = CheckpointMirror(tmp_path, "s3://corpus/out")
    write_checkpoint(tmp_path, "step-0000010")
    put_file = mirror._fs.put_file

    def put_then_delete(source: str, target: str) -> None:
        put_file(source, target)
        for path in (tmp_path / "step-0000010").iterdir():
            path.unlink()

    monkeypatch.setattr(mirror._fs, "put_file", put_then_delete)
    mirror.upload()
    assert not bucket.glob("corpus/out/step-*/*")


def test_files_of_an_interrupted_upload_are_deleted(bucket: Any, tmp_path: Path) -> None:
    bucket.pipe_file("corpus/out/step-0000010/optimizer.pt", b"half of it")
    write_checkpoint(tmp_path, "step-0000020")
    CheckpointMirror(tmp_path, "s3://corpus/out").upload()
    assert {path.split("/")[-2] for path in bucket.glob("corpus/out/step-*/*")} == {"step-0000020"}


def test_a_request_that_fails_once_is_repeated(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry.retry_request, "wait", wait_none())
    first, second = (
        CheckpointMirror(tmp_path / "a", "s3://corpus/out"),
        CheckpointMirror(tmp_path / "b", "s3://corpus/out"),
    )
    failures = []

    def fail_first(name: str) -> None:
        operation, calls = getattr(first._fs, name), []

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 1:
                failures.append(name)
                raise ConnectionError("reset by peer")
            return operation(*arguments, **options)

        monkeypatch.setattr(first._fs, name, call)

    assert first._fs is second._fs
    for name in ("put_file", "glob", "get", "get_file"):
        fail_first(name)
    write_checkpoint(tmp_path / "a", "step-0000010")
    (tmp_path / "a" / "metrics.jsonl").write_text("{}\n")
    first.upload()
    second.download()
    assert files_below(tmp_path / "b") == files_below(tmp_path / "a")
    assert sorted(failures) == ["get", "get_file", "glob", "put_file"]


def test_a_store_that_keeps_failing_is_named(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry.retry_request, "wait", wait_none())
    mirror = CheckpointMirror(tmp_path, "s3://corpus/out")

    def fail(*arguments: Any) -> None:
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(mirror._fs, "put_file", fail)
    message = "The checkpoints at s3://corpus/out cannot be reached: reset by peer"
    with pytest.raises(TransientError, match=message), mirror.running():
        write_checkpoint(tmp_path, "step-0000010")


def test_new_checkpoints_are_copied_while_the_training_runs(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "_POLL_SECONDS", 0.05)
    with CheckpointMirror(tmp_path, "s3://corpus/out").running():
        write_checkpoint(tmp_path, "step-0000010")
        wait_for(lambda: bucket.glob("corpus/out/step-0000010/checkpoint.json"), 20, "copy")
        write_checkpoint(tmp_path, "step-0000020")
    assert bucket.exists("corpus/out/step-0000020/checkpoint.json"), "the last one is copied at the end"


def test_a_machine_that_comes_back_takes_the_newer_logs(bucket: Any, tmp_path: Path) -> None:
    old, new, url = tmp_path / "old", tmp_path / "new", "s3://corpus/out"

    def save(directory: Path, name: str) -> None:
        write_checkpoint(directory, name)
        (directory / "metrics.jsonl").write_text(f"up to {name}")

    save(new, "step-0000010")
    CheckpointMirror(new, url).upload()
    CheckpointMirror(old, url).download()
    save(new, "step-0000020")
    CheckpointMirror(new, url).upload()
    mirror = CheckpointMirror(old, url)
    mirror.download()
    mirror.upload()  # its checkpoint 10 is no new one
    assert (old / "metrics.jsonl").read_text() == "up to step-0000020"
    assert bucket.cat_file("corpus/out/metrics.jsonl") == b"up to step-0000020"
    save(old, "step-0000030")
    mirror.upload()
    assert bucket.cat_file("corpus/out/metrics.jsonl") == b"up to step-0000030"


def test_a_damaged_local_checkpoint_is_fetched_again(bucket: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "step-0000010")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    CheckpointMirror(tmp_path, "s3://corpus/out").upload()
    intact = files_below(tmp_path)
    (tmp_path / "step-0000010" / "model.safetensors").write_text("half of it")
    (tmp_path / "metrics.jsonl").write_text("half of it")
    CheckpointMirror(tmp_path, "s3://corpus/out").download()
    assert files_below(tmp_path) == intact


def test_a_checkpoint_that_is_deleted_and_trained_again_is_uploaded_again(bucket: Any, tmp_path: Path) -> None:
    """If the copy at the URL is damaged too, the training deletes the checkpoint and makes it again."""
    for name in ("step-0000010", "step-0000020"):
        write_checkpoint(tmp_path, name)
    CheckpointMirror(tmp_path, "s3://corpus/out").upload()
    bucket.pipe_file("corpus/out/step-0000020/model.safetensors", b"half of it")
    shutil.rmtree(tmp_path / "step-0000020")
    mirror = CheckpointMirror(tmp_path, "s3://corpus/out")
    mirror.download()
    assert read_description(tmp_path / "step-0000020") is None
    shutil.rmtree(tmp_path / "step-0000020")
    with mirror.running():
        write_checkpoint(tmp_path, "step-0000020", "trained again")
    assert b"trained again" in bucket.cat_file("corpus/out/step-0000020/model.safetensors")


def test_checkpoints_are_in_the_order_of_their_numbers(bucket: Any, tmp_path: Path) -> None:
    """From step 10,000,000 on, names are longer than before."""
    old, new, url = tmp_path / "old", tmp_path / "new", "s3://corpus/out"
    write_checkpoint(new, "step-9999990")
    CheckpointMirror(new, url).upload()
    CheckpointMirror(old, url).download()
    mirror = CheckpointMirror(new, url)
    mirror.download()
    write_checkpoint(new, "step-10000000")
    (new / "metrics.jsonl").write_text("up to step-10000000")
    (old / "metrics.jsonl").write_text("up to step-9999990")
    mirror.upload()
    CheckpointMirror(old, url).download()
    assert files_below(old) == files_below(new)
