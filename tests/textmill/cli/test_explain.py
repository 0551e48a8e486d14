"""``textmill explain``: what each rule of the filter makes of a document."""

import json
from pathlib import Path

import pytest

from tests.helpers.corpora import EOT, write_jsonl, write_text
from tests.lm.curate.test_rules import FAILING, GOOD
from textmill.cli.main import main


def verdicts(output: str) -> dict[str, list[str]]:
    """Return the columns of each rule in the table."""
    rows = [line.split() for line in output.splitlines() if line.endswith(("passes", "FAILS"))]
    return {rule: columns for rule, *columns in rows}


def test_a_text_is_explained_by_the_rules_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", GOOD]) == 0
    output = capsys.readouterr().out
    assert verdicts(output)["gopher_min_words"] == ["86", "≥", "50", "passes"]
    assert "FAILS" not in output and output.endswith("The filter keeps this document.\n")


def test_a_document_of_a_file_is_explained_by_the_rules_of_the_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = FAILING["c4_max_curly_bracket_lines"]
    url = write_jsonl(tmp_path / "a.jsonl", *(json.dumps({"text": text}) for text in (GOOD, code)))
    assert main(["explain", str(url), "--document", "2"]) == 0
    output = capsys.readouterr().out
    assert verdicts(output)["c4_max_curly_bracket_lines"] == ["1", "≤", "0", "FAILS"]
    assert output.endswith("Reason: c4_max_curly_bracket_lines.\n")
    assert main(["explain", str(url), "--document", "2", "--filter.rules.c4_max_curly_bracket_lines", "null"]) == 0
    output = capsys.readouterr().out
    assert "c4_max_curly_bracket_lines" not in output and output.endswith("keeps this document.\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt"], "There is no file missing.txt. A text must have a space"),
        (["a.txt", "--document", "3"], "a.txt has 2 documents; --document 3 is not among them."),
        (
            ["a b", "--filter.rules.gopher_min_wrds", "4"],
            "There is no option --filter.rules.gopher_min_wrds (did you mean 'gopher_min_words'?)",
        ),
        (
            ["a b", "--filter.rules.gopher_min_words", "-4"],
            "filter.rules.gopher_min_words is -4; it must be at least 0",
        ),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "a.txt", f"one{EOT}two{EOT}")
    assert main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err
