"""The house: where files are, how long they are, and that a newcomer finds them."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("textmill", "flows", "tasks", "lm")
WHERE = ROOT / "docs" / "where.md"


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_file_has_more_than_400_lines() -> None:
    files = python_files(*FLOORS, "tests", "tools", "benchmarks", "examples")
    assert len(files) > 400
    assert [path for path in files if len(path.read_text().splitlines()) > 400] == []


def test_no_two_files_of_lm_have_one_name() -> None:
    """But for ``config``, and an objective of post-training and its loss."""
    files = [path for path in python_files("lm") if path.name not in ("__init__.py", "config.py")]
    names = Counter(path.name for path in files if path.parent.name != "objectives")
    assert [name for name, count in names.items() if count > 1] == []
    outside_losses = {path.name for path in files if path.parent.name not in ("losses", "objectives")}
    assert [path for path in files if path.parent.name == "objectives" and path.name in outside_losses] == []


def test_no_file_is_called_utils() -> None:
    assert [path for path in python_files(*FLOORS, "tests", "tools", "benchmarks") if "util" in path.name] == []


@cache
def first_line(path: Path) -> str:
    """Return the first line of a module's docstring, in lower case."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n")[0].lower()


def answers() -> list[tuple[str, str]]:
    """Return the questions of docs/where.md, and the file of each."""
    return re.findall(r"^\| (.+?) +\| `([\w/.]+)` +\|$", WHERE.read_text(), re.MULTILINE)


def words(question: str) -> set[str]:
    """Return the words of a question that say what it is about: those in bold."""
    return set(" ".join(re.findall(r"\*\*(.+?)\*\*", question)).lower().split())


def has_words(line: str, wanted: set[str]) -> bool:
    return wanted <= set(re.findall(r"[\w&'-]+", line))


def test_there_are_thirty_questions() -> None:
    assert len(answers()) == 30


@pytest.mark.parametrize(("question", "file"), answers())
def test_the_answer_to_a_question_is_in_the_first_line_of_one_file(question: str, file: str) -> None:
    wanted = words(question)
    assert wanted and (ROOT / file).is_file()
    found = [str(path.relative_to(ROOT)) for path in python_files(*FLOORS) if has_words(first_line(path), wanted)]
    assert found == [file]
