"""CPU kernels of a decode step without its matrix products: RMSNorm, and attention of few new tokens.

The work is small; torch needs many operators for it, whose calls take longer. Arrays are flat. Those of ``Stored``
are float32, or bfloat16 as uint16, the upper half of a float32. References: :mod:`lm.model.attention` and
:mod:`lm.model.norm`.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm.kernels.jit import Int64s, fastmath_helper, fastmath_kernel
from lm.kernels.simd import float_of_bits, prefetch, read, read_float, write, write_float

Floats = npt.NDArray[np.float32]
Stored = npt.NDArray[Any]

_PREFETCH_KEYS = 16  # how many keys ahead to prefetch
_ZERO, _ONE = np.int64(0), np.int64(1)  # not literals: numba would compile a helper for each value


class AttentionLayer(NamedTuple):
    """What attention needs of its layer, or of several of one shape: H heads of width K."""

    heads: int
    kv_heads: int
    width: int
    norm_weights: Floats  # (layers, 2, K): QK-norm of queries and of keys; empty without it
    eps: float
    cos: Floats  # (length, K / 2): rotary positions; empty without them
    sin: Floats


class KVCache(NamedTuple):
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
    normalize_rows(x, len(x) // len(weight), weight, _ZERO, len(weight), eps, out)


@fastmath_helper
def normalize_rows(
    x: Stored, rows: int, weight: Stored, weight_start: int, width: int, eps: float, out: Stored
) -> None:
    """Write the RMSNorm of ``rows`` rows of ``x``, with the gains from ``weight_start``, to ``out``."""
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
    width, norm_weights, cos, sin = layer.width, layer.norm_weights, layer.cos, layer.sin
    weight_start = norm_row * width
    scale = _rms_scale(x, start, width, layer.eps) if len(norm_weights) else np.float32(1)
    half = width // 2
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
    if width % 2:  # only without rotary positions
        last = read(x, start + width - 1) * scale
        if len(norm_weights):
            last *= read(norm_weights, weight_start + width - 1)
        write_float(out, out_start + width - 1, last)


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
def _score_keys(cache: KVCache, base: int, position: int, width: int, scratch: Floats) -> np.float32:
    """Write the scaled products of the query ``scratch[:K]`` with keys 0 to ``position`` to ``scratch[2 K:]``.

    The keys start at ``base``. Returns the largest score. Computes four at a time; those after ``position`` repeat it.
    """
    keys, scores = cache.keys, 2 * width
    scale = np.float32(1 / math.sqrt(width))
    largest = np.float32(-np.inf)
    for key in range(0, position + 1, 4):
        at = base + key * width
        bt = base + min(key + 1, position) * width
        ct = base + min(key + 2, position) * width
        dt = base + min(key + 3, position) * width
        a = b = c = d = np.float32(0)
        for i in range(width):
            x = read(scratch, i)
            a += x * read_float(keys, at + i)
            b += x * read_float(keys, bt + i)
            c += x * read_float(keys, ct + i)
            d += x * read_float(keys, dt + i)
        # Main memory is too slow without prefetching: some keys ahead, of this head or the next, and these values.
        ahead = key + _PREFETCH_KEYS
        ahead_at = base + (ahead if ahead <= position else cache.length + ahead - position - 1) * width
        for i in range(0, 4 * width, 16):
            prefetch(keys, ahead_at + i)
            prefetch(cache.values, at + i)
        write(scratch, scores + key, a * scale)
        write(scratch, scores + key + 1, b * scale)
        write(scratch, scores + key + 2, c * scale)
        write(scratch, scores + key + 3, d * scale)
        largest = max(largest, max(max(a, b), max(c, d)) * scale)
    return largest


@fastmath_helper
def _average_values(
    values: Stored, base: int, position: int, width: int, largest: np.float32, scratch: Floats
) -> np.float32:
    """Write the sum of values 0 to ``position``, weighted by exp(score − largest), to ``scratch[K : 2 K]``.

    Returns the sum of the weights. The scores are in ``scratch[2 K:]`` and are overwritten.
    """
    weights = 2 * width
    total = np.float32(0)
    for key in range(position + 1):
        weight = exp(read(scratch, weights + key) - largest)
        write(scratch, weights + key, weight)
        total += weight
    for key in range(position + 1, position + 4):
        write(scratch, weights + key, np.float32(0))
    for i in range(width):
        write(scratch, width + i, np.float32(0))
    for key in range(0, position + 1, 4):
        at = base + key * width
        bt = base + min(key + 1, position) * width
        ct = base + min(key + 2, position) * width
        dt = base + min(key + 3, position) * width
        a, b = read(scratch, weights + key), read(scratch, weights + key + 1)
        c, d = read(scratch, weights + key + 2), read(scratch, weights + key + 3)
        for i in range(width):
            value = read(scratch, width + i) + a * read_float(values, at + i) + b * read_float(values, bt + i)
            value += c * read_float(values, ct + i) + d * read_float(values, dt + i)
            write(scratch, width + i, value)
    return total


@fastmath_helper
def store_pair(layer: AttentionLayer, number: int, cache: KVCache, qkv: Floats, pair: int) -> None:
    """Store the key and the value of a token and a kv head in the cache; ``number`` is the layer in the arrays."""
    heads, kv_heads, width = layer.heads, layer.kv_heads, layer.width
    token, kv_head = pair // kv_heads, pair % kv_heads
    position, start = cache.positions[token], token * (heads + 2 * kv_heads) * width
    key, value = start + (heads + kv_head) * width, start + (heads + kv_heads + kv_head) * width
    place = _find_keys(layer, number, cache, token, kv_head) + position * width
    _rotate_head(layer, qkv, key, 2 * number + _ONE, position, cache.keys, place)
    for i in range(width):
        write_float(cache.values, place + i, read(qkv, value + i))


@fastmath_helper
def _find_keys(layer: AttentionLayer, number: int, cache: KVCache, token: int, kv_head: int) -> int:
    """Return the index of the first key of a token's sequence."""
    row = number * cache.num_rows + cache.rows[token]
    return (row * layer.kv_heads + kv_head) * cache.length * layer.width


@fastmath_helper
def attend_pair(
    layer: AttentionLayer, number: int, cache: KVCache, qkv: Floats, pair: int, scratch: Floats, out: Floats
) -> None:
    """Compute the attention of a token and the heads that share a kv head, as :func:`attend` does."""
    heads, kv_heads, width = layer.heads, layer.kv_heads, layer.width
    group = heads // kv_heads
    token, kv_head = pair // kv_heads, pair % kv_heads
    position, start = cache.positions[token], token * (heads + 2 * kv_heads) * width
    base = _find_keys(layer, number, cache, token, kv_head)
    for head in range(kv_head * group, (kv_head + 1) * group):
        _rotate_head(layer, qkv, start + head * width, 2 * number, position, scratch, _ZERO)
        largest = _score_keys(cache, base, position, width, scratch)
        total = _average_values(cache.values, base, position, width, largest, scratch)
        for i in range(width):
            write(out, (token * heads + head) * width + i, read(scratch, width + i) / total)


@fastmath_kernel
def attend(
    layer: AttentionLayer, cache: KVCache, qkv: Floats, first: int, last: int, scratch: Floats, out: Floats
) -> None:
    """Store the new keys and values in the cache, and write the attention of the new queries to ``out`` (N, H, K).

    ``qkv`` (N, H + 2 kv_heads, K) holds queries, keys and values of tokens of different rows. Only pairs of a token and
    a kv head from ``first`` to ``last`` are computed. ``scratch`` has 2 K + 3 entries and one per key.
    """
    for pair in range(first, last):
        store_pair(layer, _ZERO, cache, qkv, pair)
        attend_pair(layer, _ZERO, cache, qkv, pair, scratch, out)
