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
    *("tasks.stage", "tasks.output", "tasks.store", "tasks.records", "tasks.source_digest"),
    *("tasks.progress", "tasks.pages", "tasks.machine", "lm.execution"),
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
    modules: list[tuple[str, Any]] = sorted(finder.modules.items())
    return {
        name.replace("__main__", "stage"): _code_digest(Path(module.__file__).read_bytes()) for name, module in modules
    }


def _code_digest(source: bytes) -> str:
    """sha256 of the code without comments and blank lines; the same on every version of Python."""
    lines: list[str | None] = [*source.decode().split("\n")]
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL):
            row, column = token.start
            lines[row - 1] = (lines[row - 1] or "")[:column].rstrip() or None
    code = "\n".join(line for line in lines if line is not None)
    return hashlib.sha256(code.encode()).hexdigest()
