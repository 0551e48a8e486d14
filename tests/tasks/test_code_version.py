"""The identity of code: which edits rerun a stage."""

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lm.common.errors import UserError
from tasks.count import count_group
from tasks.encode import encode_group
from tasks.evaluate import evaluate
from tasks.posttrain import ppo, preference, reinforce, reward_model, sft
from tasks.runtime import code_version
from tasks.runtime.stage import Stage
from tasks.sample import sample
from tasks.train import train
from tests.helpers.roots import run_context
from tools import code_lock

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
    lock = {"stages": {"example": {"version": 3, "digest": digest(tmp_path)}}, "modules": digests(tmp_path)}
    (tmp_path / "lock.json").write_text(json.dumps(lock))
    return tmp_path


def modules(project: Path) -> dict[str, Path]:
    return code_version.find_modules(str(project / "tasks" / "used.py"))


def digests(project: Path) -> dict[str, str]:
    return code_version.module_digests(modules(project))


def digest(project: Path) -> str:
    return code_version.stage_digest(modules(project))


def identity(project: Path) -> dict[str, Any]:
    return code_version.code_identity("example", digest(project))


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
    before = digest(project)
    edit(project, module, old, new)
    assert identity(project) == {"version": 3, "digest": digest(project)} and digest(project) != before
    assert code_version.edited_modules(digests(project)) == [f"lm.{module}"]
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
        version = code_version.read_lock()["stages"]["example"]["version"]
        stage = {"version": version, "digest": digest(project)}
        return {"stages": {"example": stage}, "modules": digests(project)}

    monkeypatch.setattr(code_lock, "current_lock", current)
    return lambda *arguments: code_lock.main(list(arguments))


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
    assert identity(project) == {"version": digest(project)}
    assert command("raise", "example") == 0
    assert "example was last raised with this code" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["raise", "accept"])
def test_two_branches_that_raise_a_stage_from_the_same_version_differ(
    project: Path, command: Callable[..., int], action: str
) -> None:
    """Also if an edit that leaves the output as it is follows on one of them."""
    lock = code_version.LOCK.read_text()

    def branch(value: str) -> Any:
        edit(project, "used", "VALUE = 1", f"VALUE = {value}")
        assert command("raise", "example") == 0
        identity_then = identity(project)
        if action == "accept":
            edit(project, "deep", "'a message'", "'a better message'")
            assert command("accept") == 0
            assert identity(project) == identity_then
            edit(project, "deep", "'a better message'", "'a message'")
        edit(project, "used", f"VALUE = {value}", "VALUE = 1")
        code_version.LOCK.write_text(lock)
        return identity_then["version"]

    first, second, again = branch("2"), branch("20"), branch("2")
    assert first != second and first == again


def test_a_raise_after_a_reverted_one_has_a_version_of_its_own(project: Path, command: Callable[..., int]) -> None:
    lock, versions = code_version.LOCK.read_text(), []
    for value in "2", "3":
        edit(project, "used", "VALUE = 1", f"VALUE = {value}")
        command("raise", "example")
        versions.append(identity(project)["version"])
        edit(project, "used", f"VALUE = {value}", "VALUE = 1")
        code_version.LOCK.write_text(lock)
    assert versions[0] != versions[1]


def test_a_module_that_moves_changes_nothing(project: Path, command: Callable[..., int]) -> None:
    """Neither the path of a module, nor the order in which imports are sorted by it."""
    before = digest(project)
    (project / "lm" / "room").mkdir()
    (project / "lm" / "room" / "__init__.py").touch()
    (project / "lm" / "deep.py").rename(project / "lm" / "room" / "shallow.py")
    edit(project, "used", "import lm.deep\n", "import lm.room.shallow\n")
    (project / "lm" / "used.py").rename(project / "lm" / "room" / "a.py")
    stage_file = project / "tasks" / "used.py"
    stage_file.write_text("import os\n\ndef f():\n    from lm import lazy\nfrom lm.room.a import VALUE\n")
    assert {"lm.room.a", "lm.room.shallow"} < set(modules(project))
    assert digest(project) == before and identity(project) == {"version": 3}
    assert command("accept") == 0
    assert identity(project) == {"version": 3}


def test_a_name_that_is_imported_from_another_module_is_an_edit(project: Path) -> None:
    """Both modules were imported before, and have a name in common."""
    stage_file = project / "tasks" / "used.py"
    for module in "slow", "fast":
        (project / "lm" / f"{module}.py").write_text(f"SPEED = 1\nKIND = {module!r}\n")
    stage_file.write_text("from lm.slow import SPEED\nfrom lm.fast import KIND\n")
    before = digest(project)
    stage_file.write_text("from lm.fast import KIND\nfrom lm.slow import SPEED\n")
    assert digest(project) == before
    stage_file.write_text("from lm.fast import SPEED\nfrom lm.slow import KIND\n")
    assert digest(project) != before


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


def test_the_reason_of_a_rerun_names_the_edited_module(project: Path, tmp_path: Path) -> None:
    run = run_context(tmp_path / "root")

    def example() -> Stage:
        stage = Stage("example", lambda out, text: None)
        stage.file = str(project / "tasks" / "used.py")
        return stage

    example().materialize(run, {"text": "x"})
    edit(project, "deep", "'a message'", "'a better message'")
    assert example().explain(run, {"text": "x"}) == ": edited lm.deep"


def test_an_edit_during_a_run_is_a_user_error(project: Path) -> None:
    """A stage imports modules when it runs, so the key may be of other code."""
    files, before = modules(project), digests(project)
    code_version.check_not_edited(files, before)
    edit(project, "lazy", "LAZY = 1", "LAZY = 2")
    with pytest.raises(UserError, match=r"lm\.lazy was edited after this run began"):
        code_version.check_not_edited(files, before)


@pytest.mark.parametrize("damaged", ["", "[1]", '{"identity": 1}', None])
def test_parsed_code_is_cached_on_disk(project: Path, monkeypatch: pytest.MonkeyPatch, damaged: str | None) -> None:
    def fresh_digests() -> dict[str, str]:
        code_version._parse_version.cache_clear()  # as in a new process
        return digests(project)

    monkeypatch.setenv("XDG_CACHE_HOME", str(project / "cache"))
    before, parse = fresh_digests(), ast.parse
    with monkeypatch.context() as patched:
        patched.setattr(ast, "parse", None)
        assert fresh_digests() == before
    edit(project, "lazy", "LAZY = 1", "LAZY = 2")
    assert {name for name, digest in fresh_digests().items() if digest != before[name]} == {"lm.lazy"}
    edit(project, "lazy", "LAZY = 2", "LAZY = 1")
    if damaged is None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    else:
        for path in (project / "cache").rglob("*.json"):
            path.write_text(damaged)
    parse_again = Mock(side_effect=parse)
    monkeypatch.setattr(ast, "parse", parse_again)
    assert fresh_digests() == before and parse_again.call_count == len(before)


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
    """Edited code needs a decision: python -m tools.code_lock accept, or raise STAGE."""
    now, lock = code_lock.current_lock(), code_version.read_lock()
    edited = {name for name, digest in now["modules"].items() if lock["modules"].get(name) != digest}
    assert not edited, "same output: python -m tools.code_lock accept; another output: … raise STAGE"
    assert now["modules"].keys() == lock["modules"].keys()
    assert now["stages"] == lock["stages"]


def test_the_code_of_a_stage_contains_the_modules_that_decide_its_content() -> None:
    assert {
        "lm.text.sources",
        "lm.tokenizer.pretoken_counts",
        "lm.text.pretokenize",
        "tasks.runtime.inputs",
    } <= set(count_group.code)
    assert {"lm.text.sources", "lm.data.token_shards", "lm.tokenizer"} <= set(encode_group.code)
    assert {"lm.data.token_shards", "lm.train.trainer", "lm.model", "lm.optim"} <= set(train.code)
    assert "lm.train.trainer" not in sample.code
    for used in (count_group, encode_group, train, sample):
        assert not {
            "tasks.runtime.stage",
            "tasks.runtime.store",
            "tasks.runtime.run_context",
            "lm.common.execution",
        } & set(used.code)


def test_a_stage_holds_the_objective_that_it_trains_with_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change in PPO's objective or losses changes the key of ppo alone."""
    original = code_version.PROJECT
    for package in "lm", "tasks":
        shutil.copytree(original / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code_version, "PROJECT", tmp_path)

    def digests() -> dict[str, str]:
        files = {stage: str(tmp_path / Path(stage.file).relative_to(original)) for stage in stages}
        return {
            stage.name: code_version.stage_digest(code_version.find_modules(file, *stage.runs))
            for stage, file in files.items()
        }

    stages = train, sft, preference, reward_model, reinforce, ppo, evaluate
    for module in "objectives/ppo", "losses/ppo":
        path, before = tmp_path / "lm" / "posttrain" / f"{module}.py", digests()
        path.write_text(path.read_text() + "\nEDITED = 1\n")
        after = digests()
        assert {name for name in before if before[name] != after[name]} == {"ppo"}
