"""Instructions and responses as one stream of tokens, cut into sequences of one length (CS336 assignment 5, supplement
on instruction tuning). A sequence may begin and end within a document, and attention crosses documents;
:mod:`lm.data.packing` keeps examples whole and apart.
"""

import logging
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lm.common.errors import UserError
from lm.posttrain.tokenization import AnyTokenizer, encode_document
from lm.text.rows import DamagedRows, Row, read_rows

log = logging.getLogger(__name__)

# Source: Taori et al. 2023 (Alpaca). The format must match exactly, because published models were trained with it.
ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


class PackedSFTDataset(Dataset[dict[str, Tensor]]):
    """Sequences of ``seq_length`` tokens from the documents of a file, without overlap.

    Each item has ``input_ids`` and ``labels``, int64 (seq_length,); the labels are the inputs shifted by one token. The
    file, JSON Lines or Parquet, has a ``prompt`` and a ``response`` in each row. A document is both in the format of
    Alpaca, with the tokens that the tokenizer puts around a text, and ends with its end-of-text token. The tokens after
    the last whole sequence are left out. ``shuffle`` puts the documents in an order that torch's seed decides. Damaged
    rows are skipped with a warning.

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
