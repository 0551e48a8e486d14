"""Numbers from the quantized blocks of a GGUF file: 32 or 256 numbers of a row that share scales.

Source: ``ggml-quants.c`` and ``gguf-py`` of llama.cpp define the layouts. B: blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHUNK_NUMBERS = 1 << 20  # dequantized at once: the temporary arrays stay small


class Block(NamedTuple):
    """A type of blocks."""

    number: int
    """Of the type in a file."""
    num_numbers: int
    num_bytes: int
    dequantize: Callable[[Bytes], Floats]
    """(B, num_bytes) → (B, num_numbers)."""


def dequantize(data: Bytes, type_name: str) -> Floats:
    """Return the float32 numbers of the blocks in ``data``, one-dimensional; its type is one of :data:`BLOCKS`."""
    block = BLOCKS[type_name]
    blocks = data.reshape(-1, block.num_bytes)
    numbers = np.empty((len(blocks), block.num_numbers), np.float32)
    step = _CHUNK_NUMBERS // block.num_numbers
    for start in range(0, len(blocks), step):
        with np.errstate(invalid="ignore", over="ignore"):  # scales that are not finite; the caller checks the weights
            numbers[start : start + step] = block.dequantize(blocks[start : start + step])
    return numbers.reshape(-1)


def _scales(blocks: Bytes, start: int) -> Floats:
    """Return the float16 of each block at the byte ``start``, (B, 1)."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def _nibbles(data: Bytes, run: int) -> Bytes:
    """Return the halves of bytes: of each ``run`` bytes first the low halves, then the high ones. (B, N) → (B, 2N)."""
    runs = data.reshape(len(data), -1, 1, run)
    return (runs >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)).reshape(len(data), -1)


def _bits(data: Bytes) -> Bytes:
    """Return the bits of each block's bytes as 0 or 1, the lowest first. (B, N) → (B, 8N)."""
    return np.unpackbits(data, axis=1, bitorder="little")


def _dequantize_q4_0(blocks: Bytes) -> Floats:
    return _scales(blocks, 0) * (_nibbles(blocks[:, 2:], 16).astype(np.int8) - 8)


def _dequantize_q4_1(blocks: Bytes) -> Floats:
    return _scales(blocks, 0) * _nibbles(blocks[:, 4:], 16) + _scales(blocks, 2)


def _dequantize_q5_0(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 6:], 16) | _bits(blocks[:, 2:6]) << 4
    return _scales(blocks, 0) * (quants.astype(np.int8) - 16)


def _dequantize_q5_1(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 8:], 16) | _bits(blocks[:, 4:8]) << 4
    return _scales(blocks, 0) * quants + _scales(blocks, 2)


def _dequantize_q8_0(blocks: Bytes) -> Floats:
    return _scales(blocks, 0) * blocks[:, 2:].view(np.int8)


def _unpack_scales(data: Bytes) -> tuple[Bytes, Bytes]:
    """Return the 6-bit scales and minima (B, 8, 1) of the 8 parts of a block, from its 12 bytes."""
    first, second, third = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales[..., None], minima[..., None]


def _scale_parts(blocks: Bytes, quants: Bytes) -> Floats:
    """Return numbers from the ``quants`` (B, 256) of Q4_K or Q5_K, in parts of 32 with a scale and a minimum each."""
    scales, minima = _unpack_scales(blocks[:, 4:16])
    scale, minimum = _scales(blocks, 0)[..., None] * scales, _scales(blocks, 2)[..., None] * minima
    return (scale * quants.reshape(len(blocks), 8, 32) - minimum).reshape(len(blocks), 256)


def _dequantize_q4_k(blocks: Bytes) -> Floats:
    return _scale_parts(blocks, _nibbles(blocks[:, 16:], 32))


def _dequantize_q5_k(blocks: Bytes) -> Floats:
    # Bit i of the byte j is the fifth bit of the number j in the part i.
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return _scale_parts(blocks, _nibbles(blocks[:, 48:], 32) | high.reshape(len(blocks), 256) << np.uint8(4))


def _dequantize_q6_k(blocks: Bytes) -> Floats:
    # Two halves of 128 numbers: 64 bytes with the low 4 bits, 32 bytes with the high 2 bits of four parts of 32.
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    quants = _nibbles(blocks[:, :128], 64) | high.reshape(len(blocks), 256) << 4
    scales = _scales(blocks, 208) * blocks[:, 192:208].view(np.int8)
    parts = quants.reshape(len(blocks), 16, 16).astype(np.int8) - 32
    return (scales[..., None] * parts).reshape(len(blocks), 256)


BLOCKS = {
    "Q4_0": Block(2, 32, 18, _dequantize_q4_0),
    "Q4_1": Block(3, 32, 20, _dequantize_q4_1),
    "Q5_0": Block(6, 32, 22, _dequantize_q5_0),
    "Q5_1": Block(7, 32, 24, _dequantize_q5_1),
    "Q8_0": Block(8, 32, 34, _dequantize_q8_0),
    "Q4_K": Block(12, 256, 144, _dequantize_q4_k),
    "Q5_K": Block(13, 256, 176, _dequantize_q5_k),
    "Q6_K": Block(14, 256, 210, _dequantize_q6_k),
}
"""By name. Files of Q4_K and Q5_K have Q5_0, Q5_1 and Q8_0 in matrices whose rows are not blocks of 256."""
