"""Digests of the source that a stage runs, so that editing an algorithm reruns the stages that use it and no others."""

import hashlib
import io
import tokenize
from functools import lru_cache
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1]


# These decide where files lie, how a run is shown and how fast it is, and never what is in a file.
_NO_CONTENT = [
    *("tasks.stage", "tasks.store", "tasks.source_digest", "tasks.progress", "tasks.pages", "tasks.machine"),
    "lm.execution",
]


class _ProjectFinder(ModuleFinder):
    """Follows the project's own imports."""

    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        if path is None and name not in ("lm", "tasks"):  # a top-level name; in a package, path is the package's
            raise ImportError(name)
        return super().find_module(name, path, parent)


@lru_cache
def source_digests(file: str) -> dict[str, str]:
    """Digest by module name of a stage's file and every module of the project it imports, inside functions too."""
    finder = _ProjectFinder(path=[str(PROJECT)], excludes=_NO_CONTENT)
    finder.run_script(file)
    modules = {name: Path(str(module.__file__)) for name, module in finder.modules.items()}  # type: ignore[attr-defined]
    return {
        ("stage" if name == "__main__" else name): _code_digest(path.read_bytes())
        for name, path in sorted(modules.items())
    }


def _code_digest(source: bytes) -> str:
    """sha256 of the code without comments and blank lines; the same on every version of Python."""
    lines = source.decode().split("\n")
    dropped = set()
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip()
        if token.type in (tokenize.COMMENT, tokenize.NL) and not lines[row - 1].strip():
            dropped.add(row)
    code = "\n".join(line for row, line in enumerate(lines, start=1) if row not in dropped)
    return hashlib.sha256(code.encode()).hexdigest()
