"""Decode step on a CPU between its matmuls: RMSNorm, QK-norm, rotary positions and attention of a few new tokens.

Torch needs many operators for this little work, and calling them takes longer than the work. Arrays are flat. The
references are :mod:`lm.model.attention` and :mod:`lm.model.norm`.

N new tokens, H query heads, K head_dim. A *token head* is a new token and one of its key and value heads.
"""

import math
from typing import NamedTuple

import numpy as np

from lm.kernels.jit import Floats, Int64s, Stored, fastmath_helper, fastmath_kernel
from lm.kernels.simd import float_of_bits, prefetch, read, read_float, write, write_float

_PREFETCH_KEYS = 16  # how many keys ahead to prefetch
ZERO, ONE = np.int64(0), np.int64(1)  # not literals: numba would compile a helper for each value


class AttentionLayer(NamedTuple):
    """Shape and parameters of the attention of one layer, or of several layers of one shape."""

    heads: int
    kv_heads: int
    head_dim: int
    norm_weights: Floats  # (layers, 2, K): QK-norm of queries and of keys; empty without it
    eps: float
    cos: Floats  # (length, K / 2): rotary positions; empty without them
    sin: Floats


class CacheArrays(NamedTuple):
    """Keys and values of one layer, or of several."""

    keys: Stored  # (layers, num_rows, kv_heads, length, K)
    values: Stored
    num_rows: int
    length: int
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
    weight_start = norm_row * head_dim
    scale = _rms_scale(x, start, head_dim, layer.eps) if len(norm_weights) else np.float32(1)
    half = head_dim // 2
    for i in range(half):
        even, odd = read(x, start + 2 * i) * scale, read(x, start + 2 * i + 1) * scale
        if len(norm_weights):
            even *= read(norm_weights, weight_start + 2 * i)
            odd *= read(norm_weights, weight_start + 2 * i + 1)
        if len(cos):
            c, s = read(cos, position * half + i), read(sin, position * half + i)
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
def _score_keys(cache: CacheArrays, base: int, position: int, head_dim: int, scratch: Floats) -> np.float32:
    """Write the scores of the query ``scratch[:K]`` and keys 0 to ``position`` to ``scratch[2 K:]``.

    The keys start at ``base``. Returns the largest score. Computes four at a time; those after ``position`` repeat it.
    """
    keys, scores = cache.keys, 2 * head_dim
    scale = np.float32(1 / math.sqrt(head_dim))
    largest = np.float32(-np.inf)
    for key in range(0, position + 1, 4):
        at = base + key * head_dim
        bt = base + min(key + 1, position) * head_dim
        ct = base + min(key + 2, position) * head_dim
        dt = base + min(key + 3, position) * head_dim
        a = b = c = d = np.float32(0)
        for i in range(head_dim):
            x = read(scratch, i)
            a += x * read_float(keys, at + i)
            b += x * read_float(keys, bt + i)
            c += x * read_float(keys, ct + i)
            d += x * read_float(keys, dt + i)
        # Main memory is too slow without prefetching: some keys ahead, of this head or the next, and these values.
        ahead = key + _PREFETCH_KEYS
        ahead_at = base + (ahead if ahead <= position else cache.length + ahead - position - 1) * head_dim
        for i in range(0, 4 * head_dim, 16):
            prefetch(keys, ahead_at + i)
            prefetch(cache.values, at + i)
        write(scratch, scores + key, a * scale)
        write(scratch, scores + key + 1, b * scale)
        write(scratch, scores + key + 2, c * scale)
        write(scratch, scores + key + 3, d * scale)
        largest = max(largest, max(max(a, b), max(c, d)) * scale)
    return largest


@fastmath_helper
def _sum_values(
    values: Stored, base: int, position: int, head_dim: int, largest: np.float32, scratch: Floats
) -> np.float32:
    """Write the sum of values 0 to ``position``, weighted by exp(score − largest), to ``scratch[K : 2 K]``.

    Returns the sum of the weights. The scores are in ``scratch[2 K:]`` and are overwritten.
    """
    weights = 2 * head_dim
    total = np.float32(0)
    for key in range(position + 1):
        weight = exp(read(scratch, weights + key) - largest)
        write(scratch, weights + key, weight)
        total += weight
    for key in range(position + 1, position + 4):
        write(scratch, weights + key, np.float32(0))
    for i in range(head_dim):
        write(scratch, head_dim + i, np.float32(0))
    for key in range(0, position + 1, 4):
        at = base + key * head_dim
        bt = base + min(key + 1, position) * head_dim
        ct = base + min(key + 2, position) * head_dim
        dt = base + min(key + 3, position) * head_dim
        a, b = read(scratch, weights + key), read(scratch, weights + key + 1)
        c, d = read(scratch, weights + key + 2), read(scratch, weights + key + 3)
        for i in range(head_dim):
            value = read(scratch, head_dim + i) + a * read_float(values, at + i) + b * read_float(values, bt + i)
            value += c * read_float(values, ct + i) + d * read_float(values, dt + i)
            write(scratch, head_dim + i, value)
    return total


@fastmath_helper
def store_kv(layer: AttentionLayer, number: int, cache: CacheArrays, qkv: Floats, token_head: int) -> None:
    """Store the key and the value of a token and a kv head in the cache; ``number`` is the layer in the arrays."""
    heads, kv_heads, head_dim = layer.heads, layer.kv_heads, layer.head_dim
    token, kv_head = token_head // kv_heads, token_head % kv_heads
    position, start = cache.positions[token], token * (heads + 2 * kv_heads) * head_dim
    key, value = start + (heads + kv_head) * head_dim, start + (heads + kv_heads + kv_head) * head_dim
    place = _first_key(layer, number, cache, token, kv_head) + position * head_dim
    _rotate_head(layer, qkv, key, 2 * number + ONE, position, cache.keys, place)
    for i in range(head_dim):
        write_float(cache.values, place + i, read(qkv, value + i))


@fastmath_helper
def _first_key(layer: AttentionLayer, number: int, cache: CacheArrays, token: int, kv_head: int) -> int:
    """Return the index of the first key of a token's sequence."""
    row = number * cache.num_rows + cache.rows[token]
    return (row * layer.kv_heads + kv_head) * cache.length * layer.head_dim


@fastmath_helper
def attend_head(
    layer: AttentionLayer, number: int, cache: CacheArrays, qkv: Floats, token_head: int, scratch: Floats, out: Floats
) -> None:
    """Compute the attention of a token and the heads that share a kv head, as :func:`attend` does."""
    heads, kv_heads, head_dim = layer.heads, layer.kv_heads, layer.head_dim
    group = heads // kv_heads
    token, kv_head = token_head // kv_heads, token_head % kv_heads
    position, start = cache.positions[token], token * (heads + 2 * kv_heads) * head_dim
    base = _first_key(layer, number, cache, token, kv_head)
    for head in range(kv_head * group, (kv_head + 1) * group):
        _rotate_head(layer, qkv, start + head * head_dim, 2 * number, position, scratch, ZERO)
        largest = _score_keys(cache, base, position, head_dim, scratch)
        total = _sum_values(cache.values, base, position, head_dim, largest, scratch)
        for i in range(head_dim):
            write(out, (token * heads + head) * head_dim + i, read(scratch, head_dim + i) / total)


@fastmath_kernel
def attend(
    layer: AttentionLayer, cache: CacheArrays, qkv: Floats, first: int, last: int, scratch: Floats, out: Floats
) -> None:
    """Store the new keys and values in the cache, and write the attention of the new queries to ``out`` (N, H, K).

    ``qkv`` (N, H + 2 kv_heads, K) holds queries, keys and values of tokens of different rows. Computes the token
    heads ``first`` to ``last``. ``scratch`` has 2 K + 3 entries and one per key.
    """
    for token_head in range(first, last):
        store_kv(layer, ZERO, cache, qkv, token_head)
        attend_head(layer, ZERO, cache, qkv, token_head, scratch, out)
