"""One changed byte in any file of a finished root: ``verify`` names the file, and no run uses it."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.pipeline import pipeline
from lm.common.errors import UserError
from tasks.maintenance.verify import verify
from tasks.runs.run_record import outputs_of
from tasks.runtime.output import Output, Ref, open_output
from tasks.runtime.run_context import RunContext
from tasks.runtime.schemas import RunRecord, read_record
from tasks.runtime.store import LOCK_FILE, Store
from tests.helpers.deployed import TINY
from tests.helpers.training import read_rows

pytestmark = pytest.mark.usefixtures("prefect_server")
CONFIG: Any = TINY | {"execution": {"compile": False}}  # Prefect makes a PipelineConfig of it
POSITIONS = 8  # of a byte in each file: the first, the last, and others


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Path:
    """Return a root with a run of all stages. The tests work on copies."""
    root = tmp_path_factory.mktemp("flips") / "finished"
    pipeline(CONFIG, str(root))
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "root"))


def files_of(root: Path) -> dict[str, bytes]:
    """Return the content of each file below a root by its path."""
    paths = (path for path in sorted(root.rglob("*")) if path.is_file() and path.name != LOCK_FILE)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def is_described(path: str) -> bool:
    """Return whether a manifest holds the digest of this file. Other files hold a checksum of themselves."""
    return not path.endswith(".json") or path.count("/") > 2


def flipped(data: bytes, number: int, draws: random.Random) -> bytes:
    """Change the first, the last or a random byte to another value."""
    position = (0, len(data) - 1)[number] if number < 2 else draws.randrange(len(data))
    return data[:position] + bytes([data[position] ^ draws.randrange(1, 256)]) + data[position + 1 :]


def outputs(root: Path) -> Iterator[Output]:
    store = Store(str(root))
    for path in sorted(root.glob("*/*/manifest.json")):
        output = open_output(store, Ref(path.parts[-3], path.parts[-2]))
        assert output
        yield output


@pytest.mark.slow
@pytest.mark.parametrize("described", [True, False], ids=["files", "manifests-and-records"])
def test_verify_and_readers_notice_each_flip(root: Path, described: bool) -> None:
    """All files of one kind are flipped at once: verify must name each of them."""
    original = {path: data for path, data in files_of(root).items() if is_described(path) == described}
    assert all(original.values()), "each file has a byte to flip"
    assert len(original) > 20
    opened, draws = list(outputs(root)), random.Random(0)
    for number in range(POSITIONS):
        for path, data in original.items():
            (root / path).write_bytes(flipped(data, number, draws))
        damaged = {finding.path for finding in verify(Store(str(root))) if finding.kind == "damaged"}
        assert damaged == original.keys()
        for output in opened:
            if not described:
                assert open_output(output.store, output.ref) is None
                continue
            assert not output.is_intact()
            assert output.page is None
            for file in (*output.manifest["files"], *output.manifest["records"]):
                with pytest.raises(UserError, match="is damaged"):
                    output.path(file["path"])
    for path, data in original.items():
        (root / path).write_bytes(data)
    assert list(verify(Store(str(root)))) == []


def contents(root: Path) -> dict[Ref, Any]:
    """Return the files and ingredients of all outputs."""
    return {output.ref: (output.manifest["files"], output.manifest["ingredients"]) for output in outputs(root)}


def check_next_run(root: Path, finished: Path) -> dict[str, Any]:
    """Run the pipeline, check that the outputs are the same as before, and return the run record."""
    record = pipeline(CONFIG, str(root))
    assert contents(root) == contents(finished)
    for output in outputs(root):
        assert output.is_intact()
    report = (root / "runs" / f"{record['name']}.md").read_text()
    assert all(page.split("\n\n")[0] in report for page in pages(root, record))
    return record


def pages(root: Path, record: dict[str, Any]) -> list[str]:
    made = [name for name, stage in record["stages"].items() if stage["state"] == "made"]
    outputs_by_stage = outputs_of(RunContext(str(root), ""), record)
    return [outputs_by_stage[name].page or "" for name in made]


@pytest.mark.slow
@pytest.mark.parametrize("described", [True, False], ids=["files", "manifests-and-records"])
def test_the_next_run_uses_no_flipped_file(root: Path, finished: Path, described: bool) -> None:
    draws = random.Random(1)
    for path, data in files_of(root).items():
        if is_described(path) == described:
            (root / path).write_bytes(flipped(data, 2, draws))
    record = check_next_run(root, finished)
    assert {stage["state"] for stage in record["stages"].values()} == {"made"}
    left = {finding.path for finding in verify(Store(str(root))) if finding.kind == "damaged"}
    assert all(path.startswith("runs/") for path in left), "records of earlier runs are not made again"


@pytest.mark.slow
@pytest.mark.parametrize("names", [["metrics.jsonl", "samples.jsonl"], ["step-0000020/model.safetensors"]])
def test_a_resumed_training_uses_no_flipped_rows(root: Path, finished: Path, names: list[str]) -> None:
    """A damaged training resumes from its checkpoints, but copies no rows of a damaged log."""
    (before,) = (output for output in outputs(finished) if output.ref.stage == "train")
    for name in names:
        path = root.joinpath(*before.location, name)
        path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))
    assert check_next_run(root, finished)["stages"]["train"]["state"] == "made"
    (after,) = (output for output in outputs(root) if output.ref.stage == "train")
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert read_rows(Path(after.url), name) == read_rows(Path(before.url), name)


def test_a_flipped_run_record_is_ignored(root: Path) -> None:
    (path,) = (path for path in (root / "runs").glob("*.json") if path.name != "latest.json")
    assert read_record(RunRecord, Store(str(root)), "runs", path.name)
    path.write_bytes(flipped(path.read_bytes(), 2, random.Random(3)))
    assert read_record(RunRecord, Store(str(root)), "runs", path.name) is None


def test_a_flip_with_the_same_mtime_and_size_is_found(root: Path) -> None:
    """The ctime cannot be set back."""
    output = next(outputs(root))
    assert output.is_intact()
    path = output.path(output.manifest["files"][0]["path"])
    before = path.stat()
    path.write_bytes(flipped(path.read_bytes(), 2, random.Random(4)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not output.is_intact()
    assert [finding.path for finding in verify(output.store)] == [path.relative_to(root).as_posix()]
