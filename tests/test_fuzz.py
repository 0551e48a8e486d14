"""A quick pass of all that ``python -m tests.fuzz`` does for hours, and the cases that it has found."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from lm.errors import UserError
from lm.metrics import bits_per_byte
from tests.fuzz.__main__ import KERNELS, TARGETS, one_target, target_named
from tests.fuzz.choices import ODD, Choices, changed, cut_up, damaged, json_bytes
from tests.fuzz.engine import Hang, State, Trial, limited
from tests.training import ROOT

FOUND = sorted(path for path in (ROOT / "tests" / "fuzz" / "found").iterdir() if not path.suffix)
FEW = {"config", "preset", "request", "checkpoint", "checkpoint_file", "meta", "odd_tensors", "hugging_face"}


def attempt(name: str, data: bytes, folder: Path) -> None:
    if name == "sentencepiece":
        pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    try:
        target_named(name, folder)(data)
    except UserError:
        pass
    except Exception as error:
        raise AssertionError(f"{name} fails on {data!r}") from error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in TARGETS if not name.startswith("kernels-")])
def test_hostile_input_is_read_or_refused(name: str, tmp_path: Path) -> None:
    source = random.Random(name)
    attempt(name, b"", tmp_path)
    for _ in range(40 if name in FEW else 150):
        attempt(name, source.randbytes(source.randrange(300)), tmp_path)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_equal_their_references(name: str, tmp_path: Path) -> None:
    for number in range(3):
        assert target_named(f"kernels-{name}", tmp_path)(bytes([number])) > 0


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
def test_what_was_found_stays_mended(path: Path, tmp_path: Path) -> None:
    attempt(path.name.rpartition("-")[0], path.read_bytes(), tmp_path)


def test_choices_follow_from_the_bytes_and_are_all_made() -> None:
    document = {"a": [1, {"b": "text"}], "c": None, "d": 2.5}
    whole = json.dumps(document)
    source = random.Random(0)
    inputs = [source.randbytes(60) for _ in range(2000)]
    results = [json_bytes(damaged(document, Choices(data)), Choices(data[::-1])) for data in inputs]
    assert results == [json_bytes(damaged(document, Choices(data)), Choices(data[::-1])) for data in inputs]
    assert len(set(results)) > 1000 and json.dumps(document) == whole
    assert json_bytes(damaged(document, Choices(b"")), Choices(b"")) == whole.encode(), "no bytes, no damage"
    replaced = [changed(5, Choices(data)) for data in inputs]
    assert len({repr(value)[:40] for value in replaced}) > len(ODD) / 2
    assert {cut_up(b"abc", Choices(data)) for data in inputs} > {b"", b"a", b"ab"}


def test_a_finding_is_kept_with_its_bytes(tmp_path: Path) -> None:
    def target(data: bytes) -> int:
        if data[:1] == b"u":
            raise UserError("is fine")
        if data[:1] == b"x":
            bits_per_byte(1, 0)
        if data[:1] == b"h":
            raise Hang("late")
        return 3

    state = State(tmp_path / "state")
    trial = Trial("it", target, state, tmp_path / "found", 60, 12)
    for data in (b"fine", b"u", b"x long", b"x", b"x longer", b"hang"):
        trial.one(data)
    found = {
        path.read_bytes(): path.with_suffix(".txt").read_text() for path in (tmp_path / "found").glob("it-????????")
    }
    assert found.keys() == {b"x", b"hang"}, "the shortest of each kind"
    assert found[b"x"].startswith("ZeroDivisionError at metrics.py:") and "Traceback" in found[b"x"]
    again = State(tmp_path / "state")
    assert (again.executions, again.calls, again.last) == (7, 5, b"hang"), "as it was when the last one began"
    assert state.executions == 8 and not trial.is_over


def test_work_that_goes_on_is_ended() -> None:
    with pytest.raises(Hang), limited(0.05):
        while True:
            pass


@pytest.mark.parametrize("is_guided", [True, False])
def test_the_command_runs_a_target_and_tells(tmp_path: Path, is_guided: bool) -> None:
    """In a process of its own, with Atheris if it is there and without."""
    if is_guided:
        pytest.importorskip("atheris", reason="atheris is not installed")
    else:
        (tmp_path / "atheris.py").write_text("raise ImportError")
    command = [sys.executable, "-m", "tests.fuzz", "--target", "job", "--executions", "50", "--seed", "1"]
    path = os.pathsep.join([*([] if is_guided else [str(tmp_path)]), str(ROOT)])
    done = subprocess.run(
        [*command, "--found", str(tmp_path / "found")], cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[-2:]] == [["job", "50"], ["all", "50"]]
    assert not list((tmp_path / "found").glob("job-*"))


def test_a_process_that_dies_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    done = one_target("job", 1, 1, 10, tmp_path / "found", tmp_path / "log")
    assert done.executions == 0
    [report] = (tmp_path / "found").glob("job-*.txt")
    assert "ended with 1" in report.read_text()
