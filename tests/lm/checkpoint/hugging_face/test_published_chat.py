"""A model of another library with a chat template of its own: served, post-trained and exported in that template."""

import json
from pathlib import Path
from typing import Any

import pytest

from lm.checkpoint.external import load_external
from lm.checkpoint.hugging_face.chat_files import read_chat_settings
from lm.checkpoint.hugging_face.model_files import save_hugging_face
from lm.common.errors import UserError
from lm.data.chat_template import add_chat_tokens, encode_dialog, find_template
from lm.inference.chat_format import ChatFormat, respond
from lm.inference.completion import TextGeneration, stream_text
from lm.inference.config import SampleConfig
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.llamas import make_dialog
from tests.helpers.published_chat import DIALOGS, SPECIALS, TEMPLATE, answer_by_transformers, save_qwen
from tests.helpers.tokenizers import make_tokenizer


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen")
    save_qwen(directory)
    return directory


def test_answers_are_those_of_transformers_and_end_at_its_end(qwen: Path, tmp_path: Path) -> None:
    model, tokenizer = load_external(qwen)
    assert isinstance(tokenizer, Tokenizer)
    expected, last = answer_by_transformers(qwen, DIALOGS[0])
    assert last == "<|im_end|>" and expected
    config = SampleConfig(temperature=0, max_new_tokens=30)
    [response] = respond(model, tokenizer, [(0, DIALOGS[0])], config)
    assert response.text == expected and response.finish_reason == "stop"
    text = "".join(stream_text(model, tokenizer, ChatFormat(tokenizer).encode(DIALOGS[0]), config))
    assert text == response.text
    save_hugging_face(model, tokenizer, tmp_path / "out")
    assert answer_by_transformers(tmp_path / "out", DIALOGS[0])[0] == expected
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["temperature"] == 0.7 and generation["top_p"] == 0.8
    assert generation["eos_token_id"] == [0, tokenizer.added_ids["<|im_end|>"]]
    about = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert about["chat_template"] == TEMPLATE and about["eos_token"] == "<|im_end|>"


def test_a_special_token_that_ends_nothing_is_no_text_and_no_end(qwen: Path) -> None:
    _, tokenizer = load_external(qwen)
    assert isinstance(tokenizer, Tokenizer)
    hidden = tokenizer.special_ids["<|object_ref_start|>"]
    text = TextGeneration(tokenizer, [0], SampleConfig(), seed=0)
    assert hidden not in text.generation.stop_ids
    for token_id in (*tokenizer.encode("ab"), hidden, *tokenizer.encode("c")):
        text.generation.append(token_id, None)
    assert text.finish() == "abc" and text.generation.finish_reason is None


def test_settings_survive_a_save_of_the_tokenizer(qwen: Path, tmp_path: Path) -> None:
    _, tokenizer = load_external(qwen)
    assert isinstance(tokenizer, Tokenizer) and tokenizer.chat
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.chat == tokenizer.chat and loaded.stop_ids == tokenizer.stop_ids
    assert encode_dialog(loaded, make_dialog("a", "b")) == encode_dialog(tokenizer, make_dialog("a", "b"))
    assert add_chat_tokens(loaded) is loaded, "it is post-trained in its own template"
    (tmp_path / "tokenizer_config.json").write_text(
        (tmp_path / "tokenizer_config.json").read_text().replace('"end_ids": [', '"end_ids": ["x", ')
    )
    with pytest.raises(UserError, match=r"tokenizer_config\.json has no valid settings of a chat"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("files", "templates", "ends"),
    [
        ({"chat_template.jinja": "J"}, {"default": "J"}, ["<|endoftext|>"]),
        ({"chat_template.json": {"chat_template": "C"}}, {"default": "C"}, ["<|endoftext|>"]),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "D"},
            {"name": "tool_use", "template": "T"}]}}, {"default": "D", "tool_use": "T"}, ["<|endoftext|>"]),
        ({"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "T"},
            {"default": "J", "tool_use": "T"}, ["<|endoftext|>"]),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_start|>"}}}, {}, ["<|endoftext|>", "<|im_start|>"]),
        ({"generation_config.json": {"eos_token_id": [1, 2]}}, {}, ["<|im_start|>", "<|object_ref_start|>"]),
        ({"config.json": {"eos_token_id": 1}}, {}, ["<|im_start|>"]),
        ({"config.json": {}}, None, None),
    ],
)  # fmt: skip
def test_files_that_name_templates_and_ends(
    tmp_path: Path, files: dict[str, Any], templates: dict[str, str] | None, ends: list[str] | None
) -> None:
    tokenizer = Tokenizer({i + 3: bytes([i]) for i in range(256)} | {i: t.encode() for i, t in enumerate(SPECIALS)}, [],
        SPECIALS)  # fmt: skip
    for name, content in ({"config.json": {"eos_token_id": 0}} | files).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    settings = read_chat_settings(tmp_path, tokenizer)
    assert (settings.templates if settings else None) == templates
    assert (settings and [tokenizer.decode([i]) for i in settings.end_ids]) == ends


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chat_template": 5}, "chat_template is neither a text nor a list"),
        ({"chat_template": [{"name": "default"}]}, "chat_template is neither a text nor a list"),
        ({"chat_template": [5]}, "chat_template is neither a text nor a list"),
    ],
)
def test_damaged_settings_are_user_errors(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=message):
        read_chat_settings(tmp_path, make_tokenizer())


def test_a_model_that_names_no_template_has_none(tmp_path: Path) -> None:
    assert find_template(make_tokenizer(special_tokens=SPECIALS)) is None
