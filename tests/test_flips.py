"""One changed byte anywhere below a finished root: ``verify`` names the file, and no run uses it."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.pipeline import pipeline
from flows.report import outputs_of
from lm.errors import UserError
from tasks import store as store_module
from tasks.audit import verify
from tasks.lock import LOCK
from tasks.output import Output, Ref, open_output
from tasks.records import RunRecord, read
from tasks.stage import Run
from tasks.store import Store
from tests.deployed import TINY
from tests.training import rows_of

pytestmark = pytest.mark.usefixtures("prefect_server")
CONFIG = TINY | {"execution": {"compile": False}}
POSITIONS = 22


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Path:
    """A root with one run of the whole chain; tests work on copies."""
    root = tmp_path_factory.mktemp("flips") / "finished"
    pipeline(CONFIG, str(root))
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "root"))


def files_of(root: Path) -> dict[str, bytes]:
    """Content by path of all that is below a root."""
    paths = (path for path in sorted(root.rglob("*")) if path.is_file() and path.name != LOCK)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def is_described(place: str) -> bool:
    """Whether another file has the digest of this one; others have their own."""
    return not place.endswith(".json") or place.count("/") > 2


def flipped(data: bytes, number: int, draws: random.Random) -> bytes:
    """With the first, the last or some byte changed to any other."""
    position = (0, len(data) - 1)[number] if number < 2 else draws.randrange(len(data))
    return data[:position] + bytes([data[position] ^ draws.randrange(1, 256)]) + data[position + 1 :]


def outputs(root: Path) -> Iterator[Output]:
    store = Store(str(root))
    for path in sorted(root.glob("*/*/manifest.json")):
        output = open_output(store, Ref(path.parts[-3], path.parts[-2]))
        assert output
        yield output


@pytest.mark.parametrize("described", [True, False], ids=["files", "manifests-and-records"])
def test_each_flip_is_named_by_verify_and_refused_by_what_reads(root: Path, described: bool) -> None:
    """All files of one kind at once, which hides none of them: each must be named for itself."""
    whole = {place: data for place, data in files_of(root).items() if is_described(place) == described}
    assert all(whole.values()), "an empty file has no byte to flip"
    assert len(whole) > 20
    opened, draws = list(outputs(root)), random.Random(0)
    for number in range(POSITIONS):
        for place, data in whole.items():
            (root / place).write_bytes(flipped(data, number, draws))
        damaged = {finding.place for finding in verify(Store(str(root))) if finding.kind == "damaged"}
        assert damaged == whole.keys()
        for output in opened:
            if not described:
                assert open_output(output.store, output.ref) is None
                continue
            assert not output.is_intact()
            assert output.page is None
            for file in (*output.manifest["files"], *output.manifest["records"]):
                with pytest.raises(UserError, match="is damaged"):
                    output.path(file["path"])
    for place, data in whole.items():
        (root / place).write_bytes(data)
    assert list(verify(Store(str(root)))) == []


def contents(root: Path) -> dict[Ref, Any]:
    """What the stages have made, without what tells of the runs."""
    return {output.ref: (output.manifest["files"], output.manifest["ingredients"]) for output in outputs(root)}


def check_next_run(root: Path, finished: Path) -> dict[str, Any]:
    """A run makes anew what it needs, and its outputs are those of before; returns its record."""
    record = pipeline(CONFIG, str(root))
    assert contents(root) == contents(finished)
    for output in outputs(root):
        assert output.is_intact()
    report = (root / "runs" / f"{record['name']}.md").read_text()
    assert all(page.split("\n\n")[0] in report for page in pages(root, record))
    return record


def pages(root: Path, record: dict[str, Any]) -> list[str]:
    return [output.page or "" for output in outputs_of(Run(str(root), ""), record).values()]


@pytest.mark.parametrize("described", [True, False], ids=["files", "manifests-and-records"])
def test_the_next_run_uses_none_of_the_flips(root: Path, finished: Path, described: bool) -> None:
    draws = random.Random(1)
    for place, data in files_of(root).items():
        if is_described(place) == described:
            (root / place).write_bytes(flipped(data, 2, draws))
    record = check_next_run(root, finished)
    assert {stage["state"] for stage in record["stages"].values()} == {"made"}
    left = {finding.place for finding in verify(Store(str(root))) if finding.kind == "damaged"}
    assert all(place.startswith("runs/") for place in left), "the records of earlier runs are not made anew"


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "step-0000020/model.safetensors"])
def test_a_training_takes_over_nothing_that_is_flipped(root: Path, finished: Path, name: str) -> None:
    """A damaged training goes on from its checkpoints, but with rows of its logs that are true."""
    (before,) = (output for output in outputs(finished) if output.ref.stage == "train")
    place = root.joinpath(*before.place, name)
    place.write_bytes(place.read_bytes().replace(b"0", b"1", 1))
    assert check_next_run(root, finished)["stages"]["train"]["state"] == "made"
    (after,) = (output for output in outputs(root) if output.ref.stage == "train")
    assert rows_of(Path(after.url)) == rows_of(Path(before.url))


def test_a_flipped_record_of_a_run_is_not_the_latest(root: Path) -> None:
    (path,) = (path for path in (root / "runs").glob("*.json") if path.name != "latest.json")
    assert read(RunRecord, Store(str(root)), "runs", path.name)
    path.write_bytes(flipped(path.read_bytes(), 2, random.Random(3)))
    assert read(RunRecord, Store(str(root)), "runs", path.name) is None


def test_a_flip_that_leaves_time_and_size_is_found_by_verify(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has read once it does not read again; ``verify`` does."""
    output = next(outputs(root))
    assert output.is_intact()
    path = output.path(output.manifest["files"][0]["path"])
    before = path.stat()
    path.write_bytes(flipped(path.read_bytes(), 2, random.Random(4)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert output.is_intact()
    assert [finding.place for finding in verify(output.store)] == [path.relative_to(root).as_posix()]
    monkeypatch.setattr(store_module, "_verified", set())  # as in another process
    assert not output.is_intact()
