"""Token ids, labels and masks of prompts with their responses (CS336 assignment 5, section 4.2)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AnyTokenizer = Union[Tokenizer, "PreTrainedTokenizerBase"]


def tokenize_prompt_and_output(
    prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer: AnyTokenizer
) -> dict[str, Tensor]:
    """Encode each prompt and each output on its own, concatenate the ids, and pad on the right.

    Returns three tensors (B, longest − 1), where longest is the largest number of ids of a prompt with its output:
    ``input_ids`` int64, the ids without the last; ``labels`` int64, the ids without the first; ``response_mask`` bool,
    True where the label is a token of the output. Special tokens in the strings are encoded as such; none is added.
    The output's first token has no label if the prompt is empty.

    Raises UserError if there are no strings, or not as many outputs as prompts.
    """
    if not prompt_strs or len(prompt_strs) != len(output_strs):
        raise UserError(
            f"There are {len(prompt_strs)} prompts and {len(output_strs)} outputs; give one output for each prompt."
        )
    prompts = [encode(tokenizer, text) for text in prompt_strs]
    outputs = [encode(tokenizer, text) for text in output_strs]
    longest = max(len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True))
    ids = torch.full((len(prompts), max(longest, 1)), pad_id(tokenizer))
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        end = len(prompt) + len(output)
        ids[row, :end] = torch.tensor(prompt + output, dtype=torch.int64)
        mask[row, len(prompt) : end] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}


def encode(tokenizer: AnyTokenizer, text: str) -> list[int]:
    """Return the ids of ``text``, without special tokens around it."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.encode(text)
    return list(tokenizer.encode(text, add_special_tokens=False))


def encode_document(tokenizer: AnyTokenizer, text: str) -> list[int]:
    """Return the ids of a document: those that the tokenizer puts before a text, the text's, the end-of-text id.

    Our tokenizer puts none before a text, and encodes special tokens in the text as plain text.
    """
    if isinstance(tokenizer, Tokenizer):
        return [*tokenizer.encode(text, allowed_special=()), end_of_text_id(tokenizer)]
    return [*tokenizer.encode(text), end_of_text_id(tokenizer)]


def end_of_text_id(tokenizer: AnyTokenizer) -> int:
    """Return the id that ends a document. Raises UserError if the tokenizer has none."""
    token_id: int | None = (
        tokenizer.special_ids.get(END_OF_TEXT) if isinstance(tokenizer, Tokenizer) else tokenizer.eos_token_id
    )
    if token_id is None:
        raise UserError(f"The tokenizer has no end-of-text token; add one, such as {END_OF_TEXT}.")
    return token_id


def pad_id(tokenizer: AnyTokenizer) -> int:
    """Return the id that fills short rows, which never counts: for padding, for the end of a text, or else 0."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.special_ids.get(END_OF_TEXT, 0)
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token_id for token_id in candidates if token_id is not None)
