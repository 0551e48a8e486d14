"""Token shards: little-endian uint16 or uint32 files of token ids, read as one long sequence.

Beside each shard ``documents.npy`` holds the place where each document ends. Source: CS336 assignment 1 (section 2.7).
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, count
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lm.chunks import Range, in_file, open_stretch, stretches
from lm.errors import NotUtf8, UserError
from lm.tokenizer import Tokenizer, token_dtype


def write_shard(
    texts: Iterable[tuple[Iterable[bytes], bool]], tokenizer: Tokenizer, separator: str, directory: Path
) -> tuple[int, int]:
    """Encode texts, each (blocks of UTF-8, whether its file ends with it), into one shard; returns its (tokens,
    documents).

    A file whose last document lacks the separator gets it, so that its end is not joined to the next file's start;
    white space after the last separator is no document. Writes ``tokens.bin`` and ``documents.npy`` (int64: the
    positions after the separators) to ``directory``. Memory does not grow with the texts, but for those positions.
    """
    end_of_text = tokenizer.special_ids.get(separator)
    if end_of_text is None:
        raise UserError(f"The separator {separator!r} is not a special token of the tokenizer; add it to them.")
    blank = [token_id for token_id, token in tokenizer.vocab.items() if token.isspace()]
    dtype = token_dtype(tokenizer.size)
    ends: list[npt.NDArray[np.int64]] = []
    written = 0
    with (directory / "tokens.bin").open("wb") as file:
        for blocks, is_last in texts:
            is_open = False  # whether a document has begun and not ended
            for ids in tokenizer.encode_blocks(blocks):
                file.write(ids.data)
                found = np.flatnonzero(ids == end_of_text)
                ends.append(found + written + 1)
                written += len(ids)
                rest = ids[found[-1] + 1 :] if len(found) else ids
                is_open = (is_open and not len(found)) or not np.isin(rest, blank).all()
            if is_last and is_open:
                file.write(np.array([end_of_text], dtype=dtype).tobytes())
                written += 1
                ends.append(np.array([written]))
    document_ends = np.concatenate(ends) if ends else np.empty(0, np.int64)
    np.save(directory / "documents.npy", document_ends.astype(np.int64))
    return written, len(document_ends)


def encode_files(
    paths: Sequence[str | Path], tokenizer: Tokenizer, directory: Path, threads: int | None = None
) -> list[Path]:
    """Encode text files, plain or compressed, to files of ids in ``directory``, on all cores or as many ``threads``.

    Returns the files in the order of the text; joined, they are its ids, of the type that :func:`token_dtype` tells.
    """
    directory.mkdir(parents=True, exist_ok=True)

    def encode(number: int, stretch: tuple[str, Range | None]) -> Path:
        target = directory / f"{number:05}.bin"
        try:
            with open_stretch(*stretch) as blocks, target.open("wb") as file:
                for ids in tokenizer.encode_blocks(blocks):
                    file.write(ids.data)
        except NotUtf8 as error:
            raise in_file(error, *stretch) from None
        return target

    found = stretches(paths, tokenizer.special_tokens, tokenizer.pattern)
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        return list(pool.map(encode, count(), found))  # which gives up the rest where one fails


class TokenShards:
    """Shards read as one sequence of ids, memory-mapped: ``len`` and slices, as of a one-dimensional array."""

    def __init__(self, paths: Sequence[Path], vocab_size: int) -> None:
        """Map the ``tokens.bin`` files; raises UserError for a file that is missing or not whole tokens."""
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self._shards: list[npt.NDArray[np.unsignedinteger]] = []
        for path in paths:
            try:
                size = path.stat().st_size
            except OSError as error:
                raise UserError(f"The token shard {path} cannot be read: {error.strerror}.") from None
            if size % self.dtype.itemsize:
                raise UserError(
                    f"The token shard {path} has {size:,} bytes, not a whole number of {self.dtype.name} tokens; "
                    "encode it again."
                )
            if size:
                self._shards.append(np.memmap(path, dtype=self.dtype, mode="r"))
        self._starts = [0, *accumulate(len(shard) for shard in self._shards)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, part: slice) -> npt.NDArray[np.unsignedinteger]:
        """The ids of a slice with step 1, across shards; ids past ``vocab_size`` raise UserError."""
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of token shards has step 1, not {step}")
        pieces = []
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            first = self._starts[number]
            pieces.append(self._shards[number][start - first : stop - first])
            start += len(pieces[-1])
            number += 1
        ids = np.concatenate(pieces) if pieces else np.empty(0, self.dtype)
        if len(ids) and int(ids.max()) >= self.vocab_size:
            raise UserError(
                f"The token shards hold id {ids.max()}, past the vocabulary of {self.vocab_size:,}; "
                "they were made with another tokenizer."
            )
        return ids
