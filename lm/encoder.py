"""The compiled way from text to token ids, for GPT-2's pattern; the reference is in :mod:`lm.tokenizer`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from lm.buffers import WINDOW, new_cursor, not_utf8, windows
from lm.kernels import compiling
from lm.kernels.apply_merges import MAX_MERGES, Model, Queue, make_model, make_queue
from lm.kernels.classes import character_classes
from lm.kernels.encode import encode
from lm.kernels.table import NO_SLOTS, Table, Workspace, make_table, make_workspace, with_more_slots
from lm.kernels.walk import SCANNED, TOO_SMALL, Specials

_FIRST_SLOTS = 1 << 16  # of a table that grows by four
_SLOTS, _ARENA = 1 << 20, 16 << 20  # of the memory for pretokens that each thread has: 32 and 16 MB at most
_COPIED = 1 << 20  # ids that are copied out of a buffer that is used again; more are given with it


class Encoder:
    """Encodes with merges that are made in order. One may be used by many threads: each call has a memory of pretokens
    to itself while it lasts."""

    def __init__(self, model: Model, merges: int, dtype: np.dtype[np.unsignedinteger]) -> None:
        self.dtype = dtype
        self._model = model
        self._merges = merges
        self._most_slots = _SLOTS
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
        try:
            token_ids = np.fromiter(map(ids.__getitem__, tokens), np.int64, len(tokens))
            part_ids = np.fromiter(map(ids.__getitem__, chain.from_iterable(merges)), np.int64, 2 * len(merges))
        except KeyError:
            return None
        order = np.arange(len(tokens), dtype=np.int32)
        nodes = np.zeros(max(token_ids.max(), part_ids.max(initial=0)) + 1, np.int32)  # by token id, counted from 1
        nodes[token_ids] = order + 1
        parts = nodes[part_ids].reshape(-1, 2) - 1
        are_made_before = (parts >= 0).all() and (parts.max(axis=1) < order[256:]).all()
        if not are_made_before or (nodes[token_ids] != order + 1).any() or len(merges) > MAX_MERGES:
            return None
        lengths = np.fromiter(map(len, tokens), np.int32, len(tokens))
        id_lengths = np.zeros(len(nodes), np.int32)
        id_lengths[token_ids] = lengths
        with compiling("pair table"):
            model = make_model(token_ids.astype(np.uint32), lengths, id_lengths, parts)
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
            queue, table, work = (
                make_queue(self._merges),
                make_table(min(self._most_slots, _FIRST_SLOTS), _ARENA),
                make_workspace(SCANNED),
            )
        cursor, out = new_cursor(), np.empty(0, self.dtype)
        try:
            for buffer, end, final in windows(blocks, cursor, window):
                status = TOO_SMALL
                while status:
                    if len(out) < end + 8:
                        out = np.empty(max(2 * end, window) + 8, self.dtype)
                    with compiling(f"encoding {self.dtype.name}"):
                        arguments = buffer, end, final, cursor, character_classes(), specials, self._model, queue
                        count, status = encode(*arguments, table, self._most_slots, work, out)
                    if count > _COPIED:
                        yield out[:count]
                        out = np.empty(0, self.dtype)
                    elif count:
                        yield out[:count].copy()
                    if status == NO_SLOTS:
                        table = with_more_slots(table, 4)
                    elif status == TOO_SMALL:
                        work = make_workspace(2 * len(work.starts))
                    elif status:
                        raise not_utf8(buffer, cursor, -4 - status)
        finally:
            self._idle.append((queue, table, work))
