"""Curves of runs side by side: what compares, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.train.tracking import append_rows
from tasks.runtime.output import Ref
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.stage import stage
from tests.helpers.roots import materialize, run_context, write_run_record
from textmill.cli.main import main
from textmill.runs import compare_runs as module
from textmill.runs.compare_runs import compare_runs

SLOW, FAST = "20260101-000000-train-slow", "20260102-000000-train-fast"


@stage("ingest")
def ingest(out: Attempt, text: str) -> None:
    (out.directory / "texts.json").write_text(text)


@stage("merge")
def merge(out: Attempt, name: str) -> None:
    (out.directory / "tokenizer").mkdir()
    (out.directory / "tokenizer" / "merges.txt").write_text(name)


def write_training(out: Attempt, seconds: float, has_times: bool = True, has_validation: bool = True) -> None:
    """Write the metrics of four steps of 10 tokens. The loss halves with each; a byte is half a token."""
    rows: list[dict[str, Any]] = [{"step": step, "smoothed_loss": 16 / 2**step} for step in range(1, 5)]
    for row in rows if has_times else ():
        row["seconds"] = seconds * row["step"] / 4
    for row in rows[1::2] if has_validation else ():
        row["valid_loss"] = row["smoothed_loss"] * 1.5
    append_rows(out.directory / "metrics.jsonl", rows)
    (out.directory / "weights").write_text(str(seconds))
    bits = {"valid_loss": 1.5, "valid_bits_per_byte": 3.0} if has_validation else {"valid_loss": None}
    out.figures = {"steps": 4, "tokens": 40, **bits}
    out.records = ["metrics.jsonl"]


@stage("train")
def train(out: Attempt, seconds: float, has_times: bool, has_validation: bool) -> None:
    write_training(out, seconds, has_times, has_validation)


@stage("base")
def base(out: Attempt, name: str) -> None:
    (out.directory / "tokenizer").mkdir()
    (out.directory / "tokenizer" / "merges.txt").write_text(name)


@stage("sft")
def sft(out: Attempt, seconds: float) -> None:
    write_training(out, seconds)


class Root:
    """A root, and runs that tests write there."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory)
        self.run: RunContext = run_context(directory)

    def add(self, name: str, *refs: Ref) -> None:
        write_run_record(self.run, name, *refs)

    def pretrain(
        self,
        name: str,
        seconds: float,
        tokenizer: str = "a",
        text: str = "a",
        has_times: bool = True,
        has_validation: bool = True,
    ) -> None:
        trained = materialize(train, self.run, seconds, has_times, has_validation)
        self.add(name, materialize(ingest, self.run, text), materialize(merge, self.run, tokenizer), trained)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path / "root")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn."""
    drawn: list[Any] = []
    draw = module._draw

    def remember(*arguments: Any) -> Any:
        drawn.append(draw(*arguments))
        return drawn[-1]

    monkeypatch.setattr(module, "_draw", remember)
    return drawn


def lines(figure: Any) -> list[list[tuple[list[float], list[float]]]]:
    """Return the points of the lines of each panel."""
    return [[(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] for axes in figure.axes]


def test_losses_are_drawn_over_steps_tokens_and_time(root: Root, tmp_path: Path, figures: list[Any]) -> None:
    root.pretrain(SLOW, 400.0)
    root.pretrain(FAST, 200.0)
    result = compare_runs([SLOW, FAST], root.path, str(tmp_path / "curves"))
    assert [file.name for file in result.files] == ["curves.png", "curves.svg"]
    assert all(file.stat().st_size for file in result.files) and result.notes == []
    over_steps, over_tokens, over_time = lines(figures[0])
    train, valid = [8, 4, 2, 1], [6, 1.5]
    assert over_steps == [([1, 2, 3, 4], train), ([2, 4], valid)] * 2
    assert over_tokens == [([10, 20, 30, 40], train), ([20, 40], valid)] * 2
    assert [line[0][-1] * 60 for line in over_time] == pytest.approx([400, 400, 200, 200])
    assert [axes.get_xlabel() for axes in figures[0].axes] == ["steps", "tokens", "minutes"]
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["training", "validation", SLOW, FAST]


def test_the_command_prints_a_table_within_80_columns(
    root: Root, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = f"20260103-000000-train-{'long' * 20}"
    root.pretrain(SLOW, 4000.0)
    root.pretrain(long, 2.0, text="b", has_times=False, has_validation=False)
    out = tmp_path / "curves"
    assert main(["compare", SLOW, long, "--root", root.path, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    heads, slow, other = printed.splitlines()[1:4]
    assert heads.split() == ["run", "steps", "M", "tokens", "seconds", "train", "valid", "bits/byte"]
    assert slow.split() == [SLOW, "4", "0.00", "4,000", "1.000", "1.500", "3.000"]
    assert other.split() == ["20260103-000000…nglonglong", "4", "0.00", "–", "1.000", "–", "–"]
    assert "different data" in printed and "an earlier version" in printed and str(out / "curves.svg") in printed
    assert all(len(line) <= 80 for line in printed.splitlines() if str(tmp_path) not in line)


def test_different_tokenizers_compare_by_bits_per_byte(root: Root, tmp_path: Path, figures: list[Any]) -> None:
    root.pretrain(SLOW, 4.0)
    root.pretrain(FAST, 2.0, tokenizer="b")
    (note,) = compare_runs([SLOW, FAST], root.path, str(tmp_path)).notes
    assert "losses per token do not compare" in note
    over_steps = lines(figures[0])[0]
    assert over_steps == [([1, 2, 3, 4], [16, 8, 4, 2]), ([2, 4], [12, 3])] * 2
    assert figures[0].axes[0].get_ylabel() == "loss, bits per byte"


def test_the_last_stage_that_all_runs_have_is_compared(root: Root, tmp_path: Path) -> None:
    tokenizer = materialize(base, root.run, "a")
    root.pretrain(SLOW, 4.0)
    for name, seconds in (("20260103-000000-sft-a", 1.0), ("20260103-000000-sft-b", 2.0)):
        root.add(name, tokenizer, materialize(sft, root.run, seconds))
    result = compare_runs(["20260103-000000-sft-a", "20260103-000000-sft-b"], root.path, str(tmp_path))
    assert [training.output.ref.stage for training in result.trainings] == ["sft", "sft"]
    with pytest.raises(
        UserError, match=rf"no training stage in common.*{SLOW} ends with train, .*-sft-a ends with sft"
    ):
        compare_runs([SLOW, "20260103-000000-sft-a"], root.path, str(tmp_path))


@stage("train")
def damaged_train(out: Attempt) -> None:
    """Write rows that no training writes, and none that can be drawn."""
    huge = '{"valid_loss": 1' + "0" * 400 + ', "step": 2}'
    rows = ["[1]", '"x"', '{"step": 1e999, "valid_loss": 1}', '{"valid_loss": "x", "step": 1}', huge]
    (out.directory / "metrics.jsonl").write_text("\n".join(rows))
    out.records = ["metrics.jsonl"]


def test_rows_without_numbers_are_left_out(root: Root, tmp_path: Path, figures: list[Any]) -> None:
    root.add(SLOW, materialize(merge, root.run, "a"), materialize(damaged_train, root.run))
    compare_runs([SLOW], root.path, str(tmp_path))
    assert lines(figures[0]) == [[([], [])] * 2] * 3


def test_runs_with_one_training_are_noted(root: Root, tmp_path: Path) -> None:
    root.pretrain(SLOW, 4.0)
    root.pretrain(FAST, 4.0)
    (note,) = compare_runs([SLOW, FAST], root.path, str(tmp_path)).notes
    assert note == f"{SLOW} and {FAST} have the same training, so their curves are one."


def test_losses_per_token_of_different_tokenizers_are_refused(root: Root, tmp_path: Path) -> None:
    root.pretrain(SLOW, 4.0)
    root.pretrain(FAST, 2.0, tokenizer="b", has_validation=False)
    with pytest.raises(UserError, match=f"tokenizers differ.*{FAST} has no bits per byte"):
        compare_runs([SLOW, FAST], root.path, str(tmp_path))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([SLOW, FAST.replace("fast", "fats")], "There is no run .* below .* lists the runs"),
        ([SLOW, FAST, SLOW], f"The run {SLOW} is named twice; name each run once"),
        ([SLOW, "20260103-000000-merge-x"], "has no finished training; its stages are: merge. Name a run that trained"),
        ([SLOW, "20260104-000000-full-x"], "has no finished training; its stages are: none"),
        ([SLOW, "20260105-000000-full-x"], "The run record .* is damaged; run the pipeline again"),
    ],
    ids=["unknown", "twice", "no training", "no stage", "damaged record"],
)
def test_a_run_that_cannot_be_compared_is_named(root: Root, tmp_path: Path, names: list[str], message: str) -> None:
    root.pretrain(SLOW, 4.0)
    root.pretrain(FAST, 2.0)
    root.add("20260103-000000-merge-x", materialize(merge, root.run, "a"))
    root.add("20260104-000000-full-x")
    root.run.store.write_text("{", "runs", "20260105-000000-full-x.json")
    with pytest.raises(UserError, match=message):
        compare_runs(names, root.path, str(tmp_path / "curves"))
    assert not (tmp_path / "curves").exists()


def test_damaged_metrics_and_a_directory_that_is_a_file_are_refused(root: Root, tmp_path: Path) -> None:
    root.pretrain(SLOW, 4.0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.* cannot be written"):
        compare_runs([SLOW], root.path, str(tmp_path / "file"))
    (metrics,) = (tmp_path / "root" / "train").rglob("metrics.jsonl")
    metrics.write_text("{}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged or missing"):
        compare_runs([SLOW], root.path, str(tmp_path))
