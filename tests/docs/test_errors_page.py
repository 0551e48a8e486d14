"""The page of the errors is true: the messages that it quotes are in the code, and each error class is on it."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
MESSAGES = [
    message
    for message in re.findall(r"^\| (.+?) \| .+? \| .+? \|$", PAGE, re.MULTILINE)
    if not re.match(r"[\d ,]+$|---|message|status", message)
]


def written(node: ast.expr) -> str:
    """Return the text of an expression, with an ellipsis for each part that is known at run time only."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(written, node.values))
    return "…"


@functools.cache
def texts() -> set[str]:
    """Return the texts in the code, except docstrings."""
    found = set()
    for path in (path for floor in ("lm", "tasks", "flows", "textmill") for path in (ROOT / floor).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found |= {
            written(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in statements
        }
    return found


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) >= 40


@pytest.mark.parametrize(
    "message", [message for message in MESSAGES if not re.match(r"[\d ,]+$|message|status", message)]
)
def test_a_quoted_message_is_in_the_code(message: str) -> None:
    assert any(message.strip("… ") in text for text in texts()), "the code has no such message; correct docs/errors.md"


def test_each_error_class_has_a_section() -> None:
    tree = ast.parse((ROOT / "lm" / "common" / "errors.py").read_text(encoding="utf-8"))
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert classes <= set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE))
