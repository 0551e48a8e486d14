"""tokenizer_config.json: the options of a saved tokenizer, and all else that defines one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from lm.common.errors import UserError
from lm.files.json import read_json
from lm.text.character_tables import unpack_tables
from lm.text.pretokenize import Pattern
from lm.tokenizer.added_tokens import AddedToken
from lm.tokenizer.chat_settings import ChatSettings

FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")


class TokenizerParts(NamedTuple):
    """The arguments of :class:`lm.tokenizer.tokenizer.Tokenizer`, in its order."""

    vocab: dict[int, bytes]
    merges: list[tuple[bytes, bytes]]
    special_tokens: Sequence[str]
    pattern: Pattern
    ignore_merges: bool = False
    normalizer: str | None = None
    added_tokens: Sequence[AddedToken] = ()  # those that are more than a special token's text
    begin_token: str | None = None
    character_tables: str | None = None  # see lm.text.character_tables
    chat: ChatSettings | None = None


def write_config(path: Path, parts: TokenizerParts) -> None:
    """Write the options of a tokenizer; see :func:`format_config`."""
    path.write_text(json.dumps(format_config(parts), ensure_ascii=False, indent=1), "utf-8")


def format_config(parts: TokenizerParts) -> dict[str, Any]:
    """Return the options of a tokenizer: all but vocabulary and merges. Options with their defaults are left out."""
    options = parts._asdict() | {"added_tokens": [asdict(token) for token in parts.added_tokens]}
    options["chat"] = asdict(parts.chat) if parts.chat else None
    del options["vocab"], options["merges"]
    return {name: value for name, value in options.items() if value or name in ("special_tokens", "pattern")}


def read_config(path: Path) -> TokenizerParts:
    """Read the options of a tokenizer, without vocabulary and merges. Raises UserError for a malformed file."""
    try:
        return parse_config(read_json(path))
    except ValueError as error:
        raise UserError(f"{path} {error}; save the tokenizer again.") from None


def parse_config(config: Any) -> TokenizerParts:
    """Return the options of a tokenizer, without vocabulary and merges. Raises ValueError for another object than
    :func:`format_config` returns."""
    try:
        specials, pattern = config["special_tokens"], config["pattern"]
        pattern = pattern if isinstance(pattern, str) else tuple(pattern)
        options = {name: config.get(name, default) for name, default in TokenizerParts._field_defaults.items()}
        options["added_tokens"] = [parse_added_token(token) for token in options["added_tokens"]]
        is_valid = (
            isinstance(specials, list)
            and all(type(text) is str for text in (*specials, *pattern))
            and type(options["ignore_merges"]) is bool
            and all(isinstance(options[name], str | None) for name in ("normalizer", "begin_token", "character_tables"))
        )
    except (AttributeError, KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise ValueError("does not name special_tokens, pattern and other options")
    if options["chat"] is not None:
        options["chat"] = ChatSettings.parse(options["chat"])
    if options["character_tables"] is not None:
        unpack_tables(options["character_tables"])
    return TokenizerParts({}, [], specials, pattern, **options)


def parse_added_token(fields: Mapping[str, Any]) -> AddedToken:
    """Return the added token of its JSON object; a missing flag is false. Raises KeyError or TypeError for another
    object."""
    token = AddedToken(fields["content"], id=fields.get("id"), **{flag: fields.get(flag, False) for flag in FLAGS})
    is_valid = type(token.content) is str and all(type(getattr(token, flag)) is bool for flag in FLAGS)
    if not is_valid or (token.id is not None and (type(token.id) is not int or token.id < 0)):
        raise TypeError(f"the added token {fields!r}")
    return token
