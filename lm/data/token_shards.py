"""Token shards: directories of ``tokens.bin`` (little-endian uint16 or uint32 ids) and ``documents.npy`` (their ends).

Source: CS336 assignment 1 (section 2.7).
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from io import FileIO
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lm.common.errors import UserError
from lm.files.urls import file_sizes, read_range
from lm.tokenizer.tokenizer import Tokenizer, token_dtype

_MAX_OPEN_FILES = 64

_BYTES_OF_SPACES = frozenset("".join(filter(str.isspace, map(chr, range(0x3001)))).encode())  # of str.isspace


def write_shard(
    texts: Iterable[tuple[Iterable[bytes], bool, str]], tokenizer: Tokenizer, separator: str, directory: Path
) -> tuple[int, int]:
    """Encode ``texts`` into a shard; return (tokens, documents).

    A text is (blocks of UTF-8, whether its file ends here, the only special token in it or "" for all).
    Writes ``tokens.bin`` and ``documents.npy`` (int64 positions after the separators) to ``directory``. If the last
    document of a file lacks the separator, it is added. White space after the last separator is no document. Memory
    grows only with the number of documents. Raises UserError if the tokenizer lacks the separator.
    """
    separator_id = tokenizer.special_ids.get(separator)
    if separator_id is None:
        raise UserError(f"The separator {separator!r} is not a special token of the tokenizer; add it to them.")

    def is_blank(ids: npt.NDArray[np.unsignedinteger]) -> bool:
        # The first token decides almost always, so a table of the whole vocabulary would cost more.
        may_be = all(_BYTES_OF_SPACES.issuperset(tokenizer.vocab[int(token_id)]) for token_id in ids)
        return may_be and not tokenizer.decode(ids.tolist()).strip()

    dtype = token_dtype(tokenizer.size)
    ends: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    written = 0
    with (directory / "tokens.bin").open("wb") as file:
        for blocks, is_last, only in texts:
            in_document = False
            for ids in tokenizer.encode_blocks(blocks, [only] if only else "all"):
                file.write(ids.data)
                separators = np.flatnonzero(ids == separator_id)
                ends.append(separators + written + 1)
                written += len(ids)
                tail = ids[separators[-1] + 1 :] if len(separators) else ids
                in_document = (in_document and not len(separators)) or not is_blank(tail)
            if is_last and in_document:
                file.write(np.array([separator_id], dtype).tobytes())
                written += 1
                ends.append(np.array([written]))
    document_ends = np.concatenate(ends).astype(np.int64)
    np.save(directory / "documents.npy", document_ends)
    return written, len(document_ends)


class TokenShards:
    """Token shards as one sequence, with ``len`` and slicing. Thread-safe; keeps at most 64 files open.

    Slices of a shard that is a URL are read by range requests.
    """

    @property
    def is_remote(self) -> bool:
        """Whether a slice may need a request over the network."""
        return any("://" in path for path in self._paths)

    def __init__(self, paths: Sequence[str | Path], vocab_size: int) -> None:
        """Read the sizes of ``tokens.bin`` files, each a local path or a URL. Raises UserError for a missing file or an
        incomplete token."""
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self._paths: list[str] = []  # without empty shards
        sizes = []
        urls = [path for path in map(str, paths) if "://" in path]
        remote_sizes = dict(zip(urls, file_sizes(urls), strict=True))
        for path in map(str, paths):
            try:
                size = remote_sizes[path] if "://" in path else Path(path).stat().st_size
            except OSError as error:
                raise _unreadable(path, error) from None
            if size % self.dtype.itemsize:
                raise UserError(
                    f"The token shard {path} has {size:,} bytes, not a whole number of {self.dtype.name} tokens; "
                    "encode it again."
                )
            if size:
                self._paths.append(path)
                sizes.append(size // self.dtype.itemsize)
        self._starts = [0, *accumulate(sizes)]
        # No memory maps: their number is limited per process.
        self._open = lru_cache(_MAX_OPEN_FILES)(_AutoClosedFile)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, part: slice) -> npt.NDArray[np.unsignedinteger]:
        """Return the ids of a slice with step 1 as a new array.

        Raises UserError for an id past ``vocab_size`` and for an unreadable or truncated file.
        """
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"token shards support slices with step 1 only, not {step}")
        ids = np.empty(max(0, stop - start), self.dtype)
        filled = 0
        shard = bisect_right(self._starts, start) - 1
        while filled < len(ids):
            piece = ids[filled : self._starts[shard + 1] - start]
            self._read(shard, start + filled - self._starts[shard], piece)
            filled += len(piece)
            shard += 1
        if len(ids) and int(ids.max()) >= self.vocab_size:
            raise UserError(
                f"The token shards hold id {ids.max()}, past the vocabulary of {self.vocab_size:,}; "
                "they were made with another tokenizer."
            )
        return ids

    def _read(self, shard: int, start: int, ids: npt.NDArray[np.unsignedinteger]) -> None:
        """Fill ``ids`` with the ids of one shard from ``start`` on."""
        path, offset, remaining = self._paths[shard], start * ids.itemsize, ids.data.cast("B")
        if "://" in path:
            data = read_range(path, offset, offset + len(remaining))
            if len(data) != len(remaining):
                raise UserError(f"The token shard {path} was truncated since it was opened; encode it again.")
            remaining[:] = data
            return
        try:
            file = self._open(path)  # this reference keeps it open if another thread evicts it from the cache
            while remaining:  # one read returns at most 2 GB
                count = os.preadv(file.fileno(), [remaining], offset)
                if count == 0:
                    raise UserError(f"The token shard {path} was truncated since it was opened; encode it again.")
                remaining, offset = remaining[count:], offset + count
        except OSError as error:
            raise _unreadable(path, error) from None


class _AutoClosedFile(FileIO):
    """A file that closes with the last reference to it, without a ResourceWarning."""

    def __del__(self) -> None:
        self.close()


def _unreadable(path: str, error: OSError) -> UserError:
    return UserError(f"The token shard {path} cannot be read: {error.strerror}.")
