"""A quick pass of ``python -m tests.fuzz``, and the inputs that failed in the past."""

import json
import os
import random
import sys
from pathlib import Path

import pytest

from lm.common.errors import UserError
from lm.eval.loss import bits_per_byte
from tests.fuzz.__main__ import KERNELS, TARGETS, main, make_target, run_target
from tests.fuzz.choices import ODD, Choices, json_bytes, mutate, mutate_bytes, mutate_once
from tests.fuzz.engine import Hang, State, Trial, cpu_limit
from tests.helpers.training import ROOT

REGRESSIONS = sorted((ROOT / "tests" / "fuzz" / "regressions").iterdir())
SLOW_TARGETS = {
    "authorization",
    "config",
    "preset",
    "request",
    "embeddings",
    "structured_output",
    "tool_request",
    "chat_template",
    "checkpoint",
    "checkpoint_file",
    "meta",
    "odd_tensors",
    "hugging_face",
    "gguf",
    "torch_file",
    "adapter",
}


def run_once(name: str, data: bytes, folder: Path) -> None:
    if name == "sentencepiece":
        pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    if name in ("structured_output", "tool_request"):
        pytest.importorskip("llguidance", reason="llguidance is not installed")
    if name == "gguf":
        pytest.importorskip("gguf", reason="gguf is not installed")
    if name == "web":
        pytest.importorskip("resiliparse", reason="resiliparse is not installed")
    try:
        make_target(name, folder)(data)
    except UserError:
        pass
    except Exception as error:
        raise AssertionError(f"{name} fails on {data!r}") from error


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in TARGETS if not name.startswith("kernels-")])
def test_hostile_input_is_read_or_refused(name: str, tmp_path: Path) -> None:
    source = random.Random(name)
    run_once(name, b"", tmp_path)
    for _ in range(40 if name in SLOW_TARGETS else 150):
        run_once(name, source.randbytes(source.randrange(300)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_equal_their_references(name: str, tmp_path: Path) -> None:
    assert make_target(f"kernels-{name}", tmp_path)(b"\0") > 0


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.name)
def test_earlier_findings_stay_fixed(path: Path, tmp_path: Path) -> None:
    run_once(path.name.rpartition("-")[0], path.read_bytes(), tmp_path)


def test_mutations_depend_only_on_the_bytes() -> None:
    document = {"a": [1, {"b": "text"}], "c": None, "d": 2.5}
    expected = json.dumps(document)
    source = random.Random(0)
    inputs = [source.randbytes(60) for _ in range(2000)]
    results = [json_bytes(mutate(document, Choices(data)), Choices(data[::-1])) for data in inputs]
    assert results == [json_bytes(mutate(document, Choices(data)), Choices(data[::-1])) for data in inputs]
    assert len(set(results)) > 1000 and json.dumps(document) == expected
    assert json_bytes(mutate(document, Choices(b"")), Choices(b"")) == expected.encode(), "empty input mutates nothing"
    mutated = [mutate_once(5, Choices(data)) for data in inputs]
    assert len({repr(value)[:40] for value in mutated}) > len(ODD) / 2
    assert {mutate_bytes(b"abc", Choices(data)) for data in inputs} > {b"", b"a", b"ab"}


def test_a_finding_is_saved_with_its_input(tmp_path: Path) -> None:
    def target(data: bytes) -> int:
        if data[:1] == b"u":
            raise UserError("expected")
        if data[:1] == b"x":
            bits_per_byte(1, 0)
        if data[:1] == b"h":
            raise Hang("timeout")
        return 3

    state = State(tmp_path / "state")
    trial = Trial("name", target, state, tmp_path / "findings", 60, 12)
    for data in (b"fine", b"u", b"x long", b"x", b"x longer", b"hang"):
        trial.execute(data)
    paths = (tmp_path / "findings").glob("name-????????")
    findings = {path.read_bytes(): path.with_suffix(".txt").read_text() for path in paths}
    assert findings.keys() == {b"x", b"hang"}, "the shortest of each kind"
    assert findings[b"x"].startswith("ZeroDivisionError at loss.py:") and "Traceback" in findings[b"x"]
    saved = State(tmp_path / "state")
    assert (saved.executions, saved.calls, saved.last) == (7, 5, b"hang"), "saved before the last execution"
    assert state.executions == 8 and not trial.is_over


def test_an_endless_loop_raises_hang() -> None:
    with pytest.raises(Hang), cpu_limit(0.05):
        while True:
            pass


@pytest.mark.slow
@pytest.mark.parametrize("is_guided", [True, False])
def test_the_command_runs_a_target_and_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_guided: bool
) -> None:
    """Run with and without Atheris, which the process of the target imports."""
    if is_guided:
        pytest.importorskip("atheris", reason="atheris is not installed")
    else:
        (tmp_path / "atheris.py").write_text("raise ImportError")
    options = ["--target", "job", "--executions", "50", "--seed", "1", "--findings", str(tmp_path / "findings")]
    monkeypatch.setattr(sys, "argv", ["tests.fuzz", *options])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*([] if is_guided else [str(tmp_path)]), str(ROOT)]))
    monkeypatch.chdir(ROOT)
    assert main() == 0
    output = capsys.readouterr().out
    assert [line.split()[:2] for line in output.splitlines()[-2:]] == [["job", "50"], ["all", "50"]]
    assert not list((tmp_path / "findings").glob("job-*"))


def test_a_crashed_process_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    result = run_target("job", 1, 1, 10, tmp_path / "findings", tmp_path / "log")
    assert result.executions == 0
    [report] = (tmp_path / "findings").glob("job-*.txt")
    assert "ended with 1" in report.read_text()
