"""The identity of code: which edits rerun a stage."""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.common.errors import UserError
from tasks.runtime import code_version
from tasks.runtime.stage import Stage
from tests.helpers.roots import run_context

FIRST = "def f():\n    return 'a message'\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project of one stage, the modules that it imports, and a lock file."""
    package = tmp_path / "lm"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "used.py").write_text("import lm.deep\n\nVALUE = 1  # a comment\n")
    (package / "deep.py").write_text('"""A module."""\n\nTEXT = """a\n\n# no comment\n"""\n\n' + FIRST)
    (package / "lazy.py").write_text("LAZY = 1\n")
    (package / "other.py").write_text("OTHER = 1\n")
    (tmp_path / "tasks").mkdir()
    stage_file = tmp_path / "tasks" / "used.py"
    stage_file.write_text("import os\nfrom lm.used import VALUE\n\ndef f():\n    from lm import lazy\n")
    monkeypatch.setattr(code_version, "PROJECT", tmp_path)
    monkeypatch.setattr(code_version, "LOCK", tmp_path / "lock.json")
    monkeypatch.setattr(code_version, "_read_lock_once", code_version.read_lock)
    (tmp_path / "lock.json").write_text(json.dumps({"stages": {"example": 3}, "modules": digests(tmp_path)}))
    return tmp_path


def digests(project: Path) -> dict[str, str]:
    return code_version.module_digests(code_version.find_modules(str(project / "tasks" / "used.py")))


def identity(project: Path) -> dict[str, Any]:
    return code_version.code_identity("example", digests(project))


def test_code_that_equals_the_lock_counts_by_its_version(project: Path) -> None:
    assert identity(project) == {"version": 3}
    assert set(digests(project)) == {*("lm", "lm.used", "lm.deep", "lm.lazy", "tasks.used")}


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("used", "# a comment", "# another comment"),
        ("used", "\n\nVALUE", "\n\n\n    # more\n\nVALUE"),
        ("used", "VALUE = 1", "VALUE   =    1"),
        ("deep", '"""A module."""', '"""A module that is\n\ndescribed at length."""'),
        ("deep", '"""A module."""', ""),
        ("deep", "def f():\n", 'def f():\n    """A docstring."""\n'),
        ("deep", "    return", "        return"),
        ("other", "OTHER = 1", "OTHER = 2"),
    ],
)
def test_comments_docstrings_and_layout_change_nothing(project: Path, module: str, old: str, new: str) -> None:
    edit(project, module, old, new)
    assert identity(project) == {"version": 3}


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("used", "VALUE = 1", "VALUE = 2"),
        ("deep", "'a message'", "'a better message'"),
        ("deep", "# no comment", "# changed text"),
        ("deep", "a\n\n#", "a\n#"),
        ("deep", "    return 'a message'", "    pass\nreturn_ = 'a message'"),
        ("lazy", "LAZY = 1", "LAZY = 2"),
    ],
)
def test_edited_code_counts_by_its_digest(project: Path, module: str, old: str, new: str) -> None:
    edit(project, module, old, new)
    assert identity(project) == {
        "version": 3,
        f"lm.{module}": digests(project)[f"lm.{module}"],
    }
    edit(project, module, new, old)
    assert identity(project) == {"version": 3}, "restored code counts by its version again"


def edit(project: Path, module: str, old: str, new: str) -> None:
    path = project / "lm" / f"{module}.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.fixture
def command(project: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return the command for that project, whose only stage is ``example``."""

    def current() -> dict[str, Any]:
        stages = code_version.read_lock()["stages"]
        return {"stages": dict(stages), "modules": digests(project)}

    monkeypatch.setattr(code_version, "current_lock", current)
    return lambda *arguments: code_version.main(list(arguments))


def test_an_accepted_edit_keeps_the_version(project: Path, command: Callable[..., int]) -> None:
    assert command() == 0
    edit(project, "deep", "'a message'", "'a better message'")
    assert command() == 1
    assert command("accept") == 0
    assert identity(project) == {"version": 3}
    assert command() == 0


def test_a_raised_version_reruns_the_stage(
    project: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    edit(project, "deep", "'a message'", "'a better message'")
    assert command("raise", "exmaple") == 2
    assert "did you mean 'example'?" in capsys.readouterr().err
    assert command("raise") == 2
    assert command("raise", "example") == 0
    assert identity(project) == {"version": 4}


def test_the_key_of_a_stage_follows_the_identity_of_its_code(
    project: Path, command: Callable[..., int], tmp_path: Path
) -> None:
    def key() -> str:
        stage = Stage("example", edit)
        stage.file = str(project / "tasks" / "used.py")
        return stage.look_up(run_context(tmp_path / "root"), [{"text": "x"}])[0][0].key

    before = key()
    edit(project, "deep", '"""A module."""', '"""Another text."""')
    assert key() == before
    edit(project, "deep", "'a message'", "'a better message'")
    assert key() != before
    command("accept")
    assert key() == before
    command("raise", "example")
    assert key() != before


def test_an_edit_during_a_run_is_a_user_error(project: Path) -> None:
    """A stage imports modules when it runs, so the key may be of other code."""
    modules, before = code_version.find_modules(str(project / "tasks" / "used.py")), digests(project)
    code_version.check_not_edited(modules, before)
    edit(project, "lazy", "LAZY = 1", "LAZY = 2")
    with pytest.raises(UserError, match=r"lm\.lazy was edited after this run began"):
        code_version.check_not_edited(modules, before)


def test_a_field_that_a_newer_python_adds_empty_does_not_change_the_digest() -> None:
    """Python 3.12 added ``type_params`` to functions and classes, and empty strings to f-strings."""
    source = "class A:\n    def f(x):\n        return f'a {x!r:>{10}} b' + 'c'"
    tree = ast.parse(source)
    digest = code_version.code_digest(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            newer: Any = node
            newer._fields = (*node._fields, "new_list", "new_value")
            newer.new_list, newer.new_value = [], None
        elif isinstance(node, ast.JoinedStr):
            node.values.append(ast.Constant(""))
    assert code_version.code_digest(tree) == digest
    assert code_version.code_digest(ast.parse(source.replace("!r", "!s"))) != digest


def test_every_module_of_the_stages_equals_the_lock() -> None:
    """Edited code needs a decision: python -m tasks.runtime.code_version accept, or raise STAGE."""
    now, lock = code_version.current_lock(), code_version.read_lock()
    edited = {name for name, digest in now["modules"].items() if lock["modules"].get(name) != digest}
    assert not edited, "same output: python -m tasks.runtime.code_version accept; another output: … raise STAGE"
    assert now["modules"].keys() == lock["modules"].keys()
    assert now["stages"].keys() == lock["stages"].keys()
