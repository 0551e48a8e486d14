"""What a step of one token more computes besides the products with weights.

It is little work, in many of torch's operators, whose calls take longer than the work. Arrays are flat; those of
``Stored`` are float32, or uint16: the upper half of one, which is a bfloat16. References: :mod:`lm.layers`.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lm.kernels import Longs, summing
from lm.kernels.simd import float_of_bits, prefetch, read, read_float, write, write_float

Floats = npt.NDArray[np.float32]
Stored = npt.NDArray[Any]

_AHEAD = 16  # keys


@summing
def normalize(x: Stored, weight: Stored, eps: float, out: Stored) -> None:
    """RMSNorm of each row of ``x``, as wide as ``weight``, into ``out``."""
    width = len(weight)
    for start in range(0, len(x), width):
        total = np.float32(0)
        for i in range(width):
            total += read_float(x, start + i) * read_float(x, start + i)
        scale = np.float32(1 / math.sqrt(total / width + eps))
        for i in range(width):
            write_float(out, start + i, read_float(x, start + i) * scale * read_float(weight, i))


@summing
def _place_head(
    x: Stored,
    start: int,
    width: int,
    gains: Stored,
    gain: int,
    eps: float,
    cos: Floats,
    sin: Floats,
    position: int,
    out: Stored,
    to: int,
) -> None:
    """One head's query or key ``x[start : start + width]``, normalized if there are gains and turned if there are
    angles, to ``out[to:]``."""
    scale = np.float32(1)
    if len(gains):
        total = np.float32(0)
        for i in range(width):
            total += read_float(x, start + i) * read_float(x, start + i)
        scale = np.float32(1 / math.sqrt(total / width + eps))
    half = width // 2
    for i in range(half):
        even, odd = read_float(x, start + 2 * i) * scale, read_float(x, start + 2 * i + 1) * scale
        if len(gains):
            even *= read_float(gains, gain + 2 * i)
            odd *= read_float(gains, gain + 2 * i + 1)
        if len(cos):
            c, s = read(cos, position * half + i), read(sin, position * half + i)
            even, odd = even * c - odd * s, even * s + odd * c
        write_float(out, to + 2 * i, even)
        write_float(out, to + 2 * i + 1, odd)


@summing
def _exp(x: np.float32) -> np.float32:
    """eˣ for x ≤ 0, within 2 units in the last place; several at a time, where the library's is called for each.

    2ⁿ · e^r with r in ± ln 2 / 2: a polynomial of minimal error (Cephes), and n as the bits of an exponent.
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


@summing
def attend(
    qkv: Stored,
    gains: Stored,
    eps: float,
    cos: Floats,
    sin: Floats,
    keys: Stored,
    values: Stored,
    positions: Longs,
    shape: tuple[int, int, int, int],
    first: int,
    last: int,
    scratch: Floats,
    out: Stored,
) -> None:
    """Attention of one token more in each of the first rows of ``keys`` and ``values`` (rows, kv heads, length, K),
    where its own are put at ``positions`` (B,): ``out`` (B, H, K) for queries, keys and values ``qkv`` (B, H + 2 kv
    heads, K).

    ``shape`` is H, kv heads, length and K. ``gains`` of queries and of keys (2, K) are there with QK-norm, ``cos`` and
    ``sin`` (length, K / 2) with rotary positions. Only pairs of a row and a head of keys from ``first`` to ``last`` are
    done. ``scratch`` has room for 2 K numbers, one more for each key, and three.
    """
    heads, kv_heads, length, width = shape
    group = heads // kv_heads
    scale = np.float32(1 / math.sqrt(width))
    weights = 2 * width
    for pair in range(first, last):
        row, kv_head = pair // kv_heads, pair % kv_heads
        position = positions[row]
        base, start = pair * length * width, row * (heads + 2 * kv_heads) * width
        key, value = start + (heads + kv_head) * width, start + (heads + kv_heads + kv_head) * width
        _place_head(qkv, key, width, gains, width, eps, cos, sin, position, keys, base + position * width)
        for i in range(width):
            write(values, base + position * width + i, read(qkv, value + i))
        for head in range(kv_head * group, (kv_head + 1) * group):
            _place_head(qkv, start + head * width, width, gains, 0, eps, cos, sin, position, scratch, 0)
            largest = np.float32(-np.inf)
            for place in range(0, position + 1, 4):  # four at a time; behind the last one it again, without weight
                at = base + place * width
                bt = base + min(place + 1, position) * width
                ct = base + min(place + 2, position) * width
                dt = base + min(place + 3, position) * width
                a = b = c = d = np.float32(0)
                for i in range(width):
                    x = read(scratch, i)
                    a += x * read_float(keys, at + i)
                    b += x * read_float(keys, bt + i)
                    c += x * read_float(keys, ct + i)
                    d += x * read_float(keys, dt + i)
                # From the main memory all comes in time only if it is asked for: some keys ahead, of this pair or the
                # next, and the values that belong to these.
                ahead = place + _AHEAD
                ahead_at = base + (ahead if ahead <= position else length + ahead - position - 1) * width
                for i in range(0, 4 * width, 16):
                    prefetch(keys, ahead_at + i)
                    prefetch(values, at + i)
                write(scratch, weights + place, a * scale)
                write(scratch, weights + place + 1, b * scale)
                write(scratch, weights + place + 2, c * scale)
                write(scratch, weights + place + 3, d * scale)
                largest = max(largest, max(max(a, b), max(c, d)) * scale)
            total = np.float32(0)
            for place in range(position + 1):
                weight = _exp(read(scratch, weights + place) - largest)
                write(scratch, weights + place, weight)
                total += weight
            for place in range(position + 1, position + 4):
                write(scratch, weights + place, np.float32(0))
            for i in range(width):
                write(scratch, width + i, np.float32(0))
            for place in range(0, position + 1, 4):
                at = base + place * width
                bt = base + min(place + 1, position) * width
                ct = base + min(place + 2, position) * width
                dt = base + min(place + 3, position) * width
                a, b = read(scratch, weights + place), read(scratch, weights + place + 1)
                c, d = read(scratch, weights + place + 2), read(scratch, weights + place + 3)
                for i in range(width):
                    found = read(scratch, width + i) + a * read_float(values, at + i) + b * read_float(values, bt + i)
                    found += c * read_float(values, ct + i) + d * read_float(values, dt + i)
                    write(scratch, width + i, found)
            for i in range(width):
                write_float(out, (row * heads + head) * width + i, read(scratch, width + i) / total)
