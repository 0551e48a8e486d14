"""The identity of code: which code changes rerun a stage.

Released code counts by its version, edited code by its digest. The lock file ``code_versions.json`` holds the version
and the digest of each stage: a digest of its modules and of how they import each other, without their names. The
version is the digest when the stage was last raised, or a number if that was long ago. While the digest is that of the
lock, the key of a stage holds its version only. Otherwise the key holds the digest too, so the stage reruns.

``python -m tools.code_lock`` accepts edits, or raises stages.
"""

import ast
import hashlib
import json
import os
import sys
import threading
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lm.common.errors import UserError
from lm.files.cache_dir import cache_directory

PROJECT = Path(__file__).parents[2]
LOCK = Path(__file__).with_name("code_versions.json")

# Prefixes of modules that decide where files lie, how a run is shown and how fast it is, but never the content.
_EXCLUDED_MODULES = (
    "lm.common.execution",
    "tasks.pages",
    "tasks.runtime.code_version",
    "tasks.runtime.execution",
    "tasks.runtime.locks",
    "tasks.runtime.output",
    "tasks.runtime.run_context",
    "tasks.runtime.schemas",
    "tasks.runtime.stage",
    "tasks.runtime.store",
    "tasks.runtime.verified_files",
)


def code_identity(stage: str, digest: str) -> dict[str, Any]:
    """Return the code's part of a key: the stage's version, and its digest if that differs from the lock's."""
    locked = _read_lock_once()["stages"].get(stage, {"version": 0, "digest": ""})
    edited = {"digest": digest} if digest != locked["digest"] else {}
    return {"version": locked["version"], **edited}


def edited_modules(digests: dict[str, str]) -> list[str]:
    """Return the names of the modules whose digests are not those of the lock."""
    lock = _read_lock_once()["modules"]
    return [name for name, digest in digests.items() if lock.get(name) != digest]


def module_digests(modules: dict[str, Path]) -> dict[str, str]:
    """Return the digest of each module by its name."""
    return {name: _parse(path).digest for name, path in sorted(modules.items())}


def stage_digest(modules: dict[str, Path]) -> str:
    """Return the sha256 of a stage's modules: their digests, and for each name that they import the digest of the
    module that defines it. A module that is moved or renamed changes nothing."""

    def describe(path: Path) -> str:
        code = _parse(path)
        targets = [
            (name, modules.get(_defining_module(PROJECT, f"{module}.{name}")) or modules.get(module))
            for module, name in code.imports
        ]
        return json.dumps([code.digest, sorted((name, _parse(target).digest) for name, target in targets if target)])

    # A set: a move may bring another package, which is as empty as the others.
    return hashlib.sha256(json.dumps(sorted(set(map(describe, modules.values())))).encode()).hexdigest()


def check_not_edited(modules: dict[str, Path], digests: dict[str, str]) -> None:
    """Raise UserError if a module was edited: Python may import it after the key was made."""
    for name, path in modules.items():
        if not path.exists() or _parse(path).digest != digests[name]:
            raise UserError(f"{name} was edited after this run began. Start the run again.")


def read_lock() -> dict[str, dict[str, Any]]:
    """Return the lock file: ``stages`` (version and digest by name) and ``modules`` (digest by name)."""
    lock: dict[str, dict[str, Any]] = json.loads(LOCK.read_text(encoding="utf-8"))
    return lock


_read_lock_once = lru_cache(maxsize=1)(read_lock)  # one lock for a whole run


def find_modules(file: str, *names: str) -> dict[str, Path]:
    """Return name and file of the module in ``file``, of the modules ``names``, of all modules of the project that they
    import, directly or not, and of the packages around them."""

    first = Path(file).resolve()
    is_inside = first.is_relative_to(PROJECT)
    name = ".".join(first.relative_to(PROJECT).with_suffix("").parts) if is_inside else first.stem
    modules: dict[str, Path] = {name: first}
    unvisited = {*names, *_imported_names(first)}
    visited = set[str]()
    while unvisited:
        visited.add(imported := unvisited.pop())
        for module, source in _imported_modules(PROJECT, imported).items():
            if module not in modules:
                modules[module] = source
                unvisited |= _imported_names(source) - visited
    return modules


def _imported_names(path: Path) -> set[str]:
    return {f"{module}.{name}".rstrip(".") for module, name in _parse(path).imports}


@cache  # most names are imported by many modules, and most modules belong to many stages
def _imported_modules(project: Path, name: str) -> dict[str, Path]:
    """Return name and file of the modules that an import of ``name`` runs: its module, and the packages around it."""
    parts = name.split("."), _defining_module(project, name).split(".")
    modules = {".".join(names[:end]) for names in parts for end in range(1, len(names) + 1)}
    sources = {module: _source_file(project, module) for module in modules if not module.startswith(_EXCLUDED_MODULES)}
    return {module: source for module, source in sources.items() if source}


@cache
def _defining_module(project: Path, name: str) -> str:
    """Resolve a public name of a package by the package's stub: ``lm.tokenizer.Tokenizer`` is from
    ``lm.tokenizer.tokenizer``. Any other name is returned unchanged."""
    package, _, public_name = name.rpartition(".")
    stub = project.joinpath(*package.split("."), "__init__.pyi")
    if not package or _source_file(project, name) or not stub.is_file():
        return name
    for node in ast.walk(ast.parse(stub.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and any(alias.name == public_name for alias in node.names):
            return f"{package}.{node.module}"
    return name


@cache
def _source_file(project: Path, module: str) -> Path | None:
    path = project.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


class _Code(NamedTuple):
    digest: str
    """Digest of a module's code, see :func:`code_digest`."""
    imports: frozenset[tuple[str, str]]
    """Module and name of each name that it imports from the project, also inside functions. ``import module`` has the
    name "". """


def _parse(path: Path) -> _Code:
    stat = path.stat()
    return _parse_version(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1024)
def _parse_version(path: Path, mtime_ns: int, size: int) -> _Code:
    """Return the code of a module. It is cached on disk: to parse the modules of a run takes a second."""
    source = path.read_bytes()
    identity = hashlib.sha256(source + _parser_identity()).hexdigest()
    with suppress(OSError, ValueError, TypeError, KeyError, UserError):  # it is missing or damaged; there is no cache
        entry = json.loads(_cached_code(path).read_bytes())
        if entry["identity"] == identity:
            return _Code(str(entry["digest"]), frozenset((str(module), str(name)) for module, name in entry["imports"]))
    tree = ast.parse(source)
    imports = ((module, name) for node in ast.walk(tree) for module, name, _ in _project_imports(node))
    code = _Code(code_digest(tree), frozenset(imports))
    with suppress(OSError, UserError):
        cached = _cached_code(path)
        cached.parent.mkdir(parents=True, exist_ok=True)
        temporary = cached.with_name(f"{cached.name}.{os.getpid()}.{threading.get_ident()}")
        entry = {"identity": identity, "digest": code.digest, "imports": sorted(code.imports)}
        temporary.write_text(json.dumps(entry), encoding="utf-8")
        temporary.replace(cached)
    return code


@cache
def _parser_identity() -> bytes:
    """Return what decides the digest of a source besides the source: this file and the version of Python."""
    return Path(__file__).read_bytes() + sys.version.encode()


def _cached_code(path: Path) -> Path:
    return cache_directory() / "code" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"


def _project_imports(node: Any) -> list[tuple[str, str, str]]:
    """Return module, name and new name of each name that a statement imports from the project."""
    if isinstance(node, ast.Import):
        names = [(alias.name, "", alias.asname or "") for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [(node.module or "", alias.name, alias.asname or "") for alias in node.names]
    else:
        return []
    return [item for item in names if item[0].split(".")[0] in ("lm", "tasks")]


def code_digest(tree: ast.Module) -> str:
    """Return the sha256 of a syntax tree. Comments, docstrings and layout do not count, nor do the order of imports
    from the project and the modules that they name, only the names that they bind."""
    bound = sorted({(name, new_name) for node in ast.walk(tree) for _, name, new_name in _project_imports(node)})
    return hashlib.sha256(json.dumps([_simplify(tree), bound]).encode()).hexdigest()


def _simplify(node: Any) -> Any:
    """Return a syntax tree as nested lists, without the differences between versions of Python: newer ones add fields
    that are empty, and 3.12 adds empty strings to f-strings."""
    if isinstance(node, ast.JoinedStr):
        node = ast.JoinedStr(
            [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
        )
    if isinstance(node, ast.AST):
        fields = [[name, _simplify(value)] for name, value in ast.iter_fields(node) if value not in (None, [])]
        return [type(node).__name__, *fields]
    if isinstance(node, list):
        return [_simplify(item) for item in node if not _is_docstring(item) and not _project_imports(item)]
    return ascii(node)


def _is_docstring(node: Any) -> bool:
    """Return whether a statement is only a string, which does nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
