"""The settings of a directory of Hugging Face that an export of its model does not have."""

import logging
from pathlib import Path
from typing import Any

from lm.checkpoint.external_weights import read_json_object
from lm.data.chat_template import END_TOKEN, has_chat_tokens, make_jinja_template
from lm.tokenizer.text_ends import find_text_ends
from lm.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NO_SETTINGS = {*_IDS, "transformers_version", "_from_model_config"}


def warn_of_lost_settings(directory: Path, tokenizer: Tokenizer) -> None:
    """Log which settings of ``directory`` an export with ``tokenizer`` lacks: textmill does not use them."""
    if lost := find_lost_settings(directory, tokenizer):
        log.warning(
            "The export does not keep %s of %s. To keep them, copy them from its tokenizer_config.json, "
            "generation_config.json and chat_template files.",
            ", ".join(lost),
            directory,
        )


def find_lost_settings(directory: Path, tokenizer: Tokenizer) -> list[str]:
    """Return the names of the chat template, the end of a text and the generation settings if an export lacks them."""
    about, config, generation = (
        _read(directory / name) for name in ("tokenizer_config.json", "config.json", "generation_config.json")
    )
    own_template, own_end = None, find_text_ends(tokenizer)[1]
    if has_chat_tokens(tokenizer):
        own_template, own_end = make_jinja_template(tokenizer), END_TOKEN
    template = _read(directory / "chat_template.json").get("chat_template", about.get("chat_template"))
    if (path := directory / "chat_template.jinja").exists():
        template = path.read_text(encoding="utf-8", errors="replace")
    lost = [] if template in (None, own_template) else ["the chat template"]
    end = about.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    ids = generation.get("eos_token_id", config.get("eos_token_id", []))
    other_ids = [i for i in (ids if isinstance(ids, list) else [ids]) if i not in tokenizer.special_ids.values()]
    if end is not None and end != own_end:
        lost.append(f"the end token {end}")
    elif other_ids:
        lost.append(f"the end tokens with the ids {', '.join(map(str, other_ids))}")
    if names := sorted(generation.keys() - _NO_SETTINGS):
        lost.append(f"the generation settings {', '.join(names)}")
    return lost


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}
