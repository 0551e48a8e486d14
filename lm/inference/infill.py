"""Fill in the middle: the prompt for the text between a prefix and a suffix.

Models of code are trained on it, with a token before each part: prefix, suffix, middle. Source: Bavarian et al. 2022.
"""

import re
from collections.abc import Mapping, Sequence

from lm.common.errors import UserError
from lm.inference.completion import encode_text
from lm.tokenizer.text_tokenizer import TextTokenizer
from lm.tokenizer.tokenizer import Tokenizer

_MARKS = (  # before the prefix, the suffix and the middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
# Tokens that follow a middle in the training data. Some tokenizers, such as Qwen's, do not call them special.
_END = re.compile(r"fim|file_?sep|repo_?name|code_(prefix|suffix|middle)|▁<(PRE|SUF|MID|EOT)>")


def encode_infill(
    tokenizer: TextTokenizer,
    prefix: str | Sequence[int],
    suffix: str,
    *,
    has_begin: bool = True,
    parses_special: bool = False,
) -> list[int]:
    """Return the ids of the prompt whose continuation is the text between ``prefix``, a text or ids, and ``suffix``.

    ``has_begin`` and ``parses_special`` are those of :func:`lm.inference.completion.encode_prompt`. Raises UserError if
    the tokenizer has no tokens for it.
    """
    added = _added_ids(tokenizer)
    marks = next((marks for marks in _MARKS if all(mark in added for mark in marks)), None)
    if marks is None:
        raise UserError("The model has no tokens to fill in the middle, such as <|fim_prefix|>; leave it out.")
    before, between, after = (added[mark] for mark in marks)
    begin = [tokenizer.special_ids[tokenizer.begin_token]] if tokenizer.begin_token and has_begin else []
    prefix_ids = encode_text(tokenizer, prefix, parses_special) if isinstance(prefix, str) else prefix
    return [*begin, before, *prefix_ids, between, *encode_text(tokenizer, suffix, parses_special), after]


def find_infill_ends(tokenizer: TextTokenizer) -> frozenset[int]:
    """Return the ids that end the text in the middle: those of all special tokens, and of the tokens of such prompts.

    A model that was not trained to end a middle with its end token writes one of these instead.
    """
    names = [name for name in _added_ids(tokenizer) if _END.search(name)]
    return frozenset([*tokenizer.special_ids.values(), *map(_added_ids(tokenizer).__getitem__, names)])


def _added_ids(tokenizer: TextTokenizer) -> Mapping[str, int]:
    return tokenizer.added_ids if isinstance(tokenizer, Tokenizer) else tokenizer.special_ids
