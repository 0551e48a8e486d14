"""Reading of ``metrics.jsonl``."""

import tracemalloc
from pathlib import Path

from lm.train.metrics_file import format_row, iterate_metrics, read_metrics, step_reporter, write_metrics


def test_a_missing_file_has_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_truncated_last_line_is_skipped(tmp_path: Path) -> None:
    """A crash can cut the file at any byte. The complete lines before it are read."""
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": n, "loss": 1.5 / n, "note": "ü\x85\r\u2028"} for n in range(1, 4)]
    text = "".join(map(format_row, rows))
    path.write_text(text, encoding="utf-8")
    assert read_metrics(path) == rows
    for cut in range(len(text)):
        path.write_text(text[:cut], encoding="utf-8")
        complete = text[:cut].count("\n")
        # A line that lacks only its line feed is complete.
        expected = rows[: complete + 1] if text[cut] == "\n" else rows[:complete]
        assert read_metrics(path) == expected, cut


def test_a_line_truncated_within_a_character_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes('{"step": 1}\n{"note": "ü'.encode()[:-1])
    assert read_metrics(path) == [{"step": 1}]


def test_the_reporter_reports_complete_lines(tmp_path: Path) -> None:
    path, steps = tmp_path / "metrics.jsonl", list[int]()
    report = step_reporter(path, steps.append)
    report()
    assert steps == []
    for text, expected in [
        (format_row({"step": 1}), [1]),
        ("", []),
        (format_row({"step": 2}) + format_row({"step": 3}) + '{"step": ', [3]),
        ("4", []),
        ("}\n", [4]),
        ("damaged\n", []),
        (format_row({"step": 6}), [6]),
    ]:
        with path.open("a") as file:
            file.write(text)
        report()
        assert steps == expected, text
        steps.clear()
    write_metrics(path, [{"step": 1}, {"step": 2}])  # as a resumed training does
    report()
    assert steps == [2]


def test_the_reporter_reads_only_new_lines(tmp_path: Path) -> None:
    """Reading the whole file after each row would take quadratic time."""
    path, steps = tmp_path / "metrics.jsonl", list[int]()
    report = step_reporter(path, steps.append)
    path.write_text(format_row({"step": 1}))
    report()
    path.write_text("x" * path.stat().st_size + format_row({"step": 2}))
    report()
    assert steps == [1, 2]


def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    """A resumed reinforcement learning copies its responses, which may be more than the memory."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text(format_row({"step": 1, "log_probs": [0.5] * 1000}) * 300)
    tracemalloc.start()
    write_metrics(path, (row for row in iterate_metrics(path) if row["step"] == 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 4
    assert len(read_metrics(path)) == 300
