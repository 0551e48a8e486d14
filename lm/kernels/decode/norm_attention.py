"""Decode step on a CPU between its matmuls: RMSNorm, QK-norm, rotary positions and attention of a few new tokens.

Torch needs many operators for this little work, and calling them takes longer than the work. Arrays are flat. The
references are :mod:`lm.model.attention` and :mod:`lm.model.norm`.

N new tokens, H query heads, K head_dim. A *token head* is a new token and one of its key and value heads. Keys and
values are in pages of 16 tokens.
"""

import math
from typing import NamedTuple

import numpy as np

from lm.kernels.decode.page_operations import PAGE_TOKENS, add_page, score_page
from lm.kernels.jit import Floats, Int64s, Stored, fastmath_helper, fastmath_kernel
from lm.kernels.simd import float_of_bits, prefetch, read, read_float, write, write_float

_PAGE = np.int64(PAGE_TOKENS)
ZERO, ONE = np.int64(0), np.int64(1)  # not literals: numba would compile a helper for each value


class AttentionLayer(NamedTuple):
    """Shape and parameters of the attention of one layer, or of several layers of one shape.

    A new token attends to as many tokens as the window of its layer has, itself included.
    """

    heads: int
    kv_heads: int
    head_dim: int
    norm_weights: Floats  # (layers, 2, K): QK-norm of queries and of keys; empty without it
    eps: float
    scale: float  # of the products of queries and keys
    cos: Floats  # (tables, length, K / 2): rotary positions; empty without them
    sin: Floats
    table_starts: Int64s  # (layers,): index of a layer's table in cos and sin, -1 if it has no rotary positions
    windows: Int64s  # (layers,)


class CacheArrays(NamedTuple):
    """Keys and values of one layer, or of several, and the pages of sequences."""

    keys: Stored  # of each layer: (kv_heads, its pages, 16, K)
    values: Stored
    starts: Int64s  # (layers,): index of the first key of a layer
    num_pages: Int64s  # (layers,)
    tables: Int64s  # (tables, rows, row_pages)
    table_starts: Int64s  # (layers,): index of a layer's page table in tables
    row_pages: int
    rows: Int64s  # (N,): of the new tokens
    positions: Int64s  # (N,): of the new tokens in their rows


@fastmath_kernel
def normalize(x: Stored, weight: Stored, eps: float, out: Stored) -> None:
    """Write the RMSNorm of each row of ``x``, as wide as ``weight``, to ``out``."""
    normalize_rows(x, len(x) // len(weight), weight, ZERO, len(weight), eps, out)


@fastmath_helper
def normalize_rows(
    x: Stored, rows: int, weight: Stored, weight_start: int, width: int, eps: float, out: Stored
) -> None:
    """Write the RMSNorm of ``rows`` rows of ``x``, with the weights from ``weight_start``, to ``out``."""
    for row in range(rows):
        start = row * width
        scale = _rms_scale(x, start, width, eps)
        for i in range(width):
            write_float(out, start + i, read_float(x, start + i) * scale * read_float(weight, weight_start + i))


@fastmath_helper
def _rms_scale(x: Stored, start: int, width: int, eps: float) -> np.float32:
    """Return 1 / sqrt(mean(x²) + eps) of ``x[start : start + width]``."""
    total = np.float32(0)
    for i in range(width):
        total += read_float(x, start + i) * read_float(x, start + i)
    return np.float32(1 / math.sqrt(total / width + eps))


@fastmath_helper
def _rotate_head(
    layer: AttentionLayer, x: Floats, start: int, norm_row: int, position: int, out: Stored, out_start: int
) -> None:
    """Write the query or key ``x[start : start + K]`` to ``out[out_start:]``, with QK-norm and rotary position."""
    head_dim, norm_weights, cos, sin = layer.head_dim, layer.norm_weights, layer.cos, layer.sin
    weight_start, table = norm_row * head_dim, read(layer.table_starts, norm_row // 2)
    scale = _rms_scale(x, start, head_dim, layer.eps) if len(norm_weights) else np.float32(1)
    half = head_dim // 2
    for i in range(half):
        even, odd = read(x, start + 2 * i) * scale, read(x, start + 2 * i + 1) * scale
        if len(norm_weights):
            even *= read(norm_weights, weight_start + 2 * i)
            odd *= read(norm_weights, weight_start + 2 * i + 1)
        if table >= 0:
            c, s = read(cos, table + position * half + i), read(sin, table + position * half + i)
            even, odd = even * c - odd * s, even * s + odd * c
        write_float(out, out_start + 2 * i, even)
        write_float(out, out_start + 2 * i + 1, odd)
    if head_dim % 2:  # only without rotary positions
        last = read(x, start + head_dim - 1) * scale
        if len(norm_weights):
            last *= read(norm_weights, weight_start + head_dim - 1)
        write_float(out, out_start + head_dim - 1, last)


@fastmath_helper
def exp(x: np.float32) -> np.float32:
    """Return eˣ for x ≤ 0, within 2 units in the last place; unlike the C library's, it vectorizes.

    2ⁿ · eʳ with |r| ≤ ln 2 / 2: the minimax polynomial of Cephes for eʳ, and n written to the exponent's bits.
    """
    x = max(x, np.float32(-87))
    n = np.float32(math.floor(x * np.float32(1.44269504) + np.float32(0.5)))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return (p * r * r + r + np.float32(1)) * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@fastmath_helper
def _page_start(layer: AttentionLayer, number: int, cache: CacheArrays, token: int, page: int, kv_head: int) -> int:
    """Return the index of the first key of a page of a token's sequence; ``page`` counts from its beginning."""
    at = read(cache.tables, read(cache.table_starts, number) + cache.rows[token] * cache.row_pages + page)
    return read(cache.starts, number) + (kv_head * read(cache.num_pages, number) + at) * _PAGE * layer.head_dim


@fastmath_helper
def _prefetch(stored: Stored, start: int, size: int) -> None:
    """Prefetch a page. If it comes after the last one in memory, the CPU does that by itself, and faster."""
    for i in range(start, start + size, 64 // stored.itemsize):
        prefetch(stored, i)


@fastmath_helper
def _first_key(layer: AttentionLayer, number: int, cache: CacheArrays, token: int) -> int:
    """Return the position of the first key that a token attends to."""
    return max(cache.positions[token] - read(layer.windows, number) + ONE, ZERO)


@fastmath_helper
def _score_keys(
    layer: AttentionLayer, number: int, cache: CacheArrays, token: int, kv_head: int, scratch: Floats
) -> None:
    """Write the scores of a token's queries of a group and the keys of its window; see :func:`attend`."""
    head_dim, last_page = layer.head_dim, cache.positions[token] // _PAGE
    group, num_used = layer.heads // layer.kv_heads, cache.positions[token] % _PAGE + 1
    first_key = _first_key(layer, number, cache, token)
    first_page, num_hidden = first_key // _PAGE, first_key % _PAGE
    num_pages, largest = last_page + 1 - first_page, 2 * group * head_dim
    for head in range(group):
        write(scratch, largest + head, np.float32(-np.inf))
    size = _PAGE * head_dim
    start = first = _page_start(layer, number, cache, token, first_page, kv_head)
    for page in range(first_page, last_page + 1):
        next_start = _page_start(layer, number, cache, token, min(page + 1, last_page), kv_head)
        if page == last_page:
            _prefetch(cache.values, first, size)
        elif next_start != start + size:
            _prefetch(cache.keys, next_start, size)
        count = num_used if page == last_page else _PAGE
        for head in range(group):
            place = largest + group + (head * num_pages + page - first_page) * _PAGE
            found = score_page(cache.keys, start, scratch, head * head_dim, head_dim, count, scratch, place)
            if page == first_page and num_hidden > 0:  # a hidden key may have the largest score
                found = np.float32(-np.inf)
                for i in range(num_hidden, count):
                    found = max(found, read(scratch, place + i))
            write(scratch, largest + head, max(found, read(scratch, largest + head)))
        start = next_start


@fastmath_helper
def _sum_values(
    layer: AttentionLayer, number: int, cache: CacheArrays, token: int, kv_head: int, scratch: Floats
) -> None:
    """Write the sums of the values of the window, weighted by exp(score − largest), and the sums of the weights."""
    head_dim, last_page = layer.head_dim, cache.positions[token] // _PAGE
    group, num_used = layer.heads // layer.kv_heads, cache.positions[token] % _PAGE + 1
    first_key = _first_key(layer, number, cache, token)
    first_page, num_hidden = first_key // _PAGE, first_key % _PAGE
    num_pages, sums, largest = last_page + 1 - first_page, group * head_dim, 2 * group * head_dim
    for i in range(sums, largest):
        write(scratch, i, np.float32(0))
    for head in range(group):
        weights, shift = largest + group + head * num_pages * _PAGE, read(scratch, largest + head)
        total = np.float32(0)
        for at in range(weights + num_hidden, weights + cache.positions[token] - first_page * _PAGE + 1):
            weight = exp(read(scratch, at) - shift)
            write(scratch, at, weight)
            total += weight
        write(scratch, largest + head, total)
    size = _PAGE * head_dim
    start = first = _page_start(layer, number, cache, token, first_page, kv_head)
    for page in range(first_page, last_page + 1):
        next_start = _page_start(layer, number, cache, token, min(page + 1, last_page), kv_head)
        if page == last_page:
            _prefetch(cache.keys, first + read(cache.num_pages, number) * size, size)  # of the next head
        elif next_start != start + size:
            _prefetch(cache.values, next_start, size)
        count = num_used if page == last_page else _PAGE
        skipped = num_hidden if page == first_page else ZERO
        value = start + skipped * head_dim
        for head in range(group):
            place = largest + group + (head * num_pages + page - first_page) * _PAGE + skipped
            add_page(cache.values, value, scratch, place, count - skipped, head_dim, scratch, sums + head * head_dim)
        start = next_start


@fastmath_helper
def store_kv(layer: AttentionLayer, number: int, cache: CacheArrays, qkv: Floats, token_head: int) -> None:
    """Store the key and the value of a token and a kv head in the cache; ``number`` is the layer in the arrays."""
    heads, kv_heads, head_dim = layer.heads, layer.kv_heads, layer.head_dim
    token, kv_head = token_head // kv_heads, token_head % kv_heads
    position, start = cache.positions[token], token * (heads + 2 * kv_heads) * head_dim
    key, value = start + (heads + kv_head) * head_dim, start + (heads + kv_heads + kv_head) * head_dim
    page = _page_start(layer, number, cache, token, position // _PAGE, kv_head)
    place = page + position % _PAGE * head_dim
    _rotate_head(layer, qkv, key, 2 * number + ONE, position, cache.keys, place)
    for i in range(head_dim):
        write_float(cache.values, place + i, read(qkv, value + i))


@fastmath_helper
def attend_head(
    layer: AttentionLayer, number: int, cache: CacheArrays, qkv: Floats, token_head: int, scratch: Floats, out: Floats
) -> None:
    """Compute the attention of a token and the heads that share a kv head, as :func:`attend` does."""
    heads, kv_heads, head_dim = layer.heads, layer.kv_heads, layer.head_dim
    group = heads // kv_heads
    token, kv_head = token_head // kv_heads, token_head % kv_heads
    position, start = cache.positions[token], token * (heads + 2 * kv_heads) * head_dim
    first = kv_head * group
    for head in range(group):
        _rotate_head(layer, qkv, start + (first + head) * head_dim, 2 * number, position, scratch, head * head_dim)
    scale = np.float32(layer.scale)
    for i in range(group * head_dim):
        write(scratch, i, read(scratch, i) * scale)
    _score_keys(layer, number, cache, token, kv_head, scratch)
    _sum_values(layer, number, cache, token, kv_head, scratch)
    for head in range(group):
        total = read(scratch, 2 * group * head_dim + head)
        for i in range(head_dim):
            value = read(scratch, (group + head) * head_dim + i) / total
            write(out, (token * heads + first + head) * head_dim + i, value)


@fastmath_kernel
def attend(
    layer: AttentionLayer, cache: CacheArrays, qkv: Floats, first: int, last: int, scratch: Floats, out: Floats
) -> None:
    """Store the new keys and values in the cache, and write the attention of the new queries to ``out`` (N, H, K).

    ``qkv`` (N, H + 2 kv_heads, K) holds queries, keys and values of tokens of different rows. Computes the token
    heads ``first`` to ``last``. ``scratch`` has the size of :func:`count_scratch`: for the queries that share a key and
    value head, the queries, the sums of values, the largest scores or the sums of weights, and the scores or weights.
    """
    for token_head in range(first, last):
        store_kv(layer, ZERO, cache, qkv, token_head)
        attend_head(layer, ZERO, cache, qkv, token_head, scratch, out)


def count_scratch(layer: AttentionLayer, row_pages: int) -> int:
    """Return the number of entries that :func:`attend` needs for sequences of up to ``row_pages`` pages."""
    return layer.heads // layer.kv_heads * (2 * layer.head_dim + 1 + row_pages * PAGE_TOKENS)
