"""What Hugging Face's files say about dialogs: the chat templates, the tokens that end an answer, and sampling."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm.checkpoint.external_weights import read_json_object
from lm.common.errors import UserError
from lm.data.chat_template import END_TOKEN, find_template, make_jinja_template
from lm.tokenizer.chat_settings import ChatSettings
from lm.tokenizer.text_tokenizer import find_text_ends
from lm.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_IDS = {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}
_NO_SETTINGS = {"transformers_version", "_from_model_config"}


def read_chat_settings(directory: Path, tokenizer: Tokenizer) -> ChatSettings | None:
    """Return the settings that the files of a model state; None if they state neither a template nor an end.

    Templates are those of ``chat_template.jinja``, of ``additional_chat_templates/``, of ``chat_template.json``, or of
    ``tokenizer_config.json``. A generation ends with the ids of ``generation_config.json``, or else of ``config.json``,
    and with the tokenizer's ``eos_token``. Raises UserError for a damaged file.
    """
    about, config, generation = (
        _read(directory / name) for name in ("tokenizer_config.json", "config.json", "generation_config.json")
    )
    templates = find_chat_templates(directory)
    named = _read(directory / "special_tokens_map.json") | about
    tokens = {name: text for name in named if name.endswith("_token") and (text := _token_text(named[name]))}
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if unknown := [end_id for end_id in ids if type(end_id) is not int or end_id not in tokenizer.vocab]:
        log.warning("%s: eos_token_id has %r, which is no id of the tokenizer; it ends nothing.", directory, unknown[0])
    end_ids = {end_id for end_id in ids if end_id not in unknown}
    if (end := tokens.get("eos_token")) in tokenizer.added_ids:
        end_ids.add(tokenizer.added_ids[end or ""])
    settings = {name: value for name, value in generation.items() if name not in _IDS | _NO_SETTINGS}
    if not (templates or end_ids):
        return None
    return ChatSettings(templates, tokens, tuple(sorted(end_ids)), settings)


def find_chat_templates(directory: Path) -> dict[str, str]:
    """Return the chat templates of Hugging Face's files by name. Raises UserError for a damaged file."""
    templates = {
        path.stem: path.read_text(encoding="utf-8", errors="replace")
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    if (path := directory / "chat_template.jinja").exists():
        return {**templates, "default": path.read_text(encoding="utf-8", errors="replace")}
    about = _read(directory / "tokenizer_config.json")
    found = _read(directory / "chat_template.json").get("chat_template", about.get("chat_template"))
    if found is None:
        return templates
    named = found if isinstance(found, list) else [{"name": "default", "template": found}]
    try:
        templates |= {str(entry["name"]): entry["template"] for entry in named}
    except (TypeError, KeyError):
        templates = {"": None}  # type: ignore[dict-item]
    if not all(isinstance(source, str) for source in templates.values()):
        raise UserError(f"{directory}: chat_template is neither a text nor a list of templates with names.")
    return {name: source for name, source in templates.items() if source.strip()}


def chat_fields(tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of ``tokenizer_config.json`` and of ``generation_config.json`` for an export.

    An id that the model lacks is written as null, because the defaults of transformers are 1 and 2.
    """
    begin, end = find_text_ends(tokenizer)
    template, chat = find_template(tokenizer), tokenizer.chat or ChatSettings()
    if template and not template.is_own:
        begin = end = None  # those of its files alone
    tokens = {"bos_token": begin, "eos_token": END_TOKEN if template and template.is_own else end, **chat.tokens}
    ids = {
        "bos_token_id": tokenizer.added_ids.get(tokens["bos_token"] or ""),
        "eos_token_id": sorted(tokenizer.stop_ids) or None,
    }
    return {**tokens, **template_field(tokenizer)}, {**chat.generation, **ids}


def template_field(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the field ``chat_template``: a text, or a list of several with names; empty without a template."""
    if (template := find_template(tokenizer)) is None:
        return {}
    if template.is_own:
        return {"chat_template": make_jinja_template(tokenizer)}
    if [*template.sources] == ["default"]:
        return {"chat_template": template.sources["default"]}
    return {"chat_template": [{"name": name, "template": source} for name, source in template.sources.items()]}


def _token_text(token: Any) -> str | None:
    """Return the text of a special token: itself, or in an object with flags."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}
