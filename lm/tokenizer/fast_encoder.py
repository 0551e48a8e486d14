"""Compiled encoder for the patterns that have a compiled scanner; the reference is :mod:`lm.tokenizer.reference`."""

import logging
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from lm.kernels.bpe.encode import encode
from lm.kernels.bpe.merge import MAX_MERGES, EncoderState, make_merge_table, make_queue
from lm.kernels.bpe.pretoken_table import grow_table, make_table, make_token_table, make_workspace
from lm.kernels.bpe.pretokens import SCAN_BYTES, Specials, new_cursor
from lm.kernels.bpe.scanners.registry import SCANNERS
from lm.kernels.jit import INVALID_UTF8, TABLE_FULL, WORKSPACE_FULL, log_compilation
from lm.text.character_tables import scanner_classes
from lm.text.patterns import PATTERN_NAMES
from lm.text.pretokenize import Pattern
from lm.text.text_windows import WINDOW, not_utf8, text_windows
from lm.tokenizer.array_cache import TokenizerArrays

log = logging.getLogger(__name__)

# The cache of encoded pretokens; each thread has its own.
_INITIAL_CACHE_SLOTS = 1 << 16
MAX_CACHE_SLOTS = 1 << 20  # 32 MB
_CACHE_ARENA_BYTES = 16 << 20
_MAX_COPIED_IDS = 1 << 20  # a larger array of ids is not copied: the caller gets the buffer itself


def can_encode(arrays: TokenizerArrays) -> bool:
    """Return whether the kernels support so many merges; if not, log a warning."""
    if len(arrays.reachable) <= MAX_MERGES:
        return True
    log.warning(
        "The vocabulary has %s merges. The compiled encoder supports %s; plain Python encodes the text, fifty times "
        "slower. Use a smaller vocabulary for long texts.",
        f"{len(arrays.reachable):,}",
        f"{MAX_MERGES:,}",
    )
    return False


class FastEncoder:
    """Encodes UTF-8 text to token ids. Thread-safe: each running call has its own cache of pretokens."""

    def __init__(
        self, arrays: TokenizerArrays, dtype: np.dtype[np.unsignedinteger], pattern: Pattern, tables: str
    ) -> None:
        """Create an encoder of ``dtype`` ids. ``pattern`` must have a compiled scanner. ``tables``: those of
        :mod:`lm.text.character_tables` by which text is split."""
        self.dtype = dtype
        scanner = SCANNERS[PATTERN_NAMES[pattern]]
        self._rules, self._classes = scanner.rules, scanner_classes(scanner, tables)
        self._kernel_name = f"encoding {dtype.name}{scanner.kernel_suffix}"
        self._max_slots = MAX_CACHE_SLOTS
        self._idle: list[EncoderState] = []  # append and pop of a list are thread-safe
        lengths, is_whole = np.diff(arrays.ends), arrays.is_whole.astype(bool)
        merges = arrays.merges[arrays.reachable]
        token_ids, part_ids = np.concatenate([arrays.byte_ids, merges[:, 2]]), merges[:, :2]
        lengths_by_id = np.zeros(arrays.ids.max() + 1, np.int32)
        lengths_by_id[arrays.ids] = lengths
        token_lengths = lengths_by_id[token_ids]
        nodes = np.zeros(max(token_ids.max(), part_ids.max(initial=0)) + 1, np.int32)  # token id → node + 1
        nodes[token_ids] = np.arange(1, len(token_ids) + 1)
        self.nodes = nodes - 1
        parts = np.ascontiguousarray(nodes[part_ids] - 1)
        parts[parts < 0] = len(token_ids)  # no merge makes the part; so this node never is in a text
        id_lengths = np.zeros(len(nodes), np.int32)
        id_lengths[token_ids] = token_lengths
        whole = arrays.data[np.repeat(is_whole, lengths)], lengths[is_whole], arrays.ids[is_whole].astype(np.int64)
        with log_compilation("pair table"):
            self._merge_table = make_merge_table(token_ids.astype(np.uint32), token_lengths, id_lengths, parts)
            self._whole_tokens = make_token_table(*whole)

    def make_state(self, max_slots: int = MAX_CACHE_SLOTS) -> EncoderState:
        """Return the state of one thread, with an empty cache."""
        return EncoderState(
            self._merge_table,
            self._whole_tokens,
            make_queue(len(self._merge_table.parts)),
            make_table(min(max_slots, _INITIAL_CACHE_SLOTS), _CACHE_ARENA_BYTES),
            make_workspace(SCAN_BYTES),
        )

    def encode(
        self, blocks: Iterable[bytes | memoryview], specials: Specials, window: int = WINDOW
    ) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Yield the ids of the concatenated ``blocks``, one array for about ``window`` bytes.

        Raises UserError if the text is not UTF-8.
        """
        try:
            state = self._idle.pop()
        except IndexError:
            state = self.make_state(self._max_slots)
        cursor, out = new_cursor(), np.empty(0, self.dtype)
        try:
            for buffer, end, final in text_windows(blocks, cursor, window):
                status = WORKSPACE_FULL
                while status:
                    if len(out) < end + 8:
                        out = np.empty(max(2 * end, window) + 8, self.dtype)
                    with log_compilation(self._kernel_name):
                        text = buffer, end, final, cursor, self._classes, self._rules, specials
                        count, status = encode(state, *text, self._max_slots, out)
                    if count > _MAX_COPIED_IDS:
                        yield out[:count]
                        out = np.empty(0, self.dtype)
                    elif count:
                        yield out[:count].copy()
                    if status == TABLE_FULL:
                        state = state._replace(table=grow_table(state.table, 4))
                    elif status == WORKSPACE_FULL:
                        state = state._replace(work=make_workspace(2 * len(state.work.starts)))
                    elif status:
                        raise not_utf8(buffer, cursor, INVALID_UTF8 - status)
        finally:
            self._idle.append(state)
