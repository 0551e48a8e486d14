"""The first hour of a newcomer shows lines that fit, in words that a newcomer knows."""

import re
from pathlib import Path

import pytest

from tests.end_to_end.first_hour import Hour, Scene
from tests.helpers.processes import PROJECT

_PARSER_WORDS = ("<class", "typing.", "Literal[", "jsonargparse", "Namespace", "Traceback")
_HEX_NAME = re.compile(r"\b(?=\w*\d)(?=\w*[a-f])[0-9a-f]{8,}\b")


def problems(lines: list[str]) -> list[str]:
    """Return the lines that are too long, or that have words and names of the machine. Paths and URLs may be long."""
    lines = [line.replace("^C", "").rstrip() for line in lines]  # the terminal's echo, at any place
    without_paths = [re.sub(r"\S*/\S*", "PATH", line) for line in lines]
    return [
        line
        for line, rest in zip(lines, without_paths, strict=True)
        if (len(line) > 80 and len(rest) > 80) or any(word in line for word in _PARSER_WORDS) or _HEX_NAME.search(rest)
    ]


@pytest.mark.parametrize(
    ("line", "is_problem"),
    [
        ("a" * 80, False),
        ("a " * 41, True),
        (f"  report  artifacts/{'a' * 64}/metrics.jsonl", False),
        (f"Made by {'a1' * 32}.", True),
        ("It must be typing.Literal['a'].", True),
        ("Traceback (most recent call last):", True),
    ],
)
def test_the_check_of_a_line(line: str, is_problem: bool) -> None:
    assert bool(problems([line])) == is_problem


@pytest.mark.slow
def test_the_first_hour(tmp_path: Path) -> None:
    hour = Hour(tmp_path)
    hour.play()
    assert [problem for scene in hour.scenes for problem in problems(scene.lines)] == []
    overview, run, stopped, resumed, runs, compared, posttrained, chat, served = map(shown, hour.scenes)
    assert "Make a model" in overview
    assert "train      made" in run and "Try next:" in run
    assert "Finished work is kept; run the same command again" in stopped
    assert "Training resumes at step" in resumed and "train      made" in resumed
    assert [re.split("  +", line)[3] for line in runs.splitlines()[1:4]] == ["finished", "stopped", "finished"]
    assert "bits/byte" in compared and "curves.png" in compared
    assert re.search(r"^sft +\d+\.\d{3} ", posttrained, re.MULTILINE)
    assert re.search("^Assistant: ", chat, re.MULTILINE)
    assert re.search("^Serving .* on http", served, re.MULTILINE)


def shown(scene: Scene) -> str:
    return "\n".join(scene.lines)


def test_the_page_of_the_first_hour_has_all_commands() -> None:
    page = (PROJECT / "docs" / "first-hour.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ textmill ?(\w*)", page, re.MULTILINE)
    assert commands == ["", "run", "run", "run", "runs", "compare", "posttrain", "chat", "serve"]
    outputs = re.findall(r"```text\n\$[^\n]*\n(.*?)```", page, re.DOTALL)
    assert len(outputs) == len(commands) and problems("".join(outputs).splitlines()) == []
