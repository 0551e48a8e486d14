"""The tokenizer in the metadata of a GGUF file: a byte-level BPE, and how the model chats.

GGUF names the split into pretokens in a word, ``tokenizer.ggml.pre``, and states neither normalizers nor flags of
added tokens. llama.cpp normalizes no text.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm.common.errors import UserError
from lm.text.character_tables import PUBLISHED_TABLES
from lm.text.normalize import NORMALIZERS
from lm.text.patterns import PATTERNS
from lm.text.pretokenize import GPT2_PATTERN, Pattern
from lm.tokenizer.added_tokens import AddedToken
from lm.tokenizer.chat_settings import ChatSettings
from lm.tokenizer.formats.tiktoken import check_all_bytes
from lm.tokenizer.formats.tokenizer_config import TokenizerParts
from lm.tokenizer.formats.tokenizer_json import drop_default_ids, drop_repeated
from lm.tokenizer.formats.vocab_merges import parse_merges, parse_vocab
from lm.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
CHAT_TEMPLATE_KEY = "tokenizer.chat_template"
NORMALIZER_KEY = "textmill.normalizer"
"""Key of the normalizer that a tokenizer had when it was written. Files of others lack it."""


class Pretokenizer(NamedTuple):
    """What ``tokenizer.ggml.pre`` stands for."""

    pattern: Pattern
    ignore_merges: bool = False
    normalizer: str | None = None
    """That of the published tokenizers of this name; llama.cpp leaves it out."""
    adds_begin: bool = False
    """Whether a text begins with the BOS token if the file does not say so."""


PRETOKENIZERS = {
    "gpt-2": Pretokenizer(GPT2_PATTERN),
    "smaug-bpe": Pretokenizer(PATTERNS["llama3"]),
    "llama-bpe": Pretokenizer(PATTERNS["llama3"], ignore_merges=True, adds_begin=True),
    "qwen2": Pretokenizer(PATTERNS["qwen2"], normalizer="NFC"),
    "deepseek-v3": Pretokenizer(PATTERNS["deepseek"]),
    "smollm": Pretokenizer((r"\p{N}", GPT2_PATTERN)),  # Digits, then GPT-2's
}
"""By name in llama.cpp."""
_OTHER_NAMES = {  # of the same in llama.cpp
    **dict.fromkeys(("llama3", "llama-v3"), "llama-bpe"),
    "deepseek-r1-qwen": "qwen2",
    **dict.fromkeys(("starcoder", "refact"), "smollm"),
}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # types of tokens
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ENDS = {  # tokens that end a generation in llama.cpp by their text
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<｜end▁of▁sentence｜>", "</s>", "<EOT>"),
}


def parse_tokenizer(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that the ``metadata`` of the file ``path`` describe, with the chat settings.

    Raises UserError for another kind of tokenizer than byte-level BPE, a pretokenizer that textmill does not have, and
    missing or bad fields.
    """
    fields = {name.removeprefix(_PREFIX): value for name, value in metadata.items() if name.startswith(_PREFIX)}
    if (kind := fields.get("model")) != "gpt2":
        raise UserError(
            f"{path}: tokenizer.ggml.model {kind!r} is not supported, only gpt2, byte-level BPE; use the directory of "
            "safetensors of the same model, with its tokenizer's file."
        )
    name = fields.get("pre")
    pre = PRETOKENIZERS.get(_OTHER_NAMES.get(name, name) if isinstance(name, str) else "")
    if pre is None:
        raise UserError(
            f"{path}: tokenizer.ggml.pre {name!r} is not supported; use a file with one of "
            f"{', '.join((*PRETOKENIZERS, *_OTHER_NAMES))}, or the directory of safetensors of the same model."
        )
    tokens, merges = (_read_texts(path, fields, name) for name in ("tokens", "merges"))
    types = fields.get("token_type", np.full(len(tokens), _NORMAL))
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise UserError(f"{path}: tokenizer.ggml.token_type has no type for each of the {len(tokens):,} tokens.")
    if len(set(tokens)) < len(tokens):
        raise UserError(f"{path}: tokenizer.ggml.tokens has a text twice; use a file with one id for each token.")
    added = [
        AddedToken(text, special=bool(types[token_id] == _CONTROL), id=token_id)
        for token_id, text in enumerate(tokens)
        if types[token_id] in (_CONTROL, _USER_DEFINED)
    ]
    ids = {text: token_id for token_id, text in enumerate(tokens) if types[token_id] != _UNUSED}
    vocab = parse_vocab(path, ids, {token.content for token in added})
    check_all_bytes(path, vocab)
    normalizer = metadata.get(NORMALIZER_KEY, pre.normalizer) or None
    if normalizer not in (None, *NORMALIZERS):
        raise UserError(f"{path}: {NORMALIZER_KEY} {normalizer!r} is unknown; use {', '.join(NORMALIZERS)}.")
    specials = [token.content for token in added if token.special]
    begin = _token_text(path, fields, "bos_token_id", tokens)
    has_begin = fields.get("add_bos_token", pre.adds_begin) is True and begin in specials
    parts = TokenizerParts(
        vocab,
        drop_repeated(parse_merges(f"{path}, merge", merges)),
        specials,
        pre.pattern,
        pre.ignore_merges,
        normalizer,
        drop_default_ids(path, vocab, added),
        begin if has_begin else None,
        PUBLISHED_TABLES,
        _read_chat(path, metadata, fields, tokens, {text: ids[text] for text in (token.content for token in added)}),
    )
    try:
        return Tokenizer(*parts)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _read_chat(
    path: Path, metadata: dict[str, Any], fields: dict[str, Any], tokens: Sequence[str], added_ids: dict[str, int]
) -> ChatSettings | None:
    """Return the templates and the ends that a file states; None if it states neither."""
    names = metadata.get(f"{CHAT_TEMPLATE_KEY}s", [])
    templates = {"default": metadata.get(CHAT_TEMPLATE_KEY)}
    templates |= {
        name: metadata.get(f"{CHAT_TEMPLATE_KEY}.{name}") for name in (names if isinstance(names, list) else [])
    }
    sources = {name: source for name, source in templates.items() if isinstance(source, str) and source.strip()}
    named = {f"{name}_token": f"{name}_token_id" for name in ("bos", "eos", "unknown", "padding")}
    texts = {name: text for name, key in named.items() if (text := _token_text(path, fields, key, tokens)) is not None}
    variables = {"unknown_token": "unk_token", "padding_token": "pad_token"}  # in the templates
    texts = {variables.get(name, name): text for name, text in texts.items()}
    stated = {tokens.index(text) for key in _END_KEYS if (text := _token_text(path, fields, key, tokens)) is not None}
    end_ids = stated | {token_id for text, token_id in added_ids.items() if text in _ENDS}
    if not (sources or stated):
        return None
    return ChatSettings(sources, texts, tuple(sorted(end_ids)))


def _token_text(path: Path, fields: dict[str, Any], key: str, tokens: Sequence[str]) -> str | None:
    """Return the token whose id a field has; None without the field, and with a warning for an id that no token has."""
    token_id = fields.get(key)
    if token_id is None:
        return None
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        log.warning("%s: tokenizer.ggml.%s is %r, which is no id of a token; it is ignored.", path, key, token_id)
        return None
    return tokens[token_id]


def _read_texts(path: Path, fields: dict[str, Any], name: str) -> list[str]:
    texts = fields.get(name)
    if not isinstance(texts, list) or not texts:
        raise UserError(f"{path} has no tokenizer.ggml.{name}, a list of texts; use a file with the tokenizer in it.")
    return texts
