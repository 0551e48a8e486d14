"""Reading of ``metrics.jsonl``."""

from pathlib import Path

from lm.train.metrics_file import format_row, read_metrics


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
