"""A root from elsewhere: manifests and records that lie, paths and links that lead out of it. Nothing outside is read
for the content of an output, written or deleted, and no shape of a file is met with a traceback."""

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from flows.console import latest_model
from lm.checkpoint import read_description
from lm.corpus import Source
from lm.errors import UserError
from lm.signed import read_signed, sign
from tasks.audit import delete, garbage, verify
from tasks.output import Ref, open_output, read_output
from tasks.records import read_content
from tasks.stage import Draft, Run, Stage
from tasks.texts import read_chunks
from tests.roots import CALLS, a_run, letters, make, record

PLACES = ["../../../../outside.txt", "/outside.txt", "sub/../../a.txt", "..", ".", "", "sub//b.txt", "a\0b", "sub/"]
Content = dict[str, Any]


@pytest.fixture(autouse=True)
def _forget_calls() -> None:
    CALLS.clear()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Of a root with one output, beside a file that is none of its business."""
    (tmp_path / "outside.txt").write_text("xxx")
    return a_run(tmp_path / "root")


@pytest.fixture
def ref(run: Run) -> Ref:
    found = make(letters, run, "x", 3)
    record(run, "20260101-000000-full-a", found)
    return found


def forge(path: Path, change: Callable[[Content], Any]) -> None:
    """Change a file of ours, as one who makes its digest fit."""
    content = read_signed(path.read_bytes())
    assert content
    change(content)
    path.write_text(sign(content))


def check_made_anew(run: Run, ref: Ref, outside: Path) -> None:
    """The manifest counts for nothing, and the next run makes the output anew."""
    assert open_output(run.store, ref) is None
    assert [finding.kind for finding in verify(run.store) if finding.place.endswith("/manifest.json")] == ["damaged"]
    with pytest.raises(UserError, match="is damaged"):
        garbage(run.store)
    assert make(letters, run, "x", 3) == ref
    assert CALLS == ["letters", "letters"]
    assert read_output(run.store, ref).is_intact()
    assert outside.read_text() == "xxx"


@pytest.mark.parametrize("section", ["files", "records", "page", "attempt"])
@pytest.mark.parametrize("place", PLACES)
def test_a_manifest_that_leads_out_of_its_directory(
    run: Run, ref: Ref, tmp_path: Path, section: str, place: str
) -> None:
    def change(manifest: Content) -> None:
        file = {**manifest["files"][0], "path": place}  # "xxx", as outside
        changes = {"files": [file], "records": [file], "page": file, "attempt": place}
        manifest[section] = changes[section]

    forge(tmp_path / "root" / "letters" / ref.key / "manifest.json", change)
    check_made_anew(run, ref, tmp_path / "outside.txt")


def put(name: str, value: Any) -> Callable[[Content], Any]:
    """A change of the value at ``name``, whose parts are joined by dots."""

    def change(content: Content) -> None:
        *above, last = (int(part) if part.isdigit() else part for part in name.split("."))
        inner: Any = content
        for part in above:
            inner = inner[part]
        inner[last] = value

    return change


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


FIELDS = ["stage", "format", "key", "attempt", "ingredients", "sources", "files", "records", "page", "figures", "made"]
WRONG = {
    **{f"no {name}": lambda content, name=name: content.pop(name) for name in FIELDS},
    **{f"{name} a number": put(name, 7) for name in FIELDS if name != "format"},
    **{f"{name} null": put(name, None) for name in FIELDS if name != "page"},
    "another stage": put("stage", "upper"),
    "another key": put("key", "ab" * 32),
    "another format": put("format", 2),
    "a size of text": put("files.0.bytes", "3"),
    "a size of floats": put("files.0.bytes", 3.0),
    "a size below none": put("files.0.bytes", -1),
    "a huge size": put("files.0.bytes", 10**4000),
    "a digest too short": put("files.0.sha256", "ab"),
    "a file of nothing": put("files.0", {}),
    "files in a dict": put("files", {"0": {}}),
    "a name too long": put("files.0.path", "a" * 5000),
    "a source of text": put("sources.0", "x.txt"),
    "a time that is none": put("made.started", math.nan),
    "endless seconds": put("made.seconds", math.inf),
    "huge seconds": put("made.seconds", 10**400),
    "a run without a name": put("made.run", None),
    "figures too deep": put("figures", {"a": nested(40)}),
    "ingredients too deep": put("ingredients", {"a": nested(900)}),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_a_manifest_of_another_shape(run: Run, ref: Ref, tmp_path: Path, change: Callable[[Content], Any]) -> None:
    forge(tmp_path / "root" / "letters" / ref.key / "manifest.json", change)
    check_made_anew(run, ref, tmp_path / "outside.txt")


def unsigned(content: Any) -> bytes:
    return json.dumps(content, indent=1).encode()


BYTES = {
    "nothing": b"",
    "no JSON": b"{",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1" * 5000,
    "text": b'"sha256"',
    "not UTF-8": b'{"sha256": "\xff"}',
    "UTF-16": unsigned({"sha256": "ab"}).decode().encode("utf-16"),
    "a deep list": b"[" * 100_000,
    "a deep dict": b'{"a":' * 100_000,
    "a digest of another kind": unsigned({"sha256": {"sha256": 1}}),
    "half of a surrogate": unsigned({"sha256": "\ud800"}),
    "only a digest": sign({}).encode(),
}


@pytest.mark.parametrize("data", BYTES.values(), ids=BYTES.keys())
def test_bytes_that_are_no_manifest_or_record(run: Run, ref: Ref, tmp_path: Path, data: bytes) -> None:
    root = tmp_path / "root"
    for path in (root / "letters" / "latest.json", root / "runs" / "20260101-000000-full-a.json"):
        path.write_bytes(data)
    (root / "letters" / ref.key / "manifest.json").write_bytes(data)
    assert {finding.kind for finding in verify(run.store)} == {"damaged", "unfinished", "orphaned"}
    with pytest.raises(UserError, match="has no finished model"):
        latest_model(str(root))
    check_made_anew(run, ref, tmp_path / "outside.txt")


@pytest.mark.parametrize("what", ["file", "directory", "attempt", "manifest", "key", "stage"])
def test_a_link_is_refused_and_named(
    run: Run, ref: Ref, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = read_output(run.store, ref)
    place = {
        "file": Path(output.url, "a.txt"),
        "directory": Path(output.url, "sub"),
        "attempt": Path(output.url),
        "manifest": Path(output.url).parent / "manifest.json",
        "key": Path(output.url).parent,
        "stage": Path(output.url).parents[1],
    }[what]
    target = tmp_path / "moved"
    place.rename(target)
    place.symlink_to(target)
    before = sorted(target.rglob("*"))
    with pytest.raises(UserError, match="is a link"):
        make(letters, run, "x", 3)
    if what != "manifest":
        with pytest.raises(UserError, match="is a link"):
            output.is_intact()
    assert main(["verify", str(run.root)]) == 1
    assert "is a link" in capsys.readouterr().out
    main(["gc", str(run.root), "--delete"])
    assert sorted(target.rglob("*")) == before, "nothing is deleted, or written, by way of a link"
    assert CALLS == ["letters"]


def test_garbage_is_not_deleted_by_way_of_a_link(run: Run, ref: Ref, tmp_path: Path) -> None:
    """One that is put there after it was listed, and one inside what is deleted."""
    old = Path(read_output(run.store, ref).url)
    make(letters, a_run(run.root, refresh=frozenset({"letters"})), "x", 3)
    (finding,) = garbage(run.store)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a.txt").write_text("mine")
    (old / "link").symlink_to(mine)
    assert delete(run.store, finding)
    assert (mine / "a.txt").read_text() == "mine"
    old.symlink_to(mine)
    with pytest.raises(UserError, match="is a link"):
        delete(run.store, finding)
    assert (mine / "a.txt").read_text() == "mine"


def test_what_never_ends_is_not_read(run: Run, ref: Ref) -> None:
    path = read_output(run.store, ref).path("a.txt")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"a\.txt is a link, or no plain file"):
        make(letters, run, "x", 3)
    assert [finding.kind for finding in verify(run.store)] == ["damaged"]


def test_an_unfinished_attempt_with_a_link_is_not_gone_on_from(run: Run, tmp_path: Path) -> None:
    told: list[list[str]] = []

    def body(out: Draft, text: str) -> None:
        told.append([path.name for path in out.unfinished])
        if len(told) < 3:
            raise RuntimeError("stop")

    stage = Stage("failing", body)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            stage.make(run, {"text": "x"})
    first, second = sorted((tmp_path / "root" / "failing").glob("*/*"))
    (first / "deep").mkdir()
    (first / "deep" / "link").symlink_to(tmp_path / "outside.txt")
    (first.parent / "20990101T000000-00000000").symlink_to(tmp_path)
    stage.make(run, {"text": "x"})
    assert told[2] == [second.name]


@pytest.mark.parametrize("key", ["../../..", "/etc", "", "a" * 64, 7, None, {}, [], "AB" * 32, "ab" * 33])
def test_a_record_that_names_what_is_no_key(run: Run, ref: Ref, key: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("runs/20260101-000000-full-a.json", "letters/latest.json"):
        place = "stages.letters.key" if name.startswith("runs") else "key"
        forge(Path(run.root, name), put(place, key))
    forge(Path(run.root, "runs/20260101-000000-full-a.json"), put("stages.train", {"key": key}))
    assert make(letters, run, "y", 1) != ref  # which looks for the latest, to say what has changed
    assert main(["sample", "--root", run.root]) == 2
    assert "has no finished model" in capsys.readouterr().err
    assert main(["gc", run.root, "--delete"]) == 2
    assert read_output(run.store, ref).is_intact()


def test_a_damaged_record_is_passed_over_with_a_word(run: Run, ref: Ref, caplog: pytest.LogCaptureFixture) -> None:
    record(run, "20260102-000000-full-b", ref)
    Path(run.root, "runs/20260102-000000-full-b.json").write_text("{}")
    with pytest.raises(UserError, match="has no finished model"):
        latest_model(run.root)
    assert "full-b.json is damaged; the run that it tells of is passed over" in caplog.text


_TOTALS = {"tokens": 1, "documents": 1, "bytes": 5}
_RANGE = {"text": 0, "start": 0, "end": 5, "last": True, "sha256": "ab" * 32}
CONTENTS: dict[str, Any] = {
    "texts.json": {"train": [{"file": None, "source": 0, "bytes": 5}], "valid": []},
    "chunks.json": {"train": [[_RANGE]], "valid": []},
    "shard.json": _TOTALS,
    "index.json": {"vocab_size": 300, "separator": "x", "tokenizer": "ab" * 32, "train": _TOTALS, "valid": _TOTALS},
    "training.json": {"best": "step-0000001"},
    "samples.json": [{"prompt": "a", "text": "b"}],
}


@pytest.mark.parametrize("name", CONTENTS)
def test_the_content_of_an_output_is_read_in_its_shape_alone(tmp_path: Path, name: str) -> None:
    path, content = tmp_path / name, CONTENTS[name]
    path.write_text(json.dumps(content))
    assert read_content(path) == content
    others: list[Any] = [None, 7, "x", [7], {"train": 7}, {}, {"train": [[7]], "valid": []}, [{"prompt": "a"}]]
    others += [{**content, key: [-1]} for key in content] if isinstance(content, dict) else []
    for other in others:
        path.write_text(json.dumps(other))
        with pytest.raises(UserError, match=f"{name} is not as its stage writes it"):
            read_content(path)


@pytest.mark.parametrize(("part", "source", "text"), [("texts", 1, 0), ("texts", None, 0), ("chunks", 0, 1)])
def test_a_chunk_of_a_text_that_is_not_there(run: Run, part: str, source: int | None, text: int) -> None:
    """The digests fit; what refers to it is one past the last, or nothing."""
    texts = {"train": [{"file": None, "source": source}], "valid": []}
    ranges = [{**_RANGE, "text": text}]

    def ingest(out: Draft, text: str) -> None:
        out.sources = [Source("a.txt", 5, "ab" * 32)]
        (out.directory / "texts.json").write_text(json.dumps(texts))

    def chunk(out: Draft, text: str) -> None:
        (out.directory / "chunks.json").write_text(json.dumps({"train": [ranges], "valid": []}))

    made = [Stage(body.__name__, body).make(run, {"text": "x"}) for body in (ingest, chunk)]
    with pytest.raises(UserError, match=f"refresh the {'ingest' if part == 'texts' else 'chunk'} stage"):
        read_chunks(run.store, *made, "train")


@pytest.mark.parametrize("stage", ["..", "../letters", "/", "", "Letters", "runs/../letters"])
def test_a_record_that_names_what_is_no_stage(run: Run, ref: Ref, stage: str) -> None:
    def change(content: Content) -> None:
        content["stages"] = {stage: content["stages"]["letters"]}

    forge(Path(run.root, "runs/20260101-000000-full-a.json"), change)
    with pytest.raises(UserError, match="it is not a run's record"):
        garbage(run.store)


def test_a_checkpoint_that_describes_files_elsewhere(tmp_path: Path) -> None:
    """Reading /dev/zero would not end."""
    (tmp_path / "checkpoint.json").write_text(sign({"files": {"/dev/zero": {"bytes": 0, "sha256": "ab" * 32}}}))
    assert read_description(tmp_path) is None


def test_a_link_in_an_unfinished_training_is_not_read(run: Run) -> None:
    step = Path(run.root, "train", "ab" * 32, "20260101T000000-00000000", "step-0000001")
    step.mkdir(parents=True)
    (step / "checkpoint.json").write_text(sign({"step": 1, "files": {"a": {"bytes": 0, "sha256": "ab" * 32}}}))
    (step / "a").symlink_to("/dev/zero")
    assert [finding.what for finding in verify(run.store)] == ["its stage has not finished it"]


def test_a_name_that_no_file_has_is_a_users_mistake(run: Run, ref: Ref) -> None:
    output = read_output(run.store, ref)
    assert output.directory("sub").name == "sub"
    for name in ("../../..", "/etc", "step-0000001", ""):
        with pytest.raises(UserError, match="has no directory"):
            output.directory(name)


def test_random_damage_of_a_manifest_is_never_a_traceback(run: Run, ref: Ref) -> None:
    path = Path(run.root, *ref, "manifest.json")
    data = path.read_bytes()
    draws = random.Random(0)
    for _ in range(300):
        start, end = sorted(draws.choices(range(len(data)), k=2))
        changed = data[:start] + draws.choice([b"", draws.randbytes(3), data[start:end][::-1]]) + data[end:]
        path.write_bytes(changed)
        assert (open_output(run.store, ref) is None) == (changed != data)
