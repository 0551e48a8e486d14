"""A root from an untrusted place: forged manifests and records, and paths and links that lead out of the root.

No file outside the root is read as content, written or deleted, and no file causes a traceback.
"""

import hashlib
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.checkpoint.training_checkpoint import read_description
from lm.common.errors import UserError
from lm.files.checksum import dumps_with_checksum, loads_with_checksum
from tasks.maintenance.gc import delete, find_garbage
from tasks.maintenance.verify import verify
from tasks.runs.models import resolve_model
from tasks.runtime.output import Ref, open_output, read_output
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.stage import Stage
from tests.helpers.roots import CALLS, letters, materialize, run_context, write_run_record
from textmill.cli.main import main

PATHS = ["../../../../outside.txt", "/outside.txt", "sub/../../a.txt", "..", ".", "", "sub//b.txt", "a\0b", "sub/"]
Content = dict[str, Any]


@pytest.fixture(autouse=True)
def _forget_calls() -> None:
    CALLS.clear()


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    """Return the context of a run whose root lies beside a file that must not be touched."""
    (tmp_path / "outside.txt").write_text("xxx")
    return run_context(tmp_path / "root")


@pytest.fixture
def ref(run: RunContext) -> Ref:
    output = materialize(letters, run, "x", 3)
    write_run_record(run, "20260101-000000-full-a", output)
    return output


def forge(path: Path, change: Callable[[Content], Any]) -> None:
    """Change a JSON file and its checksum, as an attacker would."""
    content = loads_with_checksum(path.read_bytes())
    assert content
    change(content)
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()  # dumps_with_checksum() refuses nan
    path.write_text(json.dumps({**content, "sha256": digest}, indent=1))


def check_made_again(run: RunContext, ref: Ref, outside: Path) -> None:
    """Check that the manifest is ignored, and that the next run makes the output again."""
    assert open_output(run.store, ref) is None
    assert [finding.kind for finding in verify(run.store) if finding.path.endswith("/manifest.json")] == ["damaged"]
    with pytest.raises(UserError, match="is damaged"):
        find_garbage(run.store)
    assert materialize(letters, run, "x", 3) == ref
    assert CALLS == ["letters", "letters"]
    assert read_output(run.store, ref).is_intact()
    assert outside.read_text() == "xxx"


@pytest.mark.parametrize("section", ["files", "records", "page", "attempt"])
@pytest.mark.parametrize("path", PATHS)
def test_a_manifest_with_a_path_outside_its_directory(
    run: RunContext, ref: Ref, tmp_path: Path, section: str, path: str
) -> None:
    def change(manifest: Content) -> None:
        file = {**manifest["files"][0], "path": path}  # the content of outside.txt
        changes = {"files": [file], "records": [file], "page": file, "attempt": path}
        manifest[section] = changes[section]

    forge(tmp_path / "root" / "letters" / ref.key / "manifest.json", change)
    check_made_again(run, ref, tmp_path / "outside.txt")


def set_field(name: str, value: Any) -> Callable[[Content], Any]:
    """Return a function that sets the field with a dotted name."""

    def change(content: Content) -> None:
        *parents, last = (int(part) if part.isdigit() else part for part in name.split("."))
        inner: Any = content
        for part in parents:
            inner = inner[part]
        inner[last] = value

    return change


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


FIELDS = [
    "stage",
    "format",
    "key",
    "attempt",
    "ingredients",
    "sources",
    "files",
    "records",
    "page",
    "etags",
    "figures",
    "made",
]
WRONG = {
    **{f"no {name}": lambda content, name=name: content.pop(name) for name in FIELDS},
    **{f"{name} a number": set_field(name, 7) for name in FIELDS if name != "format"},
    **{f"{name} null": set_field(name, None) for name in FIELDS if name != "page"},
    "another stage": set_field("stage", "upper"),
    "another key": set_field("key", "ab" * 32),
    "another format": set_field("format", 2),
    "a size of text": set_field("files.0.bytes", "3"),
    "a size of floats": set_field("files.0.bytes", 3.0),
    "a negative size": set_field("files.0.bytes", -1),
    "a huge size": set_field("files.0.bytes", 10**4000),
    "a short digest": set_field("files.0.sha256", "ab"),
    "an empty file entry": set_field("files.0", {}),
    "files in a dict": set_field("files", {"0": {}}),
    "a long name": set_field("files.0.path", "a" * 5000),
    "a source of text": set_field("sources.0", "x.txt"),
    "a time of nan": set_field("made.started", math.nan),
    "infinite seconds": set_field("made.seconds", math.inf),
    "huge seconds": set_field("made.seconds", 10**400),
    "a run without a name": set_field("made.run", None),
    "deep figures": set_field("figures", {"a": nested(40)}),
    "deep ingredients": set_field("ingredients", {"a": nested(900)}),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_a_manifest_with_another_schema(
    run: RunContext, ref: Ref, tmp_path: Path, change: Callable[[Content], Any]
) -> None:
    forge(tmp_path / "root" / "letters" / ref.key / "manifest.json", change)
    check_made_again(run, ref, tmp_path / "outside.txt")


def json_without_checksum(content: Any) -> bytes:
    return json.dumps(content, indent=1).encode()


BYTES = {
    "nothing": b"",
    "no JSON": b"{",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1" * 5000,
    "text": b'"sha256"',
    "not UTF-8": b'{"sha256": "\xff"}',
    "UTF-16": json_without_checksum({"sha256": "ab"}).decode().encode("utf-16"),
    "a deep list": b"[" * 100_000,
    "a deep dict": b'{"a":' * 100_000,
    "a digest of another kind": json_without_checksum({"sha256": {"sha256": 1}}),
    "half of a surrogate": json_without_checksum({"sha256": "\ud800"}),
    "only a digest": dumps_with_checksum({}).encode(),
}


@pytest.mark.parametrize("data", BYTES.values(), ids=BYTES.keys())
def test_invalid_bytes_as_manifest_and_records(run: RunContext, ref: Ref, tmp_path: Path, data: bytes) -> None:
    root = tmp_path / "root"
    for path in (root / "letters" / "latest.json", root / "runs" / "20260101-000000-full-a.json"):
        path.write_bytes(data)
    (root / "letters" / ref.key / "manifest.json").write_bytes(data)
    assert {finding.kind for finding in verify(run.store)} == {"damaged", "unfinished", "orphaned"}
    with pytest.raises(UserError, match="has no finished model"):
        resolve_model("", str(root))
    check_made_again(run, ref, tmp_path / "outside.txt")


@pytest.mark.parametrize("what", ["file", "directory", "attempt", "manifest", "key", "stage"])
def test_a_link_is_refused(
    run: RunContext, ref: Ref, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = read_output(run.store, ref)
    path = {
        "file": Path(output.url, "a.txt"),
        "directory": Path(output.url, "sub"),
        "attempt": Path(output.url),
        "manifest": Path(output.url).parent / "manifest.json",
        "key": Path(output.url).parent,
        "stage": Path(output.url).parents[1],
    }[what]
    target = tmp_path / "moved"
    path.rename(target)
    path.symlink_to(target)
    before = sorted(target.rglob("*"))
    with pytest.raises(UserError, match="is a link"):
        materialize(letters, run, "x", 3)
    if what != "manifest":
        with pytest.raises(UserError, match="is a link"):
            output.is_intact()
    assert main(["verify", "--root", str(run.root)]) == 1
    assert "is a link" in capsys.readouterr().out
    main(["gc", "--root", str(run.root), "--delete"])
    assert sorted(target.rglob("*")) == before, "nothing is written or deleted through a link"
    assert CALLS == ["letters"]


def test_garbage_is_not_deleted_through_a_link(run: RunContext, ref: Ref, tmp_path: Path) -> None:
    """One link replaces garbage after it was listed, and one is inside the garbage."""
    old = Path(read_output(run.store, ref).url)
    materialize(letters, run_context(run.root, refresh=frozenset({"letters"})), "x", 3)
    (finding,) = find_garbage(run.store)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.txt").write_text("keep")
    (old / "link").symlink_to(outside)
    assert delete(run.store, finding)
    assert (outside / "a.txt").read_text() == "keep"
    old.symlink_to(outside)
    with pytest.raises(UserError, match="is a link"):
        delete(run.store, finding)
    assert (outside / "a.txt").read_text() == "keep"


def test_a_pipe_is_not_read(run: RunContext, ref: Ref) -> None:
    path = read_output(run.store, ref).path("a.txt")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"a\.txt is a link or a special file"):
        materialize(letters, run, "x", 3)
    assert [finding.kind for finding in verify(run.store)] == ["damaged"]


def test_an_unfinished_attempt_with_a_link_is_not_resumed(run: RunContext, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def body(out: Attempt, text: str) -> None:
        seen.append([path.name for path in out.unfinished])
        if len(seen) < 3:
            raise RuntimeError("stop")

    stage = Stage("failing", body, is_resumable=True)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            materialize(stage, run, "x")
    first, second = sorted((tmp_path / "root" / "failing").glob("*/*"))
    (first / "deep").mkdir()
    (first / "deep" / "link").symlink_to(tmp_path / "outside.txt")
    (first.parent / "20990101T000000-00000000").symlink_to(tmp_path)
    materialize(stage, run, "x")
    assert seen[2] == [second.name]


@pytest.mark.parametrize("key", ["../../..", "/etc", "", "a" * 64, 7, None, {}, [], "AB" * 32, "ab" * 33])
def test_a_record_with_an_invalid_key(run: RunContext, ref: Ref, key: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("runs/20260101-000000-full-a.json", "letters/latest.json"):
        field = "stages.letters.key" if name.startswith("runs") else "key"
        forge(Path(run.root, name), set_field(field, key))
    forge(Path(run.root, "runs/20260101-000000-full-a.json"), set_field("stages.train", {"key": key}))
    assert materialize(letters, run, "y", 1) != ref  # reads latest.json for the reason
    assert main(["sample", "--root", run.root]) == 2
    assert "has no finished model" in capsys.readouterr().err
    assert main(["gc", "--root", run.root, "--delete"]) == 2
    assert read_output(run.store, ref).is_intact()


def test_a_damaged_run_record_is_skipped_with_a_warning(
    run: RunContext, ref: Ref, caplog: pytest.LogCaptureFixture
) -> None:
    write_run_record(run, "20260102-000000-full-b", ref)
    Path(run.root, "runs/20260102-000000-full-b.json").write_text("{}")
    with pytest.raises(UserError, match="has no finished model"):
        resolve_model("", run.root)
    assert "full-b.json is damaged and is skipped" in caplog.text


@pytest.mark.parametrize("stage", ["..", "../letters", "/", "", "Letters", "runs/../letters"])
def test_a_record_with_an_invalid_stage_name(run: RunContext, ref: Ref, stage: str) -> None:
    def change(content: Content) -> None:
        content["stages"] = {stage: content["stages"]["letters"]}

    forge(Path(run.root, "runs/20260101-000000-full-a.json"), change)
    with pytest.raises(UserError, match="it is not a valid run record"):
        find_garbage(run.store)


def test_a_checkpoint_with_paths_outside_its_directory(tmp_path: Path) -> None:
    """Reading /dev/zero would not end."""
    (tmp_path / "checkpoint.json").write_text(
        dumps_with_checksum({"files": {"/dev/zero": {"bytes": 0, "sha256": "ab" * 32}}})
    )
    assert read_description(tmp_path) is None


def test_a_link_in_an_unfinished_training_is_not_read(run: RunContext) -> None:
    step = Path(run.root, "train", "ab" * 32, "20260101T000000-00000000", "step-0000001")
    step.mkdir(parents=True)
    (step / "checkpoint.json").write_text(
        dumps_with_checksum({"step": 1, "files": {"a": {"bytes": 0, "sha256": "ab" * 32}}})
    )
    (step / "a").symlink_to("/dev/zero")
    assert [finding.problem for finding in verify(run.store)] == ["its stage has not finished it"]


def test_a_missing_directory_is_a_user_error(run: RunContext, ref: Ref) -> None:
    output = read_output(run.store, ref)
    assert output.directory("sub").name == "sub"
    for name in ("../../..", "/etc", "step-0000001", ""):
        with pytest.raises(UserError, match="has no directory"):
            output.directory(name)


def test_random_damage_of_a_manifest_causes_no_traceback(run: RunContext, ref: Ref) -> None:
    path = Path(run.root, *ref, "manifest.json")
    data = path.read_bytes()
    draws = random.Random(0)
    for _ in range(300):
        start, end = sorted(draws.choices(range(len(data)), k=2))
        changed = data[:start] + draws.choice([b"", draws.randbytes(3), data[start:end][::-1]]) + data[end:]
        path.write_bytes(changed)
        assert (open_output(run.store, ref) is None) == (changed != data)
