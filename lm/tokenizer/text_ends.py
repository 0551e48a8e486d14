"""The special tokens that begin and end a text, known by their names."""

from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import Tokenizer

BEGIN_AND_END = (
    (END_OF_TEXT, END_OF_TEXT),  # this project's and GPT-2's
    ("<s>", "</s>"),  # Llama 2's
    ("<|begin_of_text|>", "<|end_of_text|>"),  # Llama 3's
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),  # DeepSeek's
)


def find_text_ends(tokenizer: Tokenizer) -> tuple[str | None, str | None]:
    """Return the special tokens that begin and end a text, each None if it is not known.

    Those of one model are preferred that begin with the tokenizer's ``begin_token``.
    """
    begin_token = tokenizer.begin_token
    pairs = [pair for pair in BEGIN_AND_END if {*pair} <= tokenizer.special_ids.keys()]
    begin, end = min(pairs, key=lambda pair: pair[0] != begin_token, default=(None, None))
    return begin_token or begin, end
