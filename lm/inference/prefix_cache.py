"""Prefix cache: the pages of recent sequences, for prompts that begin like one of them.

Source: Kwon et al. 2023 (vLLM: automatic prefix caching).
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lm.inference.kv_cache import PAGE_TOKENS, KVCache, Tokens

log = logging.getLogger(__name__)

# Serial number of the block before it, and its tokens. Before the first one is the number of the adapter, negative.
_BlockKey = tuple[int, Tokens]


@dataclass
class Block:
    """A page that is kept: the keys and values of 16 tokens after all the tokens before them."""

    page: int
    serial: int
    """Unique. So a key (serial of the block before, 16 tokens) stands for the whole prefix."""
    has_hidden: bool = False
    """Whether the final hidden states are stored too. Generated tokens have none."""


class PrefixCache:
    """Names the pages of recent sequences by their tokens. A prompt computes only what is in none of them.

    At most ``max_blocks`` pages of ``cache`` are kept, each once, whatever sequences share it; the least recently used
    make room for new ones, and for running sequences. The hidden states give the log-probabilities of a prompt.
    """

    def __init__(self, cache: KVCache, max_blocks: int) -> None:
        self._cache, self.max_blocks = cache, max_blocks
        self._blocks: OrderedDict[_BlockKey, Block] = OrderedDict()  # the least recently used first
        self._last_serial = 0

    def __len__(self) -> int:
        """Return the number of stored blocks."""
        return len(self._blocks)

    def match(self, tokens: Sequence[int], needs_hidden: bool = False, adapter: int = 0) -> list[int]:
        """Return the pages of the longest stored prefix of ``tokens``, never all of them.

        With ``needs_hidden``, only pages that have hidden states. Sequences with another adapter share none.
        """
        keys: list[_BlockKey] = []
        pages: list[int] = []
        serial = -adapter
        for start in range(0, (len(tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
            key = (serial, tuple(tokens[start : start + PAGE_TOKENS]))
            block = self._blocks.get(key)
            if block is None or (needs_hidden and not block.has_hidden):
                break
            keys.append(key)
            pages.append(block.page)
            serial = block.serial
        self._touch(keys)
        return pages

    def store(
        self, tokens: Sequence[int], row: int, hidden: Tensor | None = None, hidden_start: int = 0, copies: bool = False
    ) -> None:
        """Keep the whole pages of ``tokens``, which are in a row of the cache, as far as they are not kept yet.

        With ``copies``, keep copies, as far as pages are free: the row will write over its own. ``hidden`` (T, D) are
        the hidden states of the tokens from ``hidden_start``, a multiple of 16. If that fails, nothing is stored:
        generations go on without it.
        """
        try:
            self._store(tokens, row, hidden, hidden_start, copies)
        except Exception:  # e.g. out of memory
            log.warning("The prefix cache failed to store a sequence.", exc_info=True)

    def _store(self, tokens: Sequence[int], row: int, hidden: Tensor | None, hidden_start: int, copies: bool) -> None:
        keys: list[_BlockKey] = []
        pages, serial = self._cache.pages(row), -self._cache.adapters[row]
        for index in range(min(len(tokens) // PAGE_TOKENS, self.max_blocks)):
            start = index * PAGE_TOKENS
            key = (serial, tuple(tokens[start : start + PAGE_TOKENS]))
            block = self._blocks.get(key)
            if block is None:
                if len(self._blocks) == self.max_blocks:
                    self._cache.drop(self._blocks.popitem(last=False)[1].page)
                if copies and not self._cache.num_free:
                    break
                block = self._blocks[key] = self._add(pages[index], copies)
            self._blocks.move_to_end(key)
            if hidden is not None and self._cache.hidden is not None and start >= hidden_start and not block.has_hidden:
                self._cache.hidden[block.page] = hidden[start - hidden_start :][:PAGE_TOKENS]
                block.has_hidden = True
            keys.append(key)
            serial = block.serial
        self._touch(keys)

    def _add(self, page: int, copies: bool) -> Block:
        """Return a new block of a page, or of a copy of it."""
        if copies:
            source, page = page, self._cache.take_kept()
            try:
                self._cache.copy_pages([source], [page])
            except BaseException:
                self._cache.drop(page)
                raise
        else:
            self._cache.keep(page)
        self._last_serial += 1
        return Block(page, self._last_serial)

    def make_room(self, num_pages: int) -> None:
        """Drop the least recently used blocks that no sequence uses until ``num_pages`` pages are free."""
        for key, block in list(self._blocks.items()):
            if self._cache.num_free >= num_pages:
                return
            if self._cache.is_idle(block.page):
                del self._blocks[key]
                self._cache.drop(block.page)

    def _touch(self, keys: Sequence[_BlockKey]) -> None:
        """Make blocks the most recently used. The last goes first: without its prefix a block is of no use."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)
