"""Fused decode step: a few new tokens through all layers and the head in one kernel, called by each thread.

Between operators, torch waits for all its threads and runs Python; a step of a small model has a hundred operators.
Here the step is one call per thread. It is a sequence of phases, such as a matmul; each phase is divided into chunks.
A thread takes chunks until none is left, then waits until all are finished. A late thread delays the others by at most
one chunk. One thread alone can finish the step.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.decode.low_rank import LowRankStack, add_row
from lm.kernels.decode.norm_attention import (
    ONE,
    ZERO,
    AttentionLayer,
    CacheArrays,
    attend_head,
    exp,
    normalize_rows,
    store_kv,
)
from lm.kernels.decode.small_batch_matmul import Matrix, matmul_rows
from lm.kernels.jit import Floats, Int, Int64s, Stored, fastmath_helper, fastmath_kernel
from lm.kernels.simd import pause, read, read_shared, take_number, write, yield_cpu

_NO_BIAS = np.int64(-1)
_PAUSES_BEFORE_YIELD = 2000
PHASES_PER_LAYER = 6  # and 4 with adapters


class Adapters(NamedTuple):
    """Adapters for the matrices of L layers, in four groups with the same input: q, k, v; output; w1, w3; w2."""

    numbers: Floats  # of all matrices A and B, see LowRankStack
    starts: Int64s  # (L, 4, 2): of A and of B; -1 for a group without adapters
    ends: Int64s  # (7,): of the outputs of each matrix in its group
    rank: int


class Network(NamedTuple):
    """A model with pre-norm and SwiGLU: L layers, D d_model, F d_ff, H heads, K head_dim, V ids. Arrays are flat."""

    weights: Stored  # of each layer: q, k and v; output; w1; w3; w2. Then the head
    scales: Floats  # of int8 weights: one for each row, in their order; else empty
    norm_weights: Floats  # (2 L + 1, D): of the norms, in their order
    biases: Floats  # (L, (H + 2 kv_heads) K): of q, k and v; empty without them
    attention: AttentionLayer
    num_layers: int
    d_model: int
    d_ff: int
    vocab_size: int
    eps: float
    residual_multiplier: float  # of what a sublayer adds
    value_weights: Floats  # (L, 2): of a layer's values and those of the first; empty without
    adapters: Adapters


class Step(NamedTuple):
    """What the threads of a step with N tokens share."""

    tokens: int
    chunks: int  # of each phase that is large enough
    has_logits: bool  # whether they are computed
    adapters: Int64s  # (N,): of the tokens, 0 for none; empty if all have none
    progress: Int64s  # (phases, 2), 10 L + 1 or 6 L + 1: the taken chunks and the finished ones; zero before the step
    x: Floats  # (N, D): embeddings, then the residual stream
    change: Floats  # (N, D): of the residual stream
    qkv: Floats  # (N, (H + 2 kv_heads) K)
    first_values: Floats  # (N, kv_heads K): of the first layer, for value residuals; else empty
    attended: Floats  # (N, H K)
    gate: Floats  # (N, F)
    value: Floats  # (N, F)
    logits: Floats  # (N, V)
    low_rank: Floats  # (N, W): what the adapters add to the outputs of a group; W is the sum of the largest group


@fastmath_helper
def _after(matrix: Matrix, outputs: int, columns: int) -> Matrix:
    """Return the matrix that is stored after another."""
    weights_start = matrix.weights_start + matrix.outputs * matrix.columns
    scales_start = matrix.scales_start + matrix.outputs
    return Matrix(matrix.weights, matrix.scales, weights_start, scales_start, outputs, columns)


@fastmath_helper
def _take(step: Step, phase: int, size: int) -> tuple[int, int]:
    """Return the first and last index of a chunk of ``size`` indices; twice the same if none is left."""
    chunk, chunks = take_number(step.progress, 2 * phase), min(step.chunks, size)
    if chunk >= chunks:
        return size, size
    return size * chunk // chunks, size * (chunk + 1) // chunks


@fastmath_helper
def _finish(step: Step, phase: int, size: int) -> tuple[int, int]:
    """Finish a chunk and take another."""
    take_number(step.progress, 2 * phase + 1)
    return _take(step, phase, size)


@fastmath_helper
def _wait(step: Step, phase: int, size: int) -> int:
    """Wait until all chunks are finished; return the next phase."""
    pauses, chunks = ZERO, min(step.chunks, size)
    while read_shared(step.progress, 2 * phase + 1) < chunks:
        pauses += 1
        if pauses < _PAUSES_BEFORE_YIELD:
            pause()
        else:
            yield_cpu()
    return phase + 1


@fastmath_helper
def _normalize(network: Network, number: int, step: Step, phase: int, out: Floats) -> None:
    """Write norm ``number`` of the residual stream to ``out``, of this thread, unless the phase has no chunk left."""
    if read_shared(step.progress, 2 * phase) < step.chunks:
        width = network.d_model
        normalize_rows(step.x, step.tokens, network.norm_weights, number * width, width, network.eps, out)


@fastmath_helper
def _has_adapters(network: Network, group: int, step: Step) -> bool:
    """Return whether tokens of the step have adapters for a group of matrices, 4 in a layer."""
    return len(step.adapters) > 0 and read(network.adapters.starts, 2 * group) >= 0


@fastmath_helper
def _adapt(
    network: Network,
    group: int,
    first: int,
    count: int,
    inputs: Floats,
    columns: int,
    step: Step,
    phase: int,
    scratch: Floats,
) -> tuple[int, Int]:
    """Compute a phase if a group of ``count`` matrices has adapters: write their changes to ``step.low_rank``.

    Return the next phase, and the width of a token's changes: 0 without adapters.
    """
    if not _has_adapters(network, group, step):
        return phase, ZERO
    numbers, starts, ends, rank = network.adapters
    a_start, b_start = read(starts, 2 * group), read(starts, 2 * group + 1)
    stack = LowRankStack(numbers, a_start, b_start, rank, columns, ends, first, count)
    width, size = read(ends, first + count - 1), step.tokens
    start, end = _take(step, phase, size)
    while start < end:
        for token in range(start, end):
            adapter, place = read(step.adapters, token), token * width
            for i in range(place, place + width):
                write(step.low_rank, i, np.float32(0))
            if adapter != 0:
                add_row(stack, adapter, inputs, token * columns, scratch, step.low_rank, place)
        start, end = _finish(step, phase, size)
    return _wait(step, phase, size), width


@fastmath_helper
def _multiply(
    matrix: Matrix, inputs: Floats, step: Step, first: int, last: int, out: Floats, width: Int, start: int
) -> None:
    """Compute :func:`matmul_rows`, and add the changes of adapters: those from ``start`` on, of ``width`` a token."""
    matmul_rows(matrix, inputs, step.tokens, first, last, out)
    if width:
        for token in range(step.tokens):
            at, place = token * matrix.outputs, token * width + start
            for i in range(first, last):
                write(out, at + i, read(out, at + i) + read(step.low_rank, place + i))


@fastmath_helper
def _project(
    matrix: Matrix, biases: Floats, bias_start: int, width: Int, normed: Floats, step: Step, phase: int, out: Floats
) -> int:
    """Compute a phase: the matmul of ``normed`` with a matrix, plus a bias if there is one."""
    size = matrix.outputs
    first, last = _take(step, phase, size)
    while first < last:
        _multiply(matrix, normed, step, first, last, out, width, ZERO)
        if bias_start != _NO_BIAS:
            for token in range(step.tokens):
                for i in range(first, last):
                    write(out, token * size + i, read(out, token * size + i) + read(biases, bias_start + i))
        first, last = _finish(step, phase, size)
    return _wait(step, phase, size)


@fastmath_helper
def _mix_values(network: Network, layer: int, step: Step, token_head: int) -> None:
    """Add the values of the first layer to those of this one, or keep them if it is the first."""
    attention = network.attention
    token, head, width = token_head // attention.kv_heads, token_head % attention.kv_heads, attention.head_dim
    row = attention.heads + 2 * attention.kv_heads
    source, kept = (token * row + attention.heads + attention.kv_heads + head) * width, token_head * width
    own, other = read(network.value_weights, 2 * layer), read(network.value_weights, 2 * layer + 1)
    for i in range(width):
        value = read(step.qkv, source + i)
        if layer == 0:
            write(step.first_values, kept + i, value)
        else:
            write(step.qkv, source + i, own * value + other * read(step.first_values, kept + i))


@fastmath_helper
def _store(network: Network, layer: int, cache: CacheArrays, step: Step, phase: int) -> int:
    """Compute a phase: the keys and values enter the cache, also for later tokens of this step."""
    size = step.tokens * network.attention.kv_heads
    first, last = _take(step, phase, size)
    while first < last:
        for token_head in range(first, last):
            if len(network.value_weights):
                _mix_values(network, layer, step, token_head)
            store_kv(network.attention, layer, cache, step.qkv, token_head)
        first, last = _finish(step, phase, size)
    return _wait(step, phase, size)


@fastmath_helper
def _attend(network: Network, layer: int, cache: CacheArrays, step: Step, phase: int, scratch: Floats) -> int:
    """Compute a phase: attention."""
    size = step.tokens * network.attention.kv_heads
    first, last = _take(step, phase, size)
    while first < last:
        for token_head in range(first, last):
            attend_head(network.attention, layer, cache, step.qkv, token_head, scratch, step.attended)
        first, last = _finish(step, phase, size)
    return _wait(step, phase, size)


@fastmath_helper
def _gate(w1: Matrix, w3: Matrix, width: Int, normed: Floats, step: Step, phase: int) -> int:
    """Compute a phase: write silu(w1 x) ⊙ w3 x to ``step.gate``."""
    gate, value, size = step.gate, step.value, w1.outputs
    first, last = _take(step, phase, size)
    while first < last:
        _multiply(w1, normed, step, first, last, gate, width, ZERO)
        _multiply(w3, normed, step, first, last, value, width, size)
        for token in range(step.tokens):
            for at in range(token * size + first, token * size + last):
                z = read(gate, at)
                small = exp(-abs(z))  # not of z, which may be positive
                sigmoid = (np.float32(1) if z >= 0 else small) / (np.float32(1) + small)
                write(gate, at, z * sigmoid * read(value, at))
        first, last = _finish(step, phase, size)
    return _wait(step, phase, size)


@fastmath_helper
def _add_matmul(matrix: Matrix, inputs: Floats, factor: float, width: Int, step: Step, phase: int) -> int:
    """Compute a phase: add ``factor`` times the matmul of ``inputs`` (rows, columns) with a matrix to the residual
    stream."""
    x, change, size, multiplier = step.x, step.change, matrix.outputs, np.float32(factor)
    first, last = _take(step, phase, size)
    while first < last:
        _multiply(matrix, inputs, step, first, last, change, width, ZERO)
        for token in range(step.tokens):
            for at in range(token * size + first, token * size + last):
                write(x, at, read(x, at) + multiplier * read(change, at))
        first, last = _finish(step, phase, size)
    return _wait(step, phase, size)


@fastmath_kernel
def run_step(network: Network, cache: CacheArrays, step: Step, normed: Floats, scratch: Floats) -> None:
    """Run all layers, and the head if ``step.has_logits``, on new tokens with their embeddings in ``step.x``.

    The tokens may be of one row of the cache or of several. Only this thread uses ``normed`` (N, D) and ``scratch``, of
    the size for :func:`lm.kernels.decode.norm_attention.attend` and at least three times the rank of the adapters.
    """
    attention, d_model, d_ff = network.attention, network.d_model, network.d_ff
    q_width = attention.heads * attention.head_dim
    qkv_width = q_width + 2 * attention.kv_heads * attention.head_dim
    matrix, phase = Matrix(network.weights, network.scales, ZERO, ZERO, ZERO, ZERO), ZERO
    for layer in range(network.num_layers):
        group = 4 * layer
        _normalize(network, 2 * layer, step, phase + _has_adapters(network, group, step), normed)
        phase, width = _adapt(network, group, 0, 3, normed, d_model, step, phase, scratch)
        matrix = _after(matrix, qkv_width, d_model)
        bias_start = layer * qkv_width if len(network.biases) else _NO_BIAS
        phase = _project(matrix, network.biases, bias_start, width, normed, step, phase, step.qkv)
        phase = _store(network, layer, cache, step, phase)
        phase = _attend(network, layer, cache, step, phase, scratch)
        phase, width = _adapt(network, group + 1, 3, 1, step.attended, q_width, step, phase, scratch)
        matrix = _after(matrix, d_model, q_width)
        phase = _add_matmul(matrix, step.attended, network.residual_multiplier, width, step, phase)
        _normalize(network, 2 * layer + ONE, step, phase + _has_adapters(network, group + 2, step), normed)
        phase, width = _adapt(network, group + 2, 4, 2, normed, d_model, step, phase, scratch)
        w1 = _after(matrix, d_ff, d_model)
        w3 = _after(w1, d_ff, d_model)
        phase = _gate(w1, w3, width, normed, step, phase)
        phase, width = _adapt(network, group + 3, 6, 1, step.gate, d_ff, step, phase, scratch)
        matrix = _after(w3, d_model, d_ff)
        phase = _add_matmul(matrix, step.gate, network.residual_multiplier, width, step, phase)
    if step.has_logits:
        _normalize(network, 2 * network.num_layers, step, phase, normed)
        matrix = _after(matrix, network.vocab_size, d_model)
        _project(matrix, network.biases, _NO_BIAS, ZERO, normed, step, phase, step.logits)
