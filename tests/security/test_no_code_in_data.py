"""Data runs no code: forbidden calls, payloads that would create a directory, and the dependencies."""

import ast
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from lm.checkpoint.hugging_face.model_files import load_hugging_face
from lm.checkpoint.meta import load_meta
from lm.checkpoint.safe_load import read_tensors
from lm.checkpoint.single_file import load_checkpoint
from lm.checkpoint.training_checkpoint import load_training
from lm.common.errors import UserError
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.training import ROOT
from textmill.cli.main import main

FOLDERS = ("lm", "tasks", "flows", "textmill", "benchmarks")


class Payload:
    """An object that creates a directory when it is unpickled without restriction."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def calls(folder: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (location, function name, constant keyword arguments) of each call in a folder."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                options: dict[Any, Any] = {
                    keyword.arg: keyword.value.value
                    for keyword in node.keywords
                    if isinstance(keyword.value, ast.Constant)
                }
                yield f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func), options


def is_dangerous(name: str, options: dict[str, Any]) -> bool:
    """Return whether a call may run code from data."""
    return (
        name in {"eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
        or re.fullmatch(r"(c?pickle|dill|cloudpickle|joblib|marshal|shelve)\.(loads?|open|Unpickler)", name) is not None
        or (name == "torch.load" and options.get("weights_only") is not True)
        or bool(options.get("allow_pickle") or options.get("shell") or options.get("trust_remote_code"))
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_call_runs_code_from_data(folder: str) -> None:
    assert [f"{location} {name}" for location, name, options in calls(folder) if is_dangerous(name, options)] == []


def test_dangerous_calls_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)", "pickle.loads(b)"]
    lines += ["yaml.load(f, Loader=x)", "eval(s)", "subprocess.run(s, shell=True)"]
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "bad.py").write_text("\n".join([*lines, "torch.load(f, weights_only=True)", "np.load(f)"]))
    monkeypatch.setattr("tests.security.test_no_code_in_data.ROOT", tmp_path)
    assert sum(is_dangerous(name, options) for _, name, options in calls("lm")) == len(lines)


def read_array(path: Path) -> None:
    try:
        np.load(path)  # as the stage page reads documents.npy
    except ValueError as error:
        raise UserError(str(error)) from None


def meta_shard(path: Path) -> None:
    (path.parent / "params.json").write_text('{"dim": 4, "n_layers": 1, "n_heads": 2, "vocab_size": -1}')
    path.rename(path.parent / "consolidated.00.pth")
    load_meta(path.parent, 8)


def safetensors(path: Path) -> None:
    fields = {"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}
    fields |= {"intermediate_size": 4, "vocab_size": 8}
    (path.parent / "config.json").write_text(str(fields).replace("'", '"'))
    path.rename(path.parent / "model.safetensors")
    load_hugging_face(path.parent)


def checkpoint_directory(path: Path) -> None:
    path.rename(path.parent / "optimizer.pt")
    load_training(path.parent, nn.Linear(2, 2), [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "read",
    [
        lambda path: load_checkpoint(path, nn.Linear(2, 2)),
        read_tensors,
        lambda path: read_tensors(path, mmap=True),
        meta_shard,
        safetensors,
        checkpoint_directory,
        Tokenizer.from_tokenizer_json,
        Tokenizer.from_tiktoken,
    ],
    ids=["single", "tensors", "mapped", "meta", "safetensors", "directory", "tokenizer.json", "tiktoken"],
)
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_payload_is_refused_and_not_run(tmp_path: Path, read: Callable[[Path], Any], is_zip: bool) -> None:
    """A pickle replaces each kind of file."""
    victim, path = tmp_path / "victim", tmp_path / "file.pt"
    torch.save({"model": {}, "x": Payload(victim)}, path, _use_new_zipfile_serialization=is_zip)
    data = path.read_bytes()
    with pytest.raises(UserError):
        read(path)
    assert not victim.exists()
    path.write_bytes(data)
    torch.load(path, weights_only=False)
    assert victim.exists(), "the payload works without protection"


def test_an_array_with_a_payload_is_refused_and_not_run(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "documents.npy"
    np.save(path, np.array([Payload(victim)], dtype=object))
    with pytest.raises(UserError, match="allow_pickle"):
        read_array(path)
    assert not victim.exists()
    np.load(path, allow_pickle=True)
    assert victim.exists()


def test_tags_and_classes_in_yaml_run_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The options file has Python tags, or a class to import instead of a section."""
    victim = tmp_path / "victim"
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(victim)!r})\nclass Data: pass\n")
    tag = f"data: !!python/object/apply:os.mkdir [{str(victim)!r}]"
    sections = [
        "data: {class_path: evil.Data, init_args: {}}",
        "class_path: evil.Data",
        "tokenizer: evil.Data",
        "data: [1]",
    ]
    path = tmp_path / "mine.yaml"
    sys.path.insert(0, str(tmp_path))
    try:
        for text in (tag, *sections):
            path.write_text(text)
            assert main(["plan", "--config", str(path), "--root", str(tmp_path / "root")]) == 2
            assert "textmill: " in capsys.readouterr().err
            assert not victim.exists(), text
    finally:
        sys.path.remove(str(tmp_path))
    yaml.unsafe_load(tag)
    assert victim.exists()


# Dependencies


def imported_modules(folders: tuple[str, ...]) -> set[str]:
    """Return the top-level modules that these folders import, and all string constants, as some are module names."""
    modules = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    modules |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    modules.add(node.module.partition(".")[0])
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    modules.add(node.value.partition(".")[0])  # e.g. for importorskip
    return modules


IMPORT_NAMES = {
    "pyyaml": "yaml",
    "pillow": "PIL",
    "lazy-loader": "lazy_loader",
    "quicktok-v1": "quicktok",
    "mlflow-skinny": "mlflow",
}
NOT_IMPORTED = {"pytest-xdist", "pytest-timeout", "tensorboard"}  # pytest loads its plugins, torch imports tensorboard


def test_each_dependency_is_used_and_has_a_version_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    project_modules, test_modules = imported_modules(("lm", "tasks", "flows", "textmill")), imported_modules(("tests",))
    extras = project["optional-dependencies"]
    for requirements, modules in [
        (project["dependencies"], project_modules),
        (
            extras["s3"]
            + extras["llama"]
            + extras["tensorboard"]
            + extras["mlflow"]
            + extras["dask"]
            + extras["ray"]
            + extras["math"]
            + extras["reasoning-gym"],
            project_modules | test_modules | {"s3fs"},
        ),
        (extras["bench"], imported_modules(("benchmarks",))),
        (extras["test"] + extras["peers"] + extras["fuzz"], project_modules | test_modules),
    ]:
        for requirement in requirements:
            name, version = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?(.*)", requirement).groups()  # type: ignore[union-attr]
            if name in NOT_IMPORTED:
                continue
            assert IMPORT_NAMES.get(name, name).replace("-", "_") in modules, f"{name} is not imported"
            assert re.search(r"[<>=]", version), f"{name} has no version range"
    assert len(project["dependencies"]) <= 21
