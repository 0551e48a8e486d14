"""--model names a model of the Hugging Face hub that lies in the local cache."""

import logging
from pathlib import Path

import pytest

from flows.pipeline import find_start
from lm.checkpoint.hugging_face.model_files import save_hugging_face
from lm.common.errors import UserError
from lm.text.pretokenize import END_OF_TEXT
from tasks.import_model import import_model
from tasks.runs.models import DirectoryModel, resolve_model, resolve_tokenizer
from tests.helpers.generating import make_model
from tests.helpers.hub import fill_hub_cache
from tests.helpers.llamas import assert_same_weights
from tests.helpers.roots import materialize, run_context
from tests.helpers.tokenizers import bytes_tokenizer
from textmill.cli.main import main

NAME = "some-org/tiny_1.5B"
MODEL = make_model(257, 16).eval()
TOKENIZER = bytes_tokenizer([END_OF_TEXT])


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a model in a cache."""
    save_hugging_face(MODEL, TOKENIZER, tmp_path / "files")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return fill_hub_cache(tmp_path / "hub", NAME, tmp_path / "files")


def test_a_cached_model_is_used_and_said(snapshot: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for name in (NAME, f"{NAME}@main", f"{NAME}@0a1b2c"):
        caplog.clear()
        found = resolve_model(name, str(tmp_path / "root"))
        assert isinstance(found, DirectoryModel) and found.directory == snapshot
        assert (found.name, found.public_name) == (name, name)
        [line] = caplog.messages
        assert line == f"{name} is taken from the local cache of the Hugging Face hub: {snapshot}"
    model, tokenizer = found.load("cpu")
    assert_same_weights(model, MODEL)
    assert tokenizer.vocab == TOKENIZER.vocab
    assert resolve_tokenizer(NAME, str(tmp_path / "root")).vocab == TOKENIZER.vocab


def test_a_directory_comes_before_the_cache(snapshot: Path, tmp_path: Path) -> None:
    save_hugging_face(MODEL, TOKENIZER, tmp_path / NAME)
    found = resolve_model(NAME, str(tmp_path / "root"))
    assert isinstance(found, DirectoryModel) and found.directory == Path(NAME)
    assert found.public_name == "tiny_1.5B"


def test_the_commands_take_a_cached_model(snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "--model", NAME, "--prompt", "a", "--max_new_tokens", "1", "--device", "cpu"]) == 0
    assert main(["export", str(tmp_path / "exported"), "--model", NAME]) == 0
    assert (tmp_path / "exported" / "config.json").exists()
    assert f"{NAME} is taken from the local cache" in capsys.readouterr().err


def test_a_training_starts_from_a_cached_model(snapshot: Path, tmp_path: Path) -> None:
    run = run_context(tmp_path / "root")
    files = find_start(NAME, run.store)
    assert isinstance(files, list)
    materialize(import_model, run, files)
    [manifest] = (tmp_path / "root" / "import").glob("*/manifest.json")
    assert "model.safetensors" in manifest.read_text()


def test_an_incomplete_snapshot_names_the_missing_file(snapshot: Path, tmp_path: Path) -> None:
    (snapshot / "model.safetensors").resolve().unlink()  # the link stays
    with pytest.raises(UserError, match=r"model\.safetensors"):
        resolve_model(NAME, str(tmp_path / "root")).load("cpu")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors"):
        resolve_model(NAME, str(tmp_path / "root")).load("cpu")
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(UserError, match=r"model-1\.safetensors"):
        resolve_model(NAME, str(tmp_path / "root")).load("cpu")
