"""The tokenizer in the metadata of a GGUF file: a byte-level BPE, or SentencePiece's, and how the model chats.

GGUF names the split into pretokens in a word, ``tokenizer.ggml.pre``, and states neither normalizers nor flags of
added tokens. llama.cpp normalizes no text.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm.common.errors import UserError
from lm.data.chat_template import END_TOKEN, find_template
from lm.text.character_tables import PUBLISHED_TABLES
from lm.text.normalize import NORMALIZERS
from lm.text.patterns import PATTERNS, SEGMENT_PATTERN_NAMES
from lm.text.pretokenize import GPT2_PATTERN, Pattern
from lm.tokenizer.added_tokens import AddedToken
from lm.tokenizer.chat_settings import ChatSettings
from lm.tokenizer.formats.tiktoken import check_all_bytes
from lm.tokenizer.formats.tokenizer_config import TokenizerParts
from lm.tokenizer.formats.tokenizer_json import drop_default_ids, drop_repeated
from lm.tokenizer.formats.vocab_merges import bytes_to_unicode, format_vocab, parse_merges, parse_vocab
from lm.tokenizer.sentencepiece import SentencePieceTokenizer
from lm.tokenizer.sentencepiece_model import Piece, SentencePieceModel, check_model
from lm.tokenizer.text_tokenizer import find_text_ends
from lm.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

log = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
CHAT_TEMPLATE_KEY = "tokenizer.chat_template"
NORMALIZER_KEY = "textmill.normalizer"
"""Key of the normalizer that a tokenizer had when it was written. Files of others lack it."""

_NO_NORMALIZER = "none"


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
_PRE_NAMES = {(pre.pattern, pre.ignore_merges): name for name, pre in PRETOKENIZERS.items()}
_OTHER_NAMES = {  # of the same in llama.cpp
    **dict.fromkeys(("llama3", "llama-v3"), "llama-bpe"),
    "deepseek-r1-qwen": "qwen2",
    **dict.fromkeys(("starcoder", "refact"), "smollm"),
}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # types of tokens
_CONTEXT_FLAGS = ("lstrip", "rstrip", "single_word")  # of added tokens
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<｜end▁of▁sentence｜>", "</s>", "<EOT>"),
}
"""Tokens that end a generation in llama.cpp by their text."""


def parse_tokenizer(path: Path, metadata: dict[str, Any]) -> Tokenizer | SentencePieceTokenizer:
    """Return the tokenizer that the ``metadata`` of the file ``path`` describe; a byte-level BPE has the chat settings.

    Raises UserError for another kind of tokenizer than byte-level BPE and SentencePiece's, a pretokenizer that textmill
    does not have, and missing or bad fields.
    """
    fields = {name.removeprefix(_PREFIX): value for name, value in metadata.items() if name.startswith(_PREFIX)}
    kind = fields.get("model")
    if kind not in ("gpt2", "llama"):
        raise UserError(
            f"{path}: tokenizer.ggml.model {kind!r} is not supported, only gpt2, byte-level BPE, and llama, "
            "SentencePiece's; use the directory of safetensors of the same model, with its tokenizer's file."
        )
    tokens = _read_texts(path, fields, "tokens")
    types = fields.get("token_type", np.full(len(tokens), _NORMAL))
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise UserError(f"{path}: tokenizer.ggml.token_type has no type for each of the {len(tokens):,} tokens.")
    if kind == "llama":
        return _parse_pieces(path, fields, tokens, types)
    name = fields.get("pre")
    pre = PRETOKENIZERS.get(_OTHER_NAMES.get(name, name) if isinstance(name, str) else "")
    if pre is None:
        raise UserError(
            f"{path}: tokenizer.ggml.pre {name!r} is not supported; use a file with one of "
            f"{', '.join((*PRETOKENIZERS, *_OTHER_NAMES))}, or the directory of safetensors of the same model."
        )
    merges = _read_texts(path, fields, "merges")
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
    normalizer = metadata.get(NORMALIZER_KEY, pre.normalizer or _NO_NORMALIZER)
    if normalizer not in (_NO_NORMALIZER, *NORMALIZERS):
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
        None if normalizer == _NO_NORMALIZER else normalizer,
        drop_default_ids(path, vocab, added),
        begin if has_begin else None,
        PUBLISHED_TABLES,
        _read_chat(path, metadata, fields, tokens, {text: ids[text] for text in (token.content for token in added)}),
    )
    try:
        return Tokenizer(*parts)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _parse_pieces(
    path: Path, fields: dict[str, Any], tokens: Sequence[str], types: npt.NDArray[Any]
) -> SentencePieceTokenizer:
    """Return the tokenizer of a SentencePiece model, a BPE with byte fallback. Types of tokens are those of pieces."""
    scores = fields.get("scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise UserError(f"{path}: tokenizer.ggml.scores has no score for each of the {len(tokens):,} tokens.")
    begin, end = (_token_text(path, fields, f"{name}_token_id", tokens) for name in ("bos", "eos"))
    model = SentencePieceModel(
        [*map(Piece, tokens, map(float, scores), map(int, types))],
        is_bpe=True,
        byte_fallback=True,
        begin=begin or "",
        end=end or "",
        adds_prefix=fields.get("add_space_prefix", True) is True,
        removes_spaces=fields.get("remove_extra_whitespaces", False) is True,
    )
    try:
        check_model(model)
    except ValueError as error:
        raise UserError(f"{path}: the tokenizer cannot be used: {error}. Use another file of the model.") from None
    return SentencePieceTokenizer(path, model)


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
    end_ids = stated | {token_id for text, token_id in added_ids.items() if text in ENDS}
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


def check_tokenizer(tokenizer: Tokenizer, num_ids: int) -> None:
    """Raise UserError if llama.cpp cannot encode as ``tokenizer`` does, or if its model, of ``num_ids``, is another.

    It lacks most patterns, flags of added tokens, and all normalizers. NFC is let pass with a warning: most text is in
    NFC already.
    """
    if tokenizer.size > num_ids:
        raise UserError(
            f"The tokenizer has {tokenizer.size:,} ids, the model {num_ids:,}; they do not belong together."
        )
    names: dict[Pattern, str] = {pattern: name for name, pattern in PATTERNS.items()}
    supported = {names[pattern]: None for pattern, _ in _PRE_NAMES if pattern in names}
    names |= {pattern: f"{name} with superwords" for pattern, name in SEGMENT_PATTERN_NAMES.items()}
    if (tokenizer.pattern, False) not in _PRE_NAMES:
        raise UserError(
            f"tokenizer.pattern {names.get(tokenizer.pattern, tokenizer.pattern)!r} cannot be exported to GGUF: "
            f"llama.cpp has only {', '.join(supported)} of the patterns, and SmolLM's, single digits before gpt2."
        )
    is_other_form = tokenizer.normalizer not in (None, "NFC")
    flags = [
        f"the flag {name} of {token.content!r}"
        for token in tokenizer.added_tokens
        for name in _CONTEXT_FLAGS
        if getattr(token, name)
    ]
    lacking = [
        *(["ignore_merges"] if (tokenizer.pattern, tokenizer.ignore_merges) not in _PRE_NAMES else []),
        *([f"the normalizer {tokenizer.normalizer}"] if is_other_form else []),
        *flags,
    ]
    if lacking:
        raise UserError(
            f"A tokenizer with {lacking[0]} cannot be exported to GGUF; export a directory for transformers."
        )
    # Without them llama.cpp takes id 11 for the end of a text, and refuses the file, in this order.
    if not tokenizer.special_ids:
        raise UserError("GGUF requires a special token that ends a text, and the tokenizer has no such token.")
    if not tokenizer.merges:
        raise UserError("GGUF requires merges, and the tokenizer has no merges.")
    if tokenizer.normalizer:
        log.warning(
            "The tokenizer normalizes text to %s, and llama.cpp does not: text in another form gets other ids there.",
            tokenizer.normalizer,
        )


def add_tokenizer_metadata(writer: "GGUFWriter", tokenizer: Tokenizer, num_ids: int) -> None:
    """Add tokens, merges, special tokens and chat templates. Ids below ``num_ids`` that no token has are marked as
    unused."""
    texts = {token_id: text for text, token_id in format_vocab(tokenizer.vocab, tokenizer.added_ids).items()}
    types = dict.fromkeys(texts, _NORMAL) | dict.fromkeys(tokenizer.added_ids.values(), _USER_DEFINED)
    types |= dict.fromkeys(tokenizer.special_ids.values(), _CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRE_NAMES[tokenizer.pattern, tokenizer.ignore_merges])
    writer.add_string(NORMALIZER_KEY, tokenizer.normalizer or _NO_NORMALIZER)  # the library leaves out empty texts
    writer.add_token_list([texts.get(token_id, f"[PAD{token_id}]") for token_id in range(num_ids)])
    writer.add_token_types([types.get(token_id, _UNUSED) for token_id in range(num_ids)])
    writer.add_token_merges([f"{bytes_to_unicode(left)} {bytes_to_unicode(right)}" for left, right in tokenizer.merges])
    template, chat = find_template(tokenizer), tokenizer.chat or ChatSettings()
    ends = _list_ends(tokenizer)
    begin = chat.tokens.get("bos_token") or find_text_ends(tokenizer)[0] or ""
    writer.add_bos_token_id(tokenizer.added_ids.get(begin, ends[0]))
    # Dialogs in the template of this project are trained without it.
    writer.add_add_bos_token(tokenizer.begin_token is not None and not (template and template.is_own))
    writer.add_add_eos_token(False)
    for name, add in (("pad_token", writer.add_pad_token_id), ("unk_token", writer.add_unk_token_id)):
        if (text := chat.tokens.get(name)) in tokenizer.added_ids:
            add(tokenizer.added_ids[text or ""])
    if template:
        sources = template.sources
        named = [{"name": name, "template": source} for name, source in sources.items()]
        writer.add_chat_template(named if len(named) > 1 else sources["default"])
        ends.insert(1, ends[0])  # the end of an answer
    adds = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for end_id, add in zip(ends, adds, strict=False):
        add(end_id)
    if lost := [texts[end_id] for end_id in ends[len(adds) :] if texts[end_id] not in ENDS]:
        log.warning("GGUF has no place for another token that ends a generation; llama.cpp goes on after %s.", lost[0])


def _list_ends(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end a generation: first that of an answer or a text, last those that llama.cpp knows by their
    text."""
    template, chat = find_template(tokenizer), tokenizer.chat or ChatSettings()
    _, end = find_text_ends(tokenizer)
    first = END_TOKEN if template and template.is_own else chat.tokens.get("eos_token", end)
    ends = [tokenizer.added_ids[first]] if first in tokenizer.added_ids else []
    known = {token_id for text, token_id in tokenizer.added_ids.items() if text in ENDS}
    ends += sorted(chat.end_ids, key=lambda end_id: end_id in known)
    return [*dict.fromkeys(ends)] or [min(tokenizer.special_ids.values())]
