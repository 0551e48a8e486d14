"""Print the size of each room: lines, lines without docstrings, files, and module-level names.

``python tools/house.py [CHECKOUT]`` counts a checkout, by default this one. A room is a package that has modules.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

_FLOORS = ("textmill", "flows", "tasks", "lm")


def count_module(path: Path) -> Counter[str]:
    """Return the figures of a module. Names are functions, classes and variables that it defines at its top."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = len(text.splitlines())
    names = sum(_count_names(node) for node in tree.body)
    return Counter(lines=lines, code=lines - _count_docstring_lines(tree), files=1, names=names)


def _count_names(node: ast.stmt) -> int:
    if isinstance(node, ast.Assign):
        return sum(isinstance(part, ast.Name) for target in node.targets for part in ast.walk(target))
    if isinstance(node, ast.If):  # such as TYPE_CHECKING
        return sum(_count_names(part) for part in (*node.body, *node.orelse))
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.AnnAssign))


def _count_docstring_lines(tree: ast.Module) -> int:
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )


def count_rooms(checkout: Path) -> dict[str, Counter[str]]:
    """Return the figures of each room by its name, such as ``lm.model.ops``."""
    rooms: dict[str, Counter[str]] = {}
    for floor in _FLOORS:
        for path in sorted((checkout / floor).rglob("*.py*")):
            if path.suffix in (".py", ".pyi"):
                room = ".".join(path.relative_to(checkout).parent.parts)
                rooms[room] = rooms.get(room, Counter()) + count_module(path)
    return rooms


def main(checkout: Path) -> None:
    """Print a table with a row for each room, and the sum."""
    rooms = count_rooms(checkout)
    rooms["sum"] = sum(rooms.values(), Counter())
    print(f"{'room':30}{'lines':>8}{'without docstrings':>20}{'files':>7}{'names':>7}")
    for room, row in rooms.items():
        print(f"{room:30}{row['lines']:8,}{row['code']:20,}{row['files']:7}{row['names']:7}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
