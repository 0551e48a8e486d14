"""A step of a few tokens through all layers and the head, by several threads.

Between operators, torch waits for all its threads and runs Python; a step of a small model has a hundred operators.
Here the step is one call for each thread. It is a sequence of sections, such as a product, each divided into portions.
A thread takes portions until none is left, then waits until all are finished. So a thread that starts late or is
interrupted delays the others by one portion at most, and each thread alone would complete the step.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.decode_step import AttentionLayer, KVCache, attend_pair, exp, normalize_rows, store_pair
from lm.kernels.few_rows import Floats, Matrix, Weights, multiply_part
from lm.kernels.jit import Int64s, fastmath_helper, fastmath_kernel
from lm.kernels.simd import pause, read, read_shared, take_number, write, yield_cpu

_ZERO, _ONE = np.int64(0), np.int64(1)  # not literals: numba would compile a helper for each value
_NO_BIAS = np.int64(-1)
_PAUSES_BEFORE_YIELD = 2000
SECTIONS_OF_LAYER = 6


class Network(NamedTuple):
    """A model with pre-norm and SwiGLU: L layers, widths D and F, H heads of width K, and V ids. Arrays are flat."""

    weights: Weights  # of each layer: q, k and v; output; w1; w3; w2. Then the head
    scales: Floats  # of int8 weights: one for each row, in their order; else empty
    gains: Floats  # (2 L + 1, D): of the norms, in their order
    biases: Floats  # (L, (H + 2 kv_heads) K): of q, k and v; empty without them
    attention: AttentionLayer
    num_layers: int
    d_model: int
    d_ff: int
    vocab_size: int
    eps: float


class Step(NamedTuple):
    """What the threads of a step with N tokens share."""

    tokens: int
    portions: int  # of each section that is large enough
    has_logits: bool  # whether they are computed
    progress: Int64s  # (6 L + 1, 2): of each section the taken portions and the finished ones; zero before the step
    x: Floats  # (N, D): embeddings, then the residual stream
    change: Floats  # (N, D): of the residual stream
    qkv: Floats  # (N, (H + 2 kv_heads) K)
    attended: Floats  # (N, H K)
    gate: Floats  # (N, F)
    value: Floats  # (N, F)
    logits: Floats  # (N, V)


@fastmath_helper
def _after(matrix: Matrix, outputs: int, columns: int) -> Matrix:
    """Return the matrix that is stored after another."""
    weights_start = matrix.weights_start + matrix.outputs * matrix.columns
    scales_start = matrix.scales_start + matrix.outputs
    return Matrix(matrix.weights, matrix.scales, weights_start, scales_start, outputs, columns)


@fastmath_helper
def _take(step: Step, section: int, size: int) -> tuple[int, int]:
    """Return the first and last index of a portion of ``size`` indices; twice the same if none is left."""
    portion, portions = take_number(step.progress, 2 * section), min(step.portions, size)
    if portion >= portions:
        return size, size
    return size * portion // portions, size * (portion + 1) // portions


@fastmath_helper
def _finish(step: Step, section: int, size: int) -> tuple[int, int]:
    """Finish a portion and take another."""
    take_number(step.progress, 2 * section + 1)
    return _take(step, section, size)


@fastmath_helper
def _wait(step: Step, section: int, size: int) -> int:
    """Wait until all portions are finished; return the next section."""
    pauses, portions = _ZERO, min(step.portions, size)
    while read_shared(step.progress, 2 * section + 1) < portions:
        pauses += 1
        if pauses < _PAUSES_BEFORE_YIELD:
            pause()
        else:
            yield_cpu()
    return section + 1


@fastmath_helper
def _normalize(network: Network, number: int, step: Step, section: int, out: Floats) -> None:
    """Write the norm ``number`` of the residual stream to ``out``, of this thread, unless the section is all taken."""
    if read_shared(step.progress, 2 * section) < step.portions:
        width = network.d_model
        normalize_rows(step.x, step.tokens, network.gains, number * width, width, network.eps, out)


@fastmath_helper
def _project(
    matrix: Matrix, biases: Floats, bias_start: int, normed: Floats, step: Step, section: int, out: Floats
) -> int:
    """Compute a section: the product of ``normed`` with a matrix, plus a bias if it has one."""
    size = matrix.outputs
    first, last = _take(step, section, size)
    while first < last:
        multiply_part(matrix, normed, step.tokens, first, last, out)
        if bias_start != _NO_BIAS:
            for token in range(step.tokens):
                for i in range(first, last):
                    write(out, token * size + i, read(out, token * size + i) + read(biases, bias_start + i))
        first, last = _finish(step, section, size)
    return _wait(step, section, size)


@fastmath_helper
def _store(network: Network, layer: int, cache: KVCache, step: Step, section: int) -> int:
    """Compute a section: the keys and values enter the cache, also for later tokens of this step."""
    size = step.tokens * network.attention.kv_heads
    first, last = _take(step, section, size)
    while first < last:
        for pair in range(first, last):
            store_pair(network.attention, layer, cache, step.qkv, pair)
        first, last = _finish(step, section, size)
    return _wait(step, section, size)


@fastmath_helper
def _attend(network: Network, layer: int, cache: KVCache, step: Step, section: int, scratch: Floats) -> int:
    """Compute a section: attention."""
    size = step.tokens * network.attention.kv_heads
    first, last = _take(step, section, size)
    while first < last:
        for pair in range(first, last):
            attend_pair(network.attention, layer, cache, step.qkv, pair, scratch, step.attended)
        first, last = _finish(step, section, size)
    return _wait(step, section, size)


@fastmath_helper
def _gate(w1: Matrix, w3: Matrix, normed: Floats, step: Step, section: int) -> int:
    """Compute a section: write silu(w1 x) ⊙ w3 x to ``step.gate``."""
    gate, value, size = step.gate, step.value, w1.outputs
    first, last = _take(step, section, size)
    while first < last:
        multiply_part(w1, normed, step.tokens, first, last, gate)
        multiply_part(w3, normed, step.tokens, first, last, value)
        for token in range(step.tokens):
            for at in range(token * size + first, token * size + last):
                z = read(gate, at)
                small = exp(-abs(z))  # not of z, which may be positive
                sigmoid = (np.float32(1) if z >= 0 else small) / (np.float32(1) + small)
                write(gate, at, z * sigmoid * read(value, at))
        first, last = _finish(step, section, size)
    return _wait(step, section, size)


@fastmath_helper
def _add_product(matrix: Matrix, inputs: Floats, step: Step, section: int) -> int:
    """Compute a section: add the product of ``inputs`` (rows, columns) with a matrix to the residual stream."""
    x, change, size = step.x, step.change, matrix.outputs
    first, last = _take(step, section, size)
    while first < last:
        multiply_part(matrix, inputs, step.tokens, first, last, change)
        for token in range(step.tokens):
            for at in range(token * size + first, token * size + last):
                write(x, at, read(x, at) + read(change, at))
        first, last = _finish(step, section, size)
    return _wait(step, section, size)


@fastmath_kernel
def run_step(network: Network, cache: KVCache, step: Step, normed: Floats, scratch: Floats) -> None:
    """Run the layers and perhaps the head on new tokens, whose embeddings are in ``step.x``.

    The tokens may be of one row of the cache or of several. This thread alone uses ``normed`` (N, D) and ``scratch``,
    which is as that of :func:`lm.kernels.decode_step.attend`.
    """
    attention, d_model, d_ff = network.attention, network.d_model, network.d_ff
    head_width = attention.heads * attention.width
    qkv_width = head_width + 2 * attention.kv_heads * attention.width
    matrix, section = Matrix(network.weights, network.scales, _ZERO, _ZERO, _ZERO, _ZERO), _ZERO
    for layer in range(network.num_layers):
        _normalize(network, 2 * layer, step, section, normed)
        matrix = _after(matrix, qkv_width, d_model)
        bias_start = layer * qkv_width if len(network.biases) else _NO_BIAS
        section = _project(matrix, network.biases, bias_start, normed, step, section, step.qkv)
        section = _store(network, layer, cache, step, section)
        section = _attend(network, layer, cache, step, section, scratch)
        matrix = _after(matrix, d_model, head_width)
        section = _add_product(matrix, step.attended, step, section)
        _normalize(network, 2 * layer + _ONE, step, section, normed)
        w1 = _after(matrix, d_ff, d_model)
        w3 = _after(w1, d_ff, d_model)
        section = _gate(w1, w3, normed, step, section)
        matrix = _after(w3, d_model, d_ff)
        section = _add_product(matrix, step.gate, step, section)
    if step.has_logits:
        _normalize(network, 2 * network.num_layers, step, section, normed)
        matrix = _after(matrix, network.vocab_size, d_model)
        _project(matrix, network.biases, _NO_BIAS, normed, step, section, step.logits)
