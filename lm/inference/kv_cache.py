"""Cache of attention keys and values in pages of 16 tokens, so that each token is computed once.

A sequence has a row of the page table, which names the pages of its tokens in their order. Sequences with the same
prefix share its pages; a page is free when no row and no prefix cache uses it. Entries after a sequence's last token
are never read, so prompts of different lengths need no padding on the left. Source: Kwon et al. 2023 (vLLM:
PagedAttention).

A layer with a sliding window never reads what lies behind it. Such layers can have a *ring* for each row instead: a few
pages of its own, which the tokens fill again and again. A page table of the rings names them, so that attention reads
both kinds in the same way. Source: Jiang et al. 2023 (Mistral: rolling buffer).
"""

import math
from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lm.kernels.decode import page_operations
from lm.model.config import ModelConfig

PAGE_TOKENS = page_operations.PAGE_TOKENS  # 16
Tokens = tuple[int, ...]
_ALIGNMENT = 4096  # bytes: a page of the system, so that a page of a head is in few of them


def count_pages(num_tokens: int) -> int:
    """Return the number of pages that hold ``num_tokens`` tokens."""
    return -(-num_tokens // PAGE_TOKENS)


def window_layers(config: ModelConfig) -> list[int]:
    """Return the indices of the layers with a sliding window."""
    return [layer for layer in range(config.num_layers) if config.window(layer)]


def page_bytes(config: ModelConfig, dtype: torch.dtype, has_hidden: bool, num_layers: int | None = None) -> int:
    """Return the bytes of a page: keys and values of all layers, or of ``num_layers``, and, with ``has_hidden``, the
    final hidden states."""
    layers = config.num_layers if num_layers is None else num_layers
    numbers = 2 * layers * config.kv_heads * config.resolved_head_dim
    return PAGE_TOKENS * (numbers + (config.d_model if has_hidden else 0)) * dtype.itemsize


class LayerCache(NamedTuple):
    """The keys and values of a layer, (kv heads, pages, 16, head_dim), and the number of the table of their pages."""

    keys_GPCK: Tensor
    values_GPCK: Tensor
    table: int


class KVCache:
    """Pages of keys and values, and the pages of up to ``rows`` sequences of up to ``length`` tokens.

    ``keys`` and ``values`` are (layers, kv heads, pages, 16, head_dim), ``page_table`` (rows, pages of a row), int64.
    With ``has_hidden`` the final hidden states (pages, 16, d_model) can be stored too. ``num_pages`` are by default
    enough for all rows. Page 0 comes on top: free places of the table name it, so that a step with more rows than
    sequences can write there. Memory on a CPU is taken when a page is first written.

    With ``ring_pages``, the layers with a sliding window are not among those of ``keys`` and ``values``: each row has a
    ring of ``ring_pages`` pages for them, in ``ring_keys`` and ``ring_values``. At most ``max_chunk_tokens`` tokens of
    a row may be computed at once then, or they would write over what they read. ``tables`` (1 or 2, rows, pages of a
    row) are the page table, and that of the rings.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        num_pages: int | None = None,
        has_hidden: bool = False,
        ring_pages: int = 0,
    ) -> None:
        width = count_pages(length)
        self.num_pages = rows * width if num_pages is None else num_pages
        self._window_layers = window_layers(config) if ring_pages else []
        heads, head = config.kv_heads, (PAGE_TOKENS, config.resolved_head_dim)
        shapes = (
            (config.num_layers - len(self._window_layers), heads, self.num_pages + 1, *head),
            (len(self._window_layers), heads, rows * ring_pages + 1, *head),
        )
        # Each in one piece: the kernels of a CPU take one array with all layers.
        self.all_keys, self.all_values = (_zeros(sum(map(math.prod, shapes)), device, dtype) for _ in range(2))
        self.keys, self.ring_keys = _split(self.all_keys, shapes)
        self.values, self.ring_values = _split(self.all_values, shapes)
        hidden_shape = self.num_pages + 1, PAGE_TOKENS, config.d_model
        self.hidden = _zeros(math.prod(hidden_shape), device, dtype).view(hidden_shape) if has_hidden else None
        self.tables = torch.zeros(2 if ring_pages else 1, rows, width, dtype=torch.int64, device=device)
        self.page_table = self.tables[0]
        self.max_chunk_tokens = width * PAGE_TOKENS
        if ring_pages:
            window = max(config.window(layer) or 0 for layer in self._window_layers)
            self.max_chunk_tokens = (ring_pages - 1) * PAGE_TOKENS - window
            first_R1 = 1 + torch.arange(0, rows * ring_pages, ring_pages, device=device)[:, None]
            self.tables[1] = first_R1 + torch.arange(width, device=device) % ring_pages
        self._ring_pages = ring_pages
        self._pages: list[list[int]] = [[] for _ in range(rows)]
        self.adapters = [0] * rows
        """The adapter of each row, with which its keys and values are computed; 0: none."""
        self._is_free = np.ones(self.num_pages + 1, bool)
        self._is_free[0] = False
        self._num_rows_of = [0] * (self.num_pages + 1)
        self._num_kept_of = [0] * (self.num_pages + 1)
        self.num_free = self.num_pages
        """Number of pages that nothing uses."""
        self.num_idle = 0
        """Number of pages that a prefix cache keeps and no row uses."""

    @property
    def layers(self) -> list[LayerCache]:
        """The keys and values of each layer of the model."""
        whole = map(LayerCache, self.keys, self.values, repeat(0))
        rings = map(LayerCache, self.ring_keys, self.ring_values, repeat(1))
        count = len(self.keys) + len(self.ring_keys)
        return [next(rings if layer in self._window_layers else whole) for layer in range(count)]

    def check_chunk(self, count: int) -> None:
        """Raise ValueError if ``count`` tokens of a row cannot be computed at once."""
        if count > self.max_chunk_tokens:
            raise ValueError(f"{count} new tokens of a row are more than {self.max_chunk_tokens}")

    def pages(self, row: int) -> list[int]:
        """Return the pages of a row."""
        return self._pages[row]

    def adapters_of(self, rows: Sequence[int]) -> Tensor | None:
        """Return the adapters of rows, int64; None if none has one."""
        adapters = [self.adapters[row] for row in rows]
        return torch.tensor(adapters, device=self.keys.device) if any(adapters) else None

    def is_idle(self, page: int) -> bool:
        """Return whether no row uses a page."""
        return not self._num_rows_of[page]

    def share(self, row: int, pages: Sequence[int]) -> None:
        """Replace the first pages of a row by others, or give them to a row without pages."""
        self._set(row, [*pages, *self._pages[row][len(pages) :]])

    def extend(self, row: int, num_new: int) -> None:
        """Append free pages to a row. Raises ValueError if too few are free."""
        if num_new > self.num_free:
            raise ValueError(f"{num_new} pages are more than the {self.num_free} that are free")
        new = self._find_free(num_new)
        self._set(row, [*self._pages[row], *new])
        self._is_free[new] = False
        self.num_free -= num_new

    def clear(self, row: int) -> None:
        """Take the pages from a row."""
        self._set(row, [])

    def swap_rows(self, row: int, other: int) -> None:
        """Exchange the pages of two rows."""
        if row != other:
            self._pages[row], self._pages[other] = self._pages[other], self._pages[row]
            self.tables[:, [row, other]] = self.tables[:, [other, row]]
            self.adapters[row], self.adapters[other] = self.adapters[other], self.adapters[row]

    def keep(self, page: int) -> None:
        """Count a page of a row as one of the prefix cache: it is not free when the row is cleared."""
        self._num_kept_of[page] += 1

    def take_kept(self) -> int:
        """Return a free page for the prefix cache, counted as such."""
        (page,) = self._find_free(1)
        self._is_free[page] = False
        self.num_free -= 1
        self._num_kept_of[page] = 1
        self.num_idle += 1
        return page

    def drop(self, page: int) -> None:
        """Undo :meth:`keep`."""
        self._num_kept_of[page] -= 1
        if not self._num_kept_of[page] and not self._num_rows_of[page]:
            self.num_idle -= 1
            self._release(page)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy keys, values and hidden states of pages over those of other pages."""
        for tensor in (self.keys, self.values):
            tensor[:, :, targets] = tensor[:, :, sources]
        if self.hidden is not None:
            self.hidden[targets] = self.hidden[sources]

    def copy_ring(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the ring of a row that holds ``num_tokens`` tokens, if rows have one, over that of another."""
        if self._ring_pages:
            pages = self.tables[1, :, : min(count_pages(num_tokens), self._ring_pages)]
            for tensor in (self.ring_keys, self.ring_values):
                tensor[:, :, pages[target]] = tensor[:, :, pages[source]]

    def _set(self, row: int, pages: list[int]) -> None:
        """Change the pages of a row. Nothing is changed if that fails."""
        width = len(self.page_table[row])
        self.page_table[row] = torch.tensor([*pages, *[0] * (width - len(pages))])
        before, self._pages[row] = self._pages[row], pages
        for page in pages:
            if self._num_kept_of[page] and not self._num_rows_of[page]:
                self.num_idle -= 1
            self._num_rows_of[page] += 1
        for page in reversed(before):
            self._num_rows_of[page] -= 1
            if not self._num_rows_of[page]:
                if self._num_kept_of[page]:
                    self.num_idle += 1
                else:
                    self._release(page)

    def _find_free(self, count: int) -> list[int]:
        """Return free pages in as few runs as possible: a CPU reads pages faster if they follow each other.

        Of the runs that are long enough, take the shortest: its memory is taken already, and longer ones stay whole.
        """
        free = np.flatnonzero(self._is_free)
        runs = np.split(free, np.flatnonzero(np.diff(free) != 1) + 1)
        pages: list[int] = []
        while (num_missing := count - len(pages)) > 0:
            run = min((run for run in runs if len(run) >= num_missing), key=len, default=max(runs, key=len))
            runs = [other for other in runs if other is not run]
            pages += run[:num_missing].tolist()
        return pages

    def _release(self, page: int) -> None:
        self._is_free[page] = True
        self.num_free += 1


def _split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return views of a flat tensor with these shapes, one after the other."""
    ends = accumulate(math.prod(shape) for shape in shapes)
    return [flat[end - math.prod(shape) : end].view(shape) for shape, end in zip(shapes, ends, strict=True)]


def _zeros(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of zeros; on a CPU the system gives them their memory only when they are first written.

    They are no arbitrary numbers, because a masked NaN would still make an attention NaN.
    """
    if device.type != "cpu":
        return torch.zeros(count, device=device, dtype=dtype)
    num_bytes = count * dtype.itemsize
    flat = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -flat.ctypes.data % _ALIGNMENT
    return torch.from_numpy(flat[start : start + num_bytes]).view(dtype)
