"""Compiled encoder for vocabularies with superwords: tokens of several words.

The ids are those of BPE on each segment, in the order of the ranks; :mod:`lm.tokenizer.reference` is the plain form.
Merges up to the first that crosses words are done word by word, with a cache of words.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from lm.kernels.bpe.pretoken_table import grow_table, make_workspace
from lm.kernels.bpe.pretokens import Specials, new_cursor
from lm.kernels.bpe.scanners.registry import SCANNERS
from lm.kernels.bpe.segments import SegmentEncoder, encode_segments
from lm.kernels.jit import INVALID_UTF8, TABLE_FULL, WORKSPACE_FULL, Ids, Int32s, log_compilation
from lm.text.character_tables import scanner_classes
from lm.text.patterns import MAX_SEGMENT_WORDS, PATTERNS, SEGMENT_PATTERN_NAMES
from lm.text.pretokenize import Pattern
from lm.text.text_windows import WINDOW, not_utf8, text_windows
from lm.tokenizer.array_cache import TokenizerArrays
from lm.tokenizer.fast_encoder import MAX_CACHE_SLOTS, FastEncoder


def crosses_words(left: bytes, right: bytes) -> bool:
    """Return whether a merge may join the last byte of a letter with the space or apostrophe of a word after it."""
    return right[:1] in (b" ", b"'") and (left[-1:].isalpha() or left[-1] >= 0x80)


def count_word_merges(merges: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the number of merges before the first that crosses words."""
    count = 0
    for left, right in merges:
        if crosses_words(left, right):
            break
        count += 1
    return count


class SuperwordEncoder:
    """Encodes UTF-8 text to token ids, like :class:`FastEncoder`, by the pattern of segments. Thread-safe."""

    def __init__(
        self, arrays: TokenizerArrays, dtype: np.dtype[np.unsignedinteger], pattern: Pattern, tables: str
    ) -> None:
        """Create an encoder of ``dtype`` ids. ``pattern`` is in :data:`lm.text.patterns.SEGMENT_PATTERNS`."""
        self.dtype = dtype
        name = SEGMENT_PATTERN_NAMES[pattern]
        scanner = SCANNERS[name]
        self._rules, self._classes = scanner.rules, scanner_classes(scanner, tables)
        self._kernel_name = f"encoding superwords {dtype.name}{scanner.kernel_suffix}"
        word_merges = count_word_merges(arrays.merge_pairs())
        reachable = arrays.reachable
        word_arrays = arrays._replace(reachable=reachable[reachable < word_merges])
        self._words = FastEncoder(word_arrays, dtype, PATTERNS[name], tables)
        self._has_superwords = len(word_arrays.reachable) < len(reachable)
        self._all = FastEncoder(arrays, dtype, PATTERNS[name], tables) if self._has_superwords else self._words
        self._idle: list[SegmentEncoder] = []  # append and pop of a list are thread-safe

    def encode(
        self, blocks: Iterable[bytes | memoryview], specials: Specials, window: int = WINDOW
    ) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Yield the ids of the concatenated ``blocks``, one array for about ``window`` bytes.

        Raises UserError if the text is not UTF-8.
        """
        segments = self.encode_segments(blocks, specials, window)
        return (out[:count].copy() for out, count, _ in segments if count)

    def encode_segments(
        self, blocks: Iterable[bytes | memoryview], specials: Specials, window: int = WINDOW
    ) -> Iterator[tuple[Ids, int, Int32s]]:
        """Yield an array that begins with ids and has 16 bytes more, their number, and where each segment or special
        token ends in them. The next item reuses the memory."""
        try:
            encoder = self._idle.pop()
        except IndexError:
            encoder = self._make_encoder()
        cursor, out, ends = new_cursor(), np.empty(0, self.dtype), np.empty(0, np.int32)
        try:
            for buffer, end, final in text_windows(blocks, cursor, window):
                status = WORKSPACE_FULL
                while status:
                    if len(out) < end + 8:
                        out = np.empty(max(2 * end, window) + 8, self.dtype)
                        ends = np.empty(len(out), np.int32)
                    with log_compilation(self._kernel_name):
                        text = buffer, end, final, cursor, self._classes, self._rules, specials
                        count, segments, status = encode_segments(
                            encoder, *text, MAX_SEGMENT_WORDS, MAX_CACHE_SLOTS, out, ends
                        )
                    yield out, count, ends[:segments]
                    if status == TABLE_FULL:
                        words = encoder.words._replace(table=grow_table(encoder.words.table, 4))
                        encoder = encoder._replace(words=words)
                    elif status == WORKSPACE_FULL:
                        work = make_workspace(2 * len(encoder.words.work.starts))
                        encoder = encoder._replace(
                            words=encoder.words._replace(work=work), all=encoder.all._replace(work=work)
                        )
                    elif status:
                        raise not_utf8(buffer, cursor, INVALID_UTF8 - status)
        finally:
            self._idle.append(encoder)

    def _make_encoder(self) -> SegmentEncoder:
        words = self._words.make_state()
        merged = self._all.make_state()._replace(table=words.table, work=words.work)
        return SegmentEncoder(words, merged, self._all.nodes, self._has_superwords)
