"""A GGUF file as the model of the commands, and as the start of a training."""

import os
from dataclasses import asdict
from pathlib import Path

import pytest

from flows.pipeline import find_start
from lm.checkpoint.gguf.writer import save_gguf
from lm.checkpoint.hugging_face.model_files import load_hugging_face
from lm.checkpoint.training_checkpoint import load_model
from lm.common.errors import UserError
from lm.data.chat_template import add_chat_tokens
from lm.inference.completion import complete
from lm.inference.config import SampleConfig
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from tasks.import_model import import_model
from tasks.runs.models import DirectoryModel, resolve_model, resolve_tokenizer
from tests.helpers.llamas import assert_same_weights
from tests.helpers.roots import materialize, run_context
from tests.lm.checkpoint.gguf.test_writer import TOKENIZER, make_model
from textmill.cli.main import main


@pytest.fixture
def model(tmp_path: Path) -> TransformerLM:
    """The model of the file ``model.gguf``."""
    model = make_model(vocab_size=TOKENIZER.size, num_kv_heads=2)
    save_gguf(model, TOKENIZER, tmp_path / "model.gguf", "float32")
    return model


def test_a_file_is_found_and_described(model: TransformerLM, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    found = resolve_model(str(path), str(tmp_path / "root"))
    assert isinstance(found, DirectoryModel) and found.public_name == "model.gguf"
    assert found.read_context_length() == 64 and not found.is_post_trained
    before = found.identify()
    os.utime(path, ns=(1, 1))
    assert found.identify() != before == before.replace("\n", "")
    tokenizer = resolve_tokenizer(str(path), str(tmp_path / "root"))
    assert isinstance(tokenizer, Tokenizer) and tokenizer.encode("Once") == TOKENIZER.encode("Once")
    chat = add_chat_tokens(TOKENIZER)
    save_gguf(make_model(vocab_size=chat.size), chat, tmp_path / "chat.gguf")
    assert resolve_model(str(tmp_path / "chat.gguf"), "root").is_post_trained


def test_a_directory_of_files_must_be_narrowed_to_one(model: TransformerLM, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.gguf is GGUF; name the file itself"):
        resolve_model(str(tmp_path), str(tmp_path / "root")).load("cpu")


def test_a_file_is_sampled_and_exported(
    model: TransformerLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(tmp_path / "model.gguf"), "--root", str(tmp_path / "root")]
    arguments = ["--prompt", "Once", "--max_new_tokens", "9", "--temperature", "0", "--device", "cpu"]
    config = SampleConfig(prompts=["Once"], max_new_tokens=9, temperature=0)
    assert main(["sample", *options, *arguments]) == 0
    assert f"> Once|{complete(model, TOKENIZER, config)[0].text}\n" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "directory"), *options]) == 0
    assert_same_weights(load_hugging_face(tmp_path / "directory"), model)


def test_a_training_starts_from_a_file(model: TransformerLM, tmp_path: Path) -> None:
    run = run_context(tmp_path / "root")
    files = find_start(str(tmp_path / "model.gguf"), run.store)
    assert isinstance(files, list) and [file.url for file in files] == [str(tmp_path / "model.gguf")]
    materialize(import_model, run, files)
    [checkpoint] = (tmp_path / "root" / "import").glob("*/*/step-*")
    imported = load_model(checkpoint)
    assert_same_weights(imported, model)
    assert asdict(imported.config) == asdict(model.config)
    [tokenizer] = (tmp_path / "root" / "import").glob("*/*/tokenizer")
    assert Tokenizer.load(tokenizer).encode("Once") == TOKENIZER.encode("Once")
