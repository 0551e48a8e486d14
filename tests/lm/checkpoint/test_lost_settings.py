"""Settings of a directory of Hugging Face that an export lacks."""

import json
from pathlib import Path
from typing import Any

import pytest

from lm.checkpoint.hugging_face import save_hugging_face
from lm.checkpoint.lost_settings import find_lost_settings
from lm.data.chat_template import make_jinja_template
from tests.helpers.generating import make_model
from tests.helpers.posttraining import CHAT
from tests.helpers.tokenizers import bytes_tokenizer


def add_fields(path: Path, fields: dict[str, Any]) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | fields))


@pytest.mark.parametrize("tokenizer", [CHAT, bytes_tokenizer(["<|endoftext|>"]), bytes_tokenizer([])])
def test_an_export_of_an_export_loses_nothing(tmp_path: Path, tokenizer: Any) -> None:
    save_hugging_face(make_model(tokenizer.size, 16), tokenizer, tmp_path / "model")
    assert find_lost_settings(tmp_path / "model", tokenizer) == []
    assert find_lost_settings(tmp_path, tokenizer) == [], "files of Meta have no settings"


@pytest.mark.parametrize(
    ("name", "fields", "lost"),
    [
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}, "the chat template"),
        ("chat_template.json", {"chat_template": "{{ messages }}"}, "the chat template"),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}, "the end token <|im_end|>"),
        ("tokenizer_config.json", {"eos_token": {"content": "</s>"}}, "the end token </s>"),
        ("generation_config.json", {"eos_token_id": [256, 65, 66]}, "the end tokens with the ids 65, 66"),
        ("generation_config.json", {"eos_token_id": 65}, "the end tokens with the ids 65"),
        ("generation_config.json", {"top_p": 0.9, "temperature": 0.6, "transformers_version": "5"},
         "the generation settings temperature, top_p"),
    ],
)  # fmt: skip
def test_lost_settings_are_named(tmp_path: Path, name: str, fields: dict[str, Any], lost: str) -> None:
    save_hugging_face(make_model(CHAT.size, 16), CHAT, tmp_path / "model")
    add_fields(tmp_path / "model" / name, fields)
    assert find_lost_settings(tmp_path / "model", CHAT) == [lost]


@pytest.mark.parametrize(
    ("text", "lost"), [("{{ 1 }}", ["the chat template"]), (make_jinja_template(CHAT), [])], ids=["other", "own"]
)
def test_the_template_may_have_a_file_of_its_own(tmp_path: Path, text: str, lost: list[str]) -> None:
    save_hugging_face(make_model(CHAT.size, 16), CHAT, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(text, encoding="utf-8")
    assert find_lost_settings(tmp_path / "model", CHAT) == lost
