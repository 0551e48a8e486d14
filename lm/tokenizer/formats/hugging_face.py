"""Hugging Face's tokenizer.json."""

import logging
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from lm.common.errors import UserError
from lm.common.json_files import read_json
from lm.text.patterns import DEEPSEEK_SPLITS, REGEX_PATTERNS
from lm.text.pretokenize import GPT2_PATTERN, compile_pattern
from lm.tokenizer.formats.gpt2 import bytes_to_unicode, format_vocab, parse_merges, parse_vocab
from lm.tokenizer.formats.tiktoken import check_all_bytes

log = logging.getLogger(__name__)

_AROUND_TEXT = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")  # post-processors that add tokens

_DEEPSEEK_STEPS = [
    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    for pattern in DEEPSEEK_SPLITS
]


def make_tokenizer_json(
    vocab: dict[int, bytes], merges: Iterable[tuple[bytes, bytes]], special_tokens: Iterable[str], pattern: str
) -> dict[str, Any]:
    """Return the content of a tokenizer.json that encodes to the same ids.

    Raises UserError if a special token has the same text as another token.
    """
    ids = {token: token_id for token_id, token in vocab.items()}
    specials = list(special_tokens)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    pre_tokenizer: dict[str, Any] = {**byte_level, "use_regex": True}
    if pattern != GPT2_PATTERN:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[token.encode()], "content": token, **flags, "special": True} for token in specials],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": format_vocab(vocab, specials),
            "merges": [[bytes_to_unicode(left), bytes_to_unicode(right)] for left, right in merges],
        },
    }


def read_tokenizer_json(path: Path) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]], list[str], str]:
    """Read (vocab, merges, special_tokens, pattern) from the tokenizer.json of a byte-level BPE.

    All added tokens become special tokens, even those not marked as special, because both are split off before
    pretokenization. Post-processors that add tokens, truncation and padding are ignored with a warning. Raises
    UserError for a malformed file and for features that would change the ids of a text.
    """
    content = read_json(path)
    try:
        if feature := next(_find_unsupported_features(path, content), None):
            raise UserError(f"{path}: {feature} is not supported; use a tokenizer of byte-level BPE without it.")
        model, added_tokens = content["model"], content.get("added_tokens") or []
        token_ids = {**model["vocab"]}
        for token in added_tokens:
            if token_ids.setdefault(token["content"], token["id"]) != token["id"]:
                raise UserError(f"{path}: the added token {token['content']!r} has another id in the vocabulary.")
        specials = [token["content"] for token in added_tokens]
        vocab = parse_vocab(path, token_ids, set(specials))
        lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        merges = parse_merges(f"{path}, merge", lines)
        pattern = _find_pattern(content)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a Hugging Face tokenizer.json of BPE: {error!r}.") from None
    try:
        compile_pattern(pattern)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    check_all_bytes(path, vocab)
    ids = {token: token_id for token_id, token in vocab.items()}
    if duplicates := [token for token_id, token in vocab.items() if ids[token] != token_id]:
        raise UserError(f"{path}: {duplicates[0]!r} has two ids, which is not supported; remove the added token.")
    return vocab, merges, specials, pattern


def _find_unsupported_features(path: Path, content: dict[str, Any]) -> Iterator[str]:
    """Yield the features of a tokenizer.json that would change the ids; warn of the features that are ignored."""
    model, added_tokens = content["model"], content.get("added_tokens") or []
    if (model_type := model.get("type", "BPE")) != "BPE":  # GPT-2's own file is older than this field
        yield f"the model type {model_type!r}"
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"):
        if model.get(name):
            yield f"{name} {model[name]!r}"
    for step in _list_steps(content, "normalizer"):
        yield f"the normalizer {step['type']!r}"
    if any(step.get("add_prefix_space") for step in _list_steps(content, "pre_tokenizer")):
        yield "add_prefix_space in the pre_tokenizer"
    if not _find_pattern(content):
        yield f"the pre_tokenizer {content.get('pre_tokenizer')}"
    for token, name in product(added_tokens, ("lstrip", "rstrip", "single_word")):
        if token.get(name):
            yield f"{name} of the added token {token['content']!r}"
    # Hugging Face searches for normalized tokens after all others, our tokenizer for all at once: an overlap matters.
    normalized = [token["content"] for token in added_tokens if token.get("normalized")]
    others = [token["content"] for token in added_tokens if not token.get("normalized")]
    for token, other in product(normalized, others):
        if other in token or any(other.startswith(token[i:]) for i in range(1, len(token))):
            yield f"the added token {token!r}, normalized and overlapping {other!r},"
    for step in _list_steps(content, "post_processor"):
        if step["type"] in _AROUND_TEXT:
            log.warning("%s: the tokens that %s adds around a text are ignored.", path, step["type"])
        elif step["type"] != "ByteLevel":  # ByteLevel changes only offsets
            yield f"the post_processor {step['type']!r}"
    for name in ("truncation", "padding"):
        if content.get(name):
            log.warning("%s: %s is ignored.", path, name)


def _list_steps(content: dict[str, Any], component: str) -> list[dict[str, Any]]:
    """Return the steps of a component of a tokenizer.json: the parts of a Sequence, the component itself, or none."""
    step = content.get(component) or {"type": "Sequence"}
    parts = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}[component]
    return step.get(parts, []) if step["type"] == "Sequence" else [step]


def _find_pattern(content: dict[str, Any]) -> str:
    """Return the pretoken pattern of a tokenizer.json, or an empty string if its pre_tokenizer is not supported."""
    match _list_steps(content, "pre_tokenizer"):
        case [{"type": "ByteLevel", **options}] if options.get("use_regex", True):
            return GPT2_PATTERN
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "use_regex": False},
        ]:
            return pattern
        case [*splits, {"type": "ByteLevel", "use_regex": False}] if splits == _DEEPSEEK_STEPS:
            return REGEX_PATTERNS["deepseek"]
    return ""
