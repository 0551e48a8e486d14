"""Hugging Face's tokenizer.json."""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import regex

from lm.common.errors import UserError
from lm.files.json import read_json
from lm.text.character_tables import PUBLISHED_TABLES
from lm.text.normalize import NORMALIZERS
from lm.text.patterns import DEEPSEEK_SPLITS, PATTERNS, SEGMENT_PATTERNS
from lm.text.pretokenize import GPT2_PATTERN, JIEBA, Pattern, compile_pattern
from lm.tokenizer.added_tokens import AddedToken, list_added_tokens, number_tokens
from lm.tokenizer.formats.oniguruma import from_oniguruma, to_oniguruma
from lm.tokenizer.formats.tiktoken import check_all_bytes
from lm.tokenizer.formats.tokenizer_config import FLAGS, TokenizerParts, parse_added_token
from lm.tokenizer.formats.vocab_merges import bytes_to_unicode, format_vocab, parse_merges, parse_vocab

log = logging.getLogger(__name__)

_AROUND_TEXT = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")  # post-processors that add tokens
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_PUNCTUATION = r"[\p{P}$+<=>^`|~]"  # of Unicode and of ASCII
# A pattern that is several in Hugging Face's library. The tokenizer makes one pattern of them again.
_SPLITS: dict[Pattern, tuple[str, ...]] = {PATTERNS["deepseek"]: DEEPSEEK_SPLITS}
_KNOWN = {to_oniguruma(pattern): pattern for pattern in (*PATTERNS.values(), *SEGMENT_PATTERNS.values())}


def write_tokenizer_json(path: Path, parts: TokenizerParts) -> None:
    """Write a tokenizer.json that encodes to the same ids.

    Raises UserError if an added token has the same text as another token, or if the pattern is jieba.
    """
    path.write_text(json.dumps(make_tokenizer_json(parts), ensure_ascii=False), encoding="utf-8")


def make_tokenizer_json(parts: TokenizerParts) -> dict[str, Any]:
    """Return the content of a tokenizer.json; see :func:`write_tokenizer_json`."""
    tokens = list_added_tokens(parts.special_tokens, parts.added_tokens)
    _, added_ids = number_tokens(parts.vocab, tokens)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": added_ids[token.content], "content": token.content, **{flag: getattr(token, flag) for flag in FLAGS}}
            for token in tokens
        ],
        "normalizer": {"type": parts.normalizer} if parts.normalizer else None,
        "pre_tokenizer": format_pre_tokenizer(parts.pattern),
        "post_processor": _format_begin(parts.begin_token, added_ids) if parts.begin_token else None,
        "decoder": {**_BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
            "ignore_merges": parts.ignore_merges,
            "vocab": format_vocab(parts.vocab, added_ids),
            "merges": [[bytes_to_unicode(left), bytes_to_unicode(right)] for left, right in parts.merges],
        },
    }


def read_tokenizer_json(path: Path, ignored: list[str]) -> TokenizerParts:
    """Read the tokenizer.json of a byte-level BPE.

    A special token that a post-processor puts before each text is the ``begin_token``. Other tokens that it adds,
    truncation and padding are ignored, and named in ``ignored``. Raises UserError for a malformed file and, by name,
    for features that would change the ids of a text.
    """
    content = read_json(path)
    try:
        if feature := next(_find_unsupported_features(content, ignored), None):
            raise UserError(f"{path}: {feature} is not supported; use a tokenizer of byte-level BPE without it.")
        model = content["model"]
        added = [parse_added_token(token) for token in content.get("added_tokens") or []]
        token_ids = {**model["vocab"]}
        for token in added:
            if (token_id := token_ids.setdefault(token.content, len(token_ids))) != token.id:
                if token.content in model["vocab"]:
                    raise UserError(f"{path}: the added token {token.content!r} has another id in the vocabulary.")
                raise UserError(
                    f"{path}: the added token {token.content!r} has the id {token.id}, but Hugging Face gives it "
                    f"{token_id}, the next after the vocabulary. Put it into the vocabulary with its id."
                )
        vocab = parse_vocab(path, token_ids, {token.content for token in added})
        lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        merges = drop_repeated(parse_merges(f"{path}, merge", lines))
        normalizers = [step["type"] for step in _list_steps(content, "normalizer")]
        pattern = _parse_pattern(path, content)
        begin = _find_begin_token(content, [token.content for token in added if token.special], ignored)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a Hugging Face tokenizer.json of BPE: {error!r}.") from None
    check_all_bytes(path, vocab)
    ignore_merges = bool(model.get("ignore_merges"))
    if ignore_merges:  # a pretoken would have the bytes of such a token, but never its text in the byte alphabet
        contents = {token.content for token in added}
        for text, token_id in model["vocab"].items():
            if text not in contents and bytes_to_unicode(vocab[token_id]) != text:
                raise UserError(
                    f"{path}: ignore_merges with the token {text!r}, which is not of bytes, is not supported."
                )
    normalizer = normalizers[0] if normalizers else None
    specials = [token.content for token in added if token.special]
    flagged = drop_default_ids(path, vocab, added)
    options = pattern, ignore_merges, normalizer, flagged, begin, PUBLISHED_TABLES
    return TokenizerParts(vocab, merges, specials, *options)


def _parse_pattern(path: Path, content: dict[str, Any]) -> Pattern:
    try:
        return parse_pre_tokenizer(_list_steps(content, "pre_tokenizer"))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def drop_repeated(merges: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the merges without those that come again later: Hugging Face uses the last."""
    if len(set(merges)) == len(merges):
        return merges
    return list(dict.fromkeys(reversed(merges)))[::-1]


def drop_default_ids(path: Path, vocab: dict[int, bytes], added: list[AddedToken]) -> list[AddedToken]:
    """Return the added tokens that are more than a special token's text, with an id only if another token has the same
    bytes. Raises UserError if two tokens that are not added have the same bytes."""
    added_ids = {token.id for token in added}
    ids = {token: token_id for token_id, token in vocab.items() if token_id not in added_ids}
    if len(ids) + len(added_ids) < len(vocab):
        [duplicate, *_] = [t for i, t in vocab.items() if i not in added_ids and ids[t] != i]
        raise UserError(f"{path}: {duplicate!r} has two ids; that is not supported.")
    tokens = [token if token.content.encode() in ids else replace(token, id=None) for token in added]
    return [token for token in tokens if token != AddedToken(token.content)]


def warn_of_ignored(path: Path, ignored: list[str]) -> None:
    """Log what :func:`read_tokenizer_json` ignored."""
    for feature in ignored:
        log.warning("%s: %s ignored.", path, feature)


def _find_unsupported_features(content: dict[str, Any], ignored: list[str]) -> Iterator[str]:
    """Yield the features of a tokenizer.json that would change the ids; add those that are ignored to ``ignored``."""
    model = content["model"]
    if (model_type := model.get("type", "BPE")) != "BPE":  # GPT-2's own file is older than this field
        yield f"the model type {model_type!r}"
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            yield f"{name} {model[name]!r}"
    normalizers = [step["type"] for step in _list_steps(content, "normalizer")]
    if unknown := [name for name in normalizers if name not in NORMALIZERS]:
        yield f"the normalizer {unknown[0]!r}"
    if len(normalizers) > 1:
        yield f"the sequence of the normalizers {', '.join(normalizers)}"
    for token in content.get("added_tokens") or []:
        if model.get("ignore_merges") and token.get("single_word"):  # a rejected word may be a whole pretoken
            yield f"ignore_merges with the single_word token {token['content']!r}"
    for step in _list_steps(content, "post_processor"):
        if step["type"] not in (*_AROUND_TEXT, "ByteLevel"):  # ByteLevel changes only offsets
            yield f"the post_processor {step['type']!r}"
    for name in ("truncation", "padding"):
        if content.get(name):
            ignored.append(f"{name} is")


def _find_begin_token(content: dict[str, Any], special_tokens: list[str], ignored: list[str]) -> str | None:
    """Return the special token that the post-processors put before each text; add other tokens to ``ignored``."""
    begin = None
    for step in _list_steps(content, "post_processor"):
        if step["type"] == "TemplateProcessing":
            pieces = [next(iter(piece.items())) for piece in step["single"]]
            middle = [kind for kind, _ in pieces].index("Sequence")
            before, after = ([about["id"] for _, about in part] for part in (pieces[:middle], pieces[middle + 1 :]))
        elif step["type"] in _AROUND_TEXT:
            before, after = [step["cls"][0]], [step["sep"][0]]
        else:
            continue
        if len(before) == 1 and before[0] in special_tokens and begin is None:
            [begin] = before
            before = []
        ignored += [f"{token!r}, which {step['type']} adds to each text, is" for token in before + after]
    return begin


def _format_begin(token: str, added_ids: dict[str, int]) -> dict[str, Any]:
    """Return the post-processor that puts ``token`` before each text."""

    def parts(text: str, type_id: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": token, "type_id": type_id}}, {"Sequence": {"id": text, "type_id": type_id}}]

    return {
        "type": "TemplateProcessing",
        "single": parts("A", 0),
        "pair": parts("A", 0) + parts("B", 1),
        "special_tokens": {token: {"id": token, "ids": [added_ids[token]], "tokens": [token]}},
    }


def _list_steps(content: dict[str, Any], component: str) -> list[dict[str, Any]]:
    """Return the steps of a component of a tokenizer.json: the parts of a Sequence, the component itself, or none."""
    step = content.get(component) or {"type": "Sequence"}
    parts = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}[component]
    return step.get(parts, []) if step["type"] == "Sequence" else [step]


def format_pre_tokenizer(pattern: Pattern) -> dict[str, Any]:
    """Return the pre_tokenizer that splits like ``pattern``. Raises UserError if it is jieba."""
    texts = _SPLITS.get(pattern) or ((pattern,) if isinstance(pattern, str) else pattern)
    if JIEBA in texts:
        raise UserError("tokenizer.pattern jieba cannot be exported: Hugging Face's tokenizer.json cannot express it.")
    if pattern == GPT2_PATTERN:
        return {**_BYTE_LEVEL, "use_regex": True}
    splits = [
        {"type": "Split", "pattern": {"Regex": to_oniguruma(text)}, "behavior": "Isolated", "invert": False}
        for text in texts
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, {**_BYTE_LEVEL, "use_regex": False}]}


def parse_pre_tokenizer(steps: Iterable[dict[str, Any]]) -> Pattern:
    """Return the pattern that splits like the ``steps`` of a pre_tokenizer.

    Raises UserError, by name, for a step that is not supported, and if the last is not ByteLevel.
    """
    patterns: list[str] = []
    is_byte_level = False
    for step in steps:
        if is_byte_level:
            raise _not_supported(f"the pre_tokenizer {step['type']!r} after ByteLevel")
        if step.get("add_prefix_space"):
            raise _not_supported("add_prefix_space in the pre_tokenizer")
        is_byte_level = step["type"] == "ByteLevel"
        patterns += _find_patterns(step)
    if not is_byte_level:
        raise _not_supported("a pre_tokenizer without ByteLevel")
    for pattern in patterns:
        compile_pattern(pattern)
    return tuple(patterns) if len(patterns) != 1 else patterns[0]


def _find_patterns(step: dict[str, Any]) -> list[str]:
    """Return the pattern of a step, or no pattern if it does not split."""
    match step:
        case {"type": "ByteLevel"}:
            return [GPT2_PATTERN] if step.get("use_regex", True) else []
        case {"type": "Digits"}:
            return [r"\p{N}" if step.get("individual_digits") else r"\p{N}+"]
        case {"type": "Punctuation"} if (behavior := step.get("behavior", "Isolated")) in ("Isolated", "Contiguous"):
            return [_PUNCTUATION if behavior == "Isolated" else f"{_PUNCTUATION}+"]
        case {"type": "Split", "pattern": {"String": str(text)}, "behavior": "Isolated"}:
            return [_group_word(regex.escape(text))]
        case {"type": "Split", "pattern": {"Regex": str(text)}, "behavior": "Isolated"}:
            return [_KNOWN[text] if text in _KNOWN else _group_word(from_oniguruma(text))]
        # All that does not match is removed. The known patterns match any text, so that nothing is.
        case {"type": "Split", "pattern": {"Regex": str(text)}, "behavior": "Removed", "invert": True}:
            if text in _KNOWN:
                return [_KNOWN[text]]
    raise _not_supported(f"the pre_tokenizer {step}")


def _group_word(pattern: str) -> str:
    """Return a pattern that is not taken for the name of a pattern."""
    return f"(?:{pattern})" if regex.fullmatch(r"[\w-]+", pattern) else pattern


def _not_supported(feature: str) -> UserError:
    return UserError(f"{feature} is not supported; use a tokenizer of byte-level BPE without it.")
