"""The compiled way from text to token ids, for GPT-2's pattern; the reference is in :mod:`lm.tokenizer`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lm.buffers import WINDOW, new_cursor, not_utf8, windows
from lm.kernels import compiling, encode
from lm.kernels.classes import character_classes
from lm.kernels.encode import Queue
from lm.kernels.table import Table, Workspace, make_table, make_workspace
from lm.kernels.walk import SCANNED, TOO_SMALL, Specials

_SLOTS, _ARENA = 1 << 20, 16 << 20  # of the memory for pretokens that each thread has: 32 and 16 MB
_COPIED = 1 << 20  # ids that are copied out of a buffer that is used again; more are given with it
_NO_RANK = np.iinfo(np.int32).max


class Encoder:
    """Encodes with merges that are made in order. One may be used by many threads: each call has a memory of pretokens
    to itself while it lasts."""

    def __init__(self, model: encode.Model, merges: int, dtype: np.dtype[np.unsignedinteger]) -> None:
        self.dtype = dtype
        self._model = model
        self._merges = merges
        self._idle: list[tuple[Queue, Table, Workspace]] = []  # a list's append and pop are safe in threads

    @classmethod
    def make(
        cls,
        ids: Mapping[bytes, int],
        merges: Sequence[tuple[bytes, bytes]],
        dtype: np.dtype[np.unsignedinteger],
    ) -> "Encoder | None":
        """An encoder; None where the kernels' way would not be exact: a part is made after the merge that needs it, a
        token is made by two merges or has no id, or there are more than a million merges."""
        tokens = [bytes([byte]) for byte in range(256)]
        tokens += [left + right for left, right in merges]
        nodes = {token: node for node, token in enumerate(tokens)}
        token_ids = np.array([ids.get(token, -1) for token in tokens], np.int64)
        lefts = np.array([nodes.get(left, -1) for left, _ in merges], np.int32)
        rights = np.array([nodes.get(right, -1) for _, right in merges], np.int32)
        are_known = min(array.min(initial=0) for array in (token_ids, lefts, rights)) >= 0
        are_made_before = (np.maximum(lefts, rights) < np.arange(256, len(tokens))).all()
        if not (are_known and are_made_before) or len(nodes) < len(tokens) or len(merges) > encode.MAX_MERGES:
            return None
        lengths = np.array([len(token) for token in tokens], np.int32)
        id_lengths = np.zeros(token_ids.max() + 1, np.int32)
        id_lengths[token_ids] = lengths
        size = 1 << (2 * len(merges)).bit_length()
        model = encode.Model(
            token_ids, lengths, id_lengths, np.full(1 << 16, _NO_RANK, np.int32), np.full(size, 2**64 - 1, np.uint64)
        )
        with compiling("pair table"):
            encode.fill_pairs(lefts, rights, model.byte_pairs, model.pairs)
        return cls(model, len(merges), dtype)

    def encode(
        self, blocks: Iterable[bytes], specials: Specials, window: int = WINDOW
    ) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Yield the ids of the UTF-8 text that ``blocks`` join to, an array for about ``window`` bytes of it.

        Raises UserError where the text is not UTF-8.
        """
        try:
            queue, table, work = self._idle.pop()
        except IndexError:
            queue, table, work = encode.make_queue(self._merges), make_table(_SLOTS, _ARENA), make_workspace(SCANNED)
        cursor, out = new_cursor(), np.empty(0, self.dtype)
        try:
            for buffer, end, final in windows(blocks, cursor, window):
                status = TOO_SMALL
                while status == TOO_SMALL:
                    if len(out) < end + 8:
                        out = np.empty(len(buffer), self.dtype)
                    with compiling(f"encoding {self.dtype.name}"):
                        count, status = encode.encode(
                            buffer,
                            end,
                            final,
                            cursor,
                            character_classes(),
                            specials,
                            self._model,
                            queue,
                            table,
                            work,
                            out,
                        )
                    if status < TOO_SMALL:
                        raise not_utf8(buffer, cursor, -2 - status)
                    if count > _COPIED:
                        yield out[:count]
                        out = np.empty(0, self.dtype)
                    elif count:
                        yield out[:count].copy()
                    if status == TOO_SMALL:
                        work = make_workspace(2 * len(work.starts))
        finally:
            self._idle.append((queue, table, work))
