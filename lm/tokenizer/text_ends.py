"""The special tokens that begin and end a text, known by their names."""

from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import LLAMA3_BEGIN, Tokenizer

BEGIN_AND_END = (
    (END_OF_TEXT, END_OF_TEXT),  # this project's and GPT-2's
    ("<s>", "</s>"),  # Llama 2's
    (LLAMA3_BEGIN, "<|end_of_text|>"),  # Llama 3's
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),  # DeepSeek's
)


def find_text_ends(tokenizer: Tokenizer) -> tuple[str | None, str | None]:
    """Return the special tokens that begin and end a text, each None if it is not known.

    A tokenizer with a ``begin_token`` has the end that belongs to it, or else the end-of-text token.
    """
    begin, specials = tokenizer.begin_token, tokenizer.special_ids
    pairs = [pair for pair in BEGIN_AND_END if {*pair} <= specials.keys() and begin in (None, pair[0])]
    if pairs:
        return pairs[0]
    return begin, END_OF_TEXT if END_OF_TEXT in specials else None
