"""The size of a KV cache: how many pages an engine gets, and whether layers with a sliding window have rings.

A prefix cache shares all pages, including those before a window. A ring belongs to one row. So an engine has one or the
other.
"""

from dataclasses import dataclass

import torch

from lm.common.errors import UserError
from lm.inference.kv_cache import PAGE_TOKENS, KVCache, count_pages, page_bytes, window_layers
from lm.model.config import ModelConfig

MIN_CHUNK_TOKENS = 512  # that a row with rings can compute at once; a ring holds them beside a window


@dataclass(frozen=True)
class CacheSize:
    """The size of the cache of ``rows`` sequences of up to ``length`` tokens each."""

    config: ModelConfig
    dtype: torch.dtype
    rows: int
    length: int
    num_pages: int
    """Pages that sequences take as they need them."""
    num_blocks: int = 0
    """Largest number of pages that a prefix cache keeps; 0 without one."""
    ring_pages: int = 0
    """Pages of the ring of a row; 0: all layers have all tokens."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        rings = (
            self.rows * self.ring_pages * page_bytes(self.config, self.dtype, False, len(window_layers(self.config)))
        )
        return self.num_pages * self.page_size + rings

    @property
    def page_size(self) -> int:
        """Bytes of a page of ``num_pages``."""
        num_layers = self.config.num_layers - (len(window_layers(self.config)) if self.ring_pages else 0)
        return page_bytes(self.config, self.dtype, self.num_blocks > 0, num_layers)

    def make(self, device: torch.device) -> KVCache:
        """Make the cache."""
        has_hidden = self.num_blocks > 0
        shape = self.config, self.rows, self.length, device, self.dtype
        return KVCache(*shape, self.num_pages, has_hidden, self.ring_pages)


def plan_cache(
    config: ModelConfig, dtype: torch.dtype, rows: int, length: int, prefix_cache_bytes: int, kv_bytes: int | None
) -> CacheSize:
    """Return the size of the cache of an engine; see :class:`lm.inference.engine.Engine`.

    Raises UserError if not even 16 tokens fit into ``kv_bytes``, or into ``prefix_cache_bytes`` if these are not 0.
    """
    size = page_bytes(config, dtype, prefix_cache_bytes > 0)
    num_blocks = _count_fitting(prefix_cache_bytes, size, "A prefix cache") if prefix_cache_bytes else 0
    num_pages = needed = rows * count_pages(length) + num_blocks
    if kv_bytes is not None:
        num_pages = min(needed, _count_fitting(kv_bytes, size, "A KV cache"))
    whole = CacheSize(config, dtype, rows, min(length, num_pages * PAGE_TOKENS), num_pages, num_blocks)
    window = max((config.window(layer) or 0 for layer in window_layers(config)), default=0)
    ring_pages = count_pages(window + max(MIN_CHUNK_TOKENS, window // 2)) + 1
    if prefix_cache_bytes or not window or 2 * ring_pages > count_pages(length):
        return whole  # prompts in small chunks take longer, so rings must save half
    empty = CacheSize(config, dtype, rows, length, 0, 0, ring_pages)
    if kv_bytes is not None and empty.page_size:
        needed = min(needed, (kv_bytes - empty.num_bytes) // empty.page_size)
    if (kv_bytes is not None and empty.num_bytes > kv_bytes) or needed < whole.num_pages:
        return whole  # the rings of all rows take more than they save
    return CacheSize(config, dtype, rows, min(length, needed * PAGE_TOKENS), needed, 0, ring_pages)


def _count_fitting(num_bytes: int, page_size: int, what: str) -> int:
    """Return how many pages fit into ``num_bytes``. Raises UserError if none does."""
    if num_bytes < page_size:
        off = ", or 0 to turn it off" if what == "A prefix cache" else ""
        raise UserError(
            f"{what} of {num_bytes:,} bytes is too small: {PAGE_TOKENS} tokens of this model take {page_size:,}. "
            f"Give it more{off}."
        )
    return num_bytes // page_size
