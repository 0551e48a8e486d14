"""Compiled encoder for the patterns that have a compiled scanner; the reference is :mod:`lm.tokenizer.reference`."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from lm.kernels.bpe.encode import encode
from lm.kernels.bpe.merge import EncoderState, make_queue
from lm.kernels.bpe.merge_table import MAX_MERGES, MergeTable, make_merge_table
from lm.kernels.bpe.pretoken_table import Table, grow_table, make_table, make_token_table, make_workspace
from lm.kernels.bpe.pretokens import SCAN_BYTES, Specials, new_cursor
from lm.kernels.bpe.scanners.registry import SCANNERS
from lm.kernels.jit import INVALID_UTF8, TABLE_FULL, WORKSPACE_FULL, Bytes, Int32s, Int64s, log_compilation
from lm.text.character_tables import scanner_classes
from lm.text.patterns import PATTERN_NAMES
from lm.text.pretokenize import Pattern
from lm.text.text_windows import WINDOW, not_utf8, text_windows
from lm.tokenizer.array_cache import TokenizerArrays
from lm.tokenizer.merges import find_used_merges

log = logging.getLogger(__name__)

# The cache of encoded pretokens; each thread has its own.
_INITIAL_CACHE_SLOTS = 1 << 16
_MAX_CACHE_SLOTS = 1 << 20  # 32 MB
_CACHE_ARENA_BYTES = 16 << 20
_MAX_COPIED_IDS = 1 << 20  # a larger array of ids is not copied: the caller gets the buffer itself


class FastEncoder:
    """Encodes UTF-8 text to token ids. Thread-safe: each running call has its own cache of pretokens."""

    def __init__(
        self,
        merge_table: MergeTable,
        used_merges: Int32s,
        whole_tokens: Table,
        dtype: np.dtype[np.unsignedinteger],
        pattern: Pattern,
        tables: str,
    ) -> None:
        self.dtype = dtype
        self.used_merges = used_merges
        scanner = SCANNERS[PATTERN_NAMES[pattern]]
        self._rules, self._classes = scanner.rules, scanner_classes(scanner, tables)
        self._kernel_name = f"encoding {dtype.name}{scanner.kernel_suffix}"
        self._merge_table = merge_table
        self._whole_tokens = whole_tokens
        self._max_slots = _MAX_CACHE_SLOTS
        self._idle: list[EncoderState] = []  # append and pop of a list are thread-safe

    @classmethod
    def from_merges(
        cls,
        ids: Mapping[bytes, int],
        merges: Sequence[tuple[bytes, bytes]],
        dtype: np.dtype[np.unsignedinteger],
        pattern: Pattern,
        whole_tokens: Mapping[bytes, int],
        tables: str,
    ) -> "FastEncoder | None":
        """Create an encoder of ``dtype`` ids, or return None if the kernels do not support the vocabulary.

        ``pattern`` must have a compiled scanner. A pretoken in ``whole_tokens`` is one token, whatever the merges.
        ``tables``: those of :mod:`lm.text.character_tables` by which text is split.

        They need an id for each byte and merged token, and at most ``MAX_MERGES`` merges.
        """
        tokens = [bytes([byte]) for byte in range(256)]
        tokens += [left + right for left, right in merges]
        try:
            token_ids = np.fromiter(map(ids.__getitem__, tokens), np.int64, len(tokens))
            part_ids = np.fromiter(map(ids.__getitem__, chain.from_iterable(merges)), np.int64, 2 * len(merges))
        except KeyError:
            return None
        used = find_used_merges(merges)
        if len(used) > MAX_MERGES:
            log.warning(
                "The vocabulary has %s merges. The compiled encoder supports %s; plain Python encodes the text, fifty "
                "times slower. Use a smaller vocabulary for long texts.",
                f"{len(used):,}",
                f"{MAX_MERGES:,}",
            )
            return None
        nodes = np.concatenate([np.arange(256), 256 + used])
        lengths = np.fromiter(map(len, tokens), np.int32, len(tokens))[nodes]
        whole_lengths = np.fromiter(map(len, whole_tokens), np.int64, len(whole_tokens))
        whole_ids = np.fromiter(whole_tokens.values(), np.int64, len(whole_tokens))
        whole = np.frombuffer(b"".join(whole_tokens), np.uint8), whole_lengths, whole_ids
        options = dtype, pattern, tables
        return cls._from_ids(token_ids[nodes], part_ids.reshape(-1, 2)[used], used, lengths, whole, *options)

    @classmethod
    def from_arrays(
        cls,
        arrays: TokenizerArrays,
        dtype: np.dtype[np.unsignedinteger],
        pattern: Pattern,
        added: Collection[int],
        tables: str,
    ) -> "FastEncoder":
        """Create an encoder as :meth:`from_merges` did from the same tokenizer. The whole tokens are all but
        ``added`` if the arrays say ``ignore_merges``, else none."""
        lengths, is_text = np.diff(arrays.ends), arrays.is_text.astype(bool)
        length_by_id = np.zeros(arrays.ids.max() + 1, np.int32)
        length_by_id[arrays.ids] = lengths
        merges = arrays.merges[arrays.used]
        token_ids = np.empty(256 + len(merges), np.int64)
        is_byte = is_text & (lengths == 1)
        token_ids[arrays.data[arrays.ends[:-1][is_byte]]] = arrays.ids[is_byte]
        token_ids[256:] = merges[:, 2]
        is_whole = is_text & (lengths > 0) & ~np.isin(arrays.ids, list(added)) & arrays.ignore_merges
        whole = arrays.data[np.repeat(is_whole, lengths)], lengths[is_whole], arrays.ids[is_whole].astype(np.int64)
        options = dtype, pattern, tables
        return cls._from_ids(token_ids, merges[:, :2], arrays.used, length_by_id[token_ids], whole, *options)

    @classmethod
    def _from_ids(
        cls,
        token_ids: Int64s,
        part_ids: npt.NDArray[np.signedinteger],
        used: Int32s,
        lengths: Int32s,
        whole: tuple[Bytes, Int64s, Int64s],
        dtype: np.dtype[np.unsignedinteger],
        pattern: Pattern,
        tables: str,
    ) -> "FastEncoder":
        """``token_ids`` and ``lengths``: of the 256 bytes and the merged tokens. ``part_ids`` (merges, 2), of
        the merges of the ranks ``used``. ``whole``: concatenated bytes, lengths and ids of the whole tokens."""
        nodes = np.zeros(max(token_ids.max(), part_ids.max(initial=0)) + 1, np.int32)  # token id → node + 1
        nodes[token_ids] = np.arange(1, len(token_ids) + 1)
        parts = nodes[part_ids] - 1
        parts[parts < 0] = len(token_ids)  # no merge makes the part; so this node never is in a text
        id_lengths = np.zeros(len(nodes), np.int32)
        id_lengths[token_ids] = lengths
        with log_compilation("pair table"):
            arrays = token_ids.astype(np.uint32), lengths, id_lengths, np.ascontiguousarray(parts)
            merge_table = make_merge_table(*arrays)
            token_table = make_token_table(*whole)
        return cls(merge_table, used, token_table, dtype, pattern, tables)

    def encode(
        self, blocks: Iterable[bytes], specials: Specials, window: int = WINDOW
    ) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Yield the ids of the concatenated ``blocks``, one array for about ``window`` bytes.

        Raises UserError if the text is not UTF-8.
        """
        try:
            state = self._idle.pop()
        except IndexError:
            state = EncoderState(
                self._merge_table,
                self._whole_tokens,
                make_queue(len(self._merge_table.parts)),
                make_table(min(self._max_slots, _INITIAL_CACHE_SLOTS), _CACHE_ARENA_BYTES),
                make_workspace(SCAN_BYTES),
            )
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
