"""Small tokenizer.json files with the options of well-known model families."""

import json
from typing import Any

from lm.text.patterns import PATTERNS
from lm.tokenizer.formats.tokenizer_json import make_tokenizer_json
from tests.helpers.tokenizers import make_tokenizer

GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^" + "\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[" + "\r\n" + r"]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _sequence(*steps: dict[str, Any], use_regex: bool = False) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [*steps, {**_BYTE_LEVEL, "use_regex": use_regex}]}


def _split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    invert = behavior == "Removed"
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def _token(content: str, **flags: bool) -> dict[str, Any]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": content, **{name: flags.get(name, name == "special") for name in names}}


_THINK = [_token("<think>", special=False), _token("</think>", special=False)]
_SPACES = [_token(" " * n, special=False, normalized=True) for n in range(24, 1, -1)]

# Pre-tokenizer, normalizer, added tokens and ignore_merges of each family.
_FAMILIES: dict[str, tuple[dict[str, Any], str | None, list[dict[str, Any]], bool]] = {
    "gpt2": (_BYTE_LEVEL, None, [_token("<|endoftext|>", normalized=True)], False),
    "gpt4": (_sequence(_split(PATTERNS["llama3"], "Removed")), None, [_token("<|endofprompt|>")], False),
    "gpt-oss": (_sequence(_split(GPT4O)), None, [_token("<|return|>"), _token("<|call|>")], True),
    "llama3": (_sequence(_split(PATTERNS["llama3"])), None, [_token("<|begin_of_text|>")], True),
    "qwen3": (_sequence(_split(PATTERNS["qwen2"])), "NFC", [_token("<|im_end|>"), *_THINK], False),
    "deepseek3": (
        _sequence(*map(_split, DEEPSEEK3)),
        None,
        [_token("<｜end▁of▁sentence｜>"), _token("<｜User｜>", special=False, normalized=True), *_THINK],
        False,
    ),
    "smollm": (
        _sequence({"type": "Digits", "individual_digits": True}, use_regex=True),
        None,
        [_token("<|im_start|>"), _token("<repo_name>")],
        False,
    ),
    "olmo": (_BYTE_LEVEL, "NFC", [_token("<|padding|>"), *_SPACES], False),
    "roberta": (_BYTE_LEVEL, None, [_token("<s>", normalized=True), _token("<mask>", lstrip=True)], False),
    "starcoder": (_sequence({"type": "Digits", "individual_digits": True}, use_regex=True), "NFKC", _THINK, False),
    "words": (_BYTE_LEVEL, "NFD", [_token("tea", single_word=True), _token("[r]", rstrip=True, special=False)], False),
}
FAMILIES = list(_FAMILIES)


def family_json(name: str) -> str:
    """Return the tokenizer.json of a family, with a small vocabulary that is trained here."""
    pre_tokenizer, normalizer, tokens, ignore_merges = _FAMILIES[name]
    trained = make_tokenizer(special_tokens=[], merges=300)
    content = make_tokenizer_json(trained.parts._replace(ignore_merges=ignore_merges))
    ids = range(trained.size, trained.size + len(tokens))
    content["added_tokens"] = [{"id": i, **token} for i, token in zip(ids, tokens, strict=True)]
    content["normalizer"] = {"type": normalizer} if normalizer else None
    content["pre_tokenizer"] = pre_tokenizer
    return json.dumps(content)
