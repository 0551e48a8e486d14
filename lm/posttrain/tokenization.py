"""Token ids of prompts with responses: labels and masks for a batch, and an instruction data set as one stream of ids.

Sources: CS336 assignment 5, section 4.2 (:func:`tokenize_prompt_and_output`) and its supplement on instruction tuning
(:class:`PackedSFTDataset`).
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Union

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lm.common.errors import UserError
from lm.text.pretokenize import END_OF_TEXT
from lm.text.rows import DamagedRows, Row, read_rows
from lm.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

AnyTokenizer = Union[Tokenizer, "PreTrainedTokenizerBase"]

# Source: Taori et al. 2023 (Alpaca). The format must match exactly, because published models were trained with it.
ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


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
    prompts, outputs = ([_encode(tokenizer, text) for text in texts] for texts in (prompt_strs, output_strs))
    ids, mask = pad_responses(list(zip(prompts, outputs, strict=True)), pad_id(tokenizer))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}


def pad_responses(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]], pad_id: int = 0, length: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the ids of each prompt with its response, (B, T) int64 padded on the right, and a mask of the responses.

    ``rows`` has the ids of a prompt and of its response in each. T is the largest number of ids, at least ``length``.
    """
    length = max(length, *(len(prompt) + len(response) for prompt, response in rows))
    ids_BT = torch.full((len(rows), length), pad_id)
    mask_BT = torch.zeros(ids_BT.shape, dtype=torch.bool)
    for row, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids_BT[row, :end] = torch.tensor([*prompt, *response], dtype=torch.int64)
        mask_BT[row, len(prompt) : end] = True
    return ids_BT, mask_BT


def _encode(tokenizer: AnyTokenizer, text: str) -> list[int]:
    """Return the ids of ``text``, without special tokens around it."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.encode(text)
    return list(tokenizer.encode(text, add_special_tokens=False))


def pad_id(tokenizer: AnyTokenizer) -> int:
    """Return the id that fills short rows, which never counts: for padding, for the end of a text, or else 0."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.special_ids.get(END_OF_TEXT, 0)
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token_id for token_id in candidates if token_id is not None)


def encode_document(tokenizer: AnyTokenizer, text: str) -> list[int]:
    """Return the ids of a document: those that the tokenizer puts before a text, the text's, the end-of-text id.

    Our tokenizer puts none before a text, and encodes special tokens in the text as plain text. Raises UserError if the
    tokenizer has no end-of-text token.
    """
    if isinstance(tokenizer, Tokenizer):
        ids, end_id = tokenizer.encode(text, allowed_special=()), tokenizer.special_ids.get(END_OF_TEXT)
    else:
        ids, end_id = tokenizer.encode(text), tokenizer.eos_token_id
    if end_id is None:
        raise UserError(f"The tokenizer has no end-of-text token; add one, such as {END_OF_TEXT}.")
    return [*ids, end_id]


class PackedSFTDataset(Dataset[dict[str, Tensor]]):
    """Sequences of ``seq_length`` tokens from the documents of a file, without overlap.

    A sequence may begin and end within a document, and attention crosses documents; :mod:`lm.data.packing` keeps
    examples whole and apart. Each item has ``input_ids`` and ``labels``, int64 (seq_length,); the labels are the inputs
    shifted by one token. The file, JSON Lines or Parquet, has a ``prompt`` and a ``response`` in each row. A document
    is both in the format of Alpaca, with the tokens that the tokenizer puts around a text, and ends with its
    end-of-text token. The tokens after the last whole sequence are left out. ``shuffle`` puts the documents in an order
    that torch's seed decides. Damaged rows are skipped with a warning.

    Raises UserError if the file cannot be read, all its rows are damaged, or it is shorter than a sequence.
    """

    def __init__(self, tokenizer: AnyTokenizer, dataset_path: str | Path, seq_length: int, shuffle: bool) -> None:
        if seq_length < 1:
            raise UserError(f"seq_length is {seq_length}; it must be at least 1.")
        damaged = DamagedRows()
        documents = list(read_rows(str(dataset_path), damaged, _parse_document))
        if damaged.count:
            log.warning("%s", damaged)
        order = torch.randperm(len(documents)).tolist() if shuffle else range(len(documents))
        ids = [token_id for index in order for token_id in encode_document(tokenizer, documents[index])]
        self.seq_length = seq_length
        self._ids = torch.tensor(ids, dtype=torch.int64)
        self._count = (len(ids) - 1) // seq_length
        if self._count < 1:
            raise UserError(
                f"{dataset_path} has {len(ids)} tokens, too few for a sequence of {seq_length} and its next token; "
                "give more examples or a smaller seq_length."
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = range(self._count)[index] * self.seq_length
        window = self._ids[start : start + self.seq_length + 1]
        return {"input_ids": window[:-1], "labels": window[1:]}


def iterate_batches(
    dataset: Dataset[dict[str, Tensor]], batch_size: int, shuffle: bool
) -> "DataLoader[dict[str, Tensor]]":
    """Return an iterable over one epoch of batches, each a dict of tensors (batch_size, …); the last may be smaller.

    ``shuffle`` draws a new order for each epoch.
    """
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def _parse_document(row: Row) -> str:
    match row:
        case {"prompt": str(prompt), "response": str(response)}:
            return ALPACA_PROMPT.format(instruction=prompt) + response
    raise ValueError("no texts named prompt and response")
