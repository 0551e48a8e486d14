"""Triton kernels of FlashAttention-2 (Dao 2023): forward; for the backward pass delta, dK and dV, and dQ.

All tensors are contiguous: queries and outputs (B, T, K), keys and values (B', T, K), log-sum-exp and delta (B, T) in
float32. A program computes one block of rows of its output and loops over the other side, so that nothing is added
atomically and results are the same in each run. Tiles that the causal mask hides are skipped; only tiles on the
diagonal or at the end of the sequence are masked. A head width that is not a power of two is padded in registers.
Scores are in units of log2, because GPUs have an instruction for exp2.

This module imports Triton; only :mod:`lm.model.ops.flash_attention` imports it.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # on the CPU, for tests

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)

# Queries and keys of a tile, warps, and stages of the software pipeline, from large to small tiles.
_FORWARD_TILES = [
    *[(128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 32, 4, 2), (32, 16, 4, 2)],
    (16, 16, 4, 2),
]
_BACKWARD_TILES = [
    *[(64, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2), (32, 16, 4, 2)],
    (16, 16, 4, 2),
]
# Larger tiles need more registers or shared memory than sm_80 and sm_90 have, as compiled without a GPU.
_MAX_ROW_BYTES = 48 << 10  # rows of queries and keys of a tile


def _choose_tiles(configs: list[Any], arguments: dict[str, Any], **constants: Any) -> list[Any]:
    """Return the largest tiles that fit into a GPU's registers."""
    width, element_bytes = constants["PADDED_WIDTH"], arguments["q_ptr"].element_size()
    is_exact = element_bytes == 4 and constants["PRECISION"] == "ieee"

    def fits(config: Any) -> bool:
        queries, keys = config.kwargs["BLOCK_QUERIES"], config.kwargs["BLOCK_KEYS"]
        if is_exact and queries * keys * width > 1 << 15:  # without tensor cores each is an instruction
            return False
        return bool((queries + keys) * width * element_bytes <= _MAX_ROW_BYTES)

    return [config for config in configs if fits(config)][:4] or configs[-1:]


def _autotune(tiles: list[tuple[int, int, int, int]]) -> Callable[[Any], Any]:
    """Measure the tiles on first use of a kernel for a length's power of two, width, dtype and mask; keep the fastest.

    The interpreter takes one size: there is nothing to measure.
    """
    if IS_INTERPRETED.value:
        tiles = [(64, 64, 4, 2)]
    configs = [
        triton.Config({"BLOCK_QUERIES": queries, "BLOCK_KEYS": keys}, num_warps=warps, num_stages=stages)
        for queries, keys, warps, stages in tiles
    ]
    return triton.autotune(
        configs,
        key=["length_key", "IS_CAUSAL", "PRECISION", "WIDTH"],
        prune_configs_by={"early_config_prune": _choose_tiles},
        cache_results=True,
    )


@triton.jit
def _cast(x, dtype: tl.constexpr):
    """Round ``x`` (float32) to ``dtype``."""
    if IS_INTERPRETED and dtype == tl.bfloat16:  # the interpreter's own cast truncates
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _load_rows(pointer, rows, length, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    """Load rows of a (length, WIDTH) matrix; zeros past its end."""
    dims = tl.arange(0, PADDED_WIDTH)
    is_inside = rows[:, None] < length
    if WIDTH != PADDED_WIDTH:
        is_inside &= dims[None, :] < WIDTH
    return tl.load(pointer + rows[:, None] * WIDTH + dims[None, :], mask=is_inside, other=0.0)


@triton.jit
def _store_rows(pointer, values, rows, length, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    """Store rows of a (length, WIDTH) matrix in its dtype."""
    dims = tl.arange(0, PADDED_WIDTH)
    is_inside = rows[:, None] < length
    if WIDTH != PADDED_WIDTH:
        is_inside &= dims[None, :] < WIDTH
    values = _cast(values, pointer.dtype.element_ty)
    tl.store(pointer + rows[:, None] * WIDTH + dims[None, :], values, mask=is_inside)


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr):
    """Return ``a b``, plus ``total`` if it is not None, in float32."""
    if IS_INTERPRETED:  # the interpreter's own product reads the bits of bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _is_visible(rows, columns, length, IS_CAUSAL: tl.constexpr):
    """Return which queries (rows) see which keys (columns); the arguments broadcast."""
    is_visible = columns < length
    if IS_CAUSAL:
        is_visible &= columns <= rows
    return is_visible


@triton.jit
def _attend(
    total, row_sum, row_max, q, k_ptr, v_ptr, rows, start, end, length, scale_log2,
    IS_MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Add the keys from ``start`` to ``end`` to the online softmax of a block of queries."""
    for first in range(start, end, BLOCK_KEYS):
        columns = first + tl.arange(0, BLOCK_KEYS)
        k = _load_rows(k_ptr, columns, length, WIDTH, PADDED_WIDTH)
        v = _load_rows(v_ptr, columns, length, WIDTH, PADDED_WIDTH)
        scores = _dot(q, tl.trans(k), None, PRECISION)
        if IS_MASKED:
            scores = tl.where(_is_visible(rows[:, None], columns[None, :], length, IS_CAUSAL), scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(weights, 1)
        total = _dot(_cast(weights, v.dtype), v, total * correction[:, None], PRECISION)
        row_max = new_max
    return total, row_sum, row_max


@_autotune(_FORWARD_TILES)
@triton.jit(do_not_specialize=["length_key"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, log_sum_exp_ptr, scale, length, length_key, group_size,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the output and the log-sum-exp of a block of queries."""
    blocks = tl.cdiv(length, BLOCK_QUERIES)
    first_row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_QUERIES  # rows with the most keys start first
    head = (tl.program_id(0) // blocks).to(tl.int64)  # offsets of long sequences need 64 bits
    q_ptr += head * length * WIDTH
    out_ptr += head * length * WIDTH
    k_ptr += head // group_size * length * WIDTH
    v_ptr += head // group_size * length * WIDTH
    rows = first_row + tl.arange(0, BLOCK_QUERIES)
    q = _load_rows(q_ptr, rows, length, WIDTH, PADDED_WIDTH)
    total = tl.zeros([BLOCK_QUERIES, PADDED_WIDTH], tl.float32)
    row_sum = tl.zeros([BLOCK_QUERIES], tl.float32)
    row_max = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    # All queries of the block see all keys before full_end.
    full_end = (first_row if IS_CAUSAL else length) // BLOCK_KEYS * BLOCK_KEYS
    end = tl.minimum(first_row + BLOCK_QUERIES, length) if IS_CAUSAL else length
    scale_log2 = scale * _LOG2_E
    total, row_sum, row_max = _attend(
        total, row_sum, row_max, q, k_ptr, v_ptr, rows, 0, full_end, length, scale_log2,
        False, IS_CAUSAL, PRECISION, WIDTH, PADDED_WIDTH, BLOCK_KEYS,
    )  # fmt: skip
    total, row_sum, row_max = _attend(
        total, row_sum, row_max, q, k_ptr, v_ptr, rows, full_end, end, length, scale_log2,
        True, IS_CAUSAL, PRECISION, WIDTH, PADDED_WIDTH, BLOCK_KEYS,
    )  # fmt: skip
    _store_rows(out_ptr, total / row_sum[:, None], rows, length, WIDTH, PADDED_WIDTH)
    log_sum_exp = (row_max + tl.log2(row_sum)) * _LN_2
    tl.store(log_sum_exp_ptr + head * length + rows, log_sum_exp, mask=rows < length)


@triton.jit
def delta_kernel(
    out_ptr, grad_ptr, delta_ptr, rows_count,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Compute ``delta``, the dot product of each row of the output and of its gradient."""
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    out = _load_rows(out_ptr, rows, rows_count, WIDTH, PADDED_WIDTH).to(tl.float32)
    grad = _load_rows(grad_ptr, rows, rows_count, WIDTH, PADDED_WIDTH).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(out * grad, 1), mask=rows < rows_count)


@triton.jit
def _add_key_value_gradients(
    grad_k, grad_v, k, v, q_ptr, grad_ptr, log_sum_exp_ptr, delta_ptr, columns, start, end, length, scale_log2,
    IS_MASKED: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, BLOCK_QUERIES: tl.constexpr,
):  # fmt: skip
    """Add what the queries from ``start`` to ``end`` of a head contribute. Tiles are transposed: (keys, queries).

    Rows past the end of the sequence are zeros in ``q`` and in the gradient, so they contribute nothing.
    """
    for first in range(start, end, BLOCK_QUERIES):
        rows = first + tl.arange(0, BLOCK_QUERIES)
        q = _load_rows(q_ptr, rows, length, WIDTH, PADDED_WIDTH)
        grad = _load_rows(grad_ptr, rows, length, WIDTH, PADDED_WIDTH)
        log_sum_exp = tl.load(log_sum_exp_ptr + rows, mask=rows < length, other=0.0)
        delta = tl.load(delta_ptr + rows, mask=rows < length, other=0.0)
        scores = _dot(k, tl.trans(q), None, PRECISION)
        weights = tl.exp2(scores * scale_log2 - (log_sum_exp * _LOG2_E)[None, :])
        if IS_MASKED:
            weights = tl.where(_is_visible(rows[None, :], columns[:, None], length, True), weights, 0.0)
        grad_v = _dot(_cast(weights, grad.dtype), grad, grad_v, PRECISION)
        grad_weights = _dot(v, tl.trans(grad), None, PRECISION)
        grad_scores = weights * (grad_weights - delta[None, :])
        grad_k = _dot(_cast(grad_scores, q.dtype), q, grad_k, PRECISION)
    return grad_k, grad_v


@_autotune(_BACKWARD_TILES)
@triton.jit(do_not_specialize=["length_key"])
def key_value_gradient_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, log_sum_exp_ptr, delta_ptr, grad_k_ptr, grad_v_ptr,
    scale, length, length_key, group_size,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values, over all query heads of their group."""
    blocks = tl.cdiv(length, BLOCK_KEYS)
    first_column = tl.program_id(0) % blocks * BLOCK_KEYS  # keys with the most queries start first
    kv_head = (tl.program_id(0) // blocks).to(tl.int64)
    offset = kv_head * length * WIDTH
    columns = first_column + tl.arange(0, BLOCK_KEYS)
    k = _load_rows(k_ptr + offset, columns, length, WIDTH, PADDED_WIDTH)
    v = _load_rows(v_ptr + offset, columns, length, WIDTH, PADDED_WIDTH)
    grad_k = tl.zeros([BLOCK_KEYS, PADDED_WIDTH], tl.float32)
    grad_v = tl.zeros([BLOCK_KEYS, PADDED_WIDTH], tl.float32)
    scale_log2 = scale * _LOG2_E
    # Queries from full_start on see all keys of the block.
    start = first_column // BLOCK_QUERIES * BLOCK_QUERIES if IS_CAUSAL else 0
    full_start = tl.cdiv(first_column + BLOCK_KEYS, BLOCK_QUERIES) * BLOCK_QUERIES if IS_CAUSAL else 0
    for member in range(group_size):
        head = kv_head * group_size + member
        head_q_ptr, head_grad_ptr = q_ptr + head * length * WIDTH, grad_ptr + head * length * WIDTH
        head_log_sum_exp_ptr, head_delta_ptr = log_sum_exp_ptr + head * length, delta_ptr + head * length
        if IS_CAUSAL:
            grad_k, grad_v = _add_key_value_gradients(
                grad_k, grad_v, k, v, head_q_ptr, head_grad_ptr, head_log_sum_exp_ptr, head_delta_ptr, columns,
                start, tl.minimum(full_start, length), length, scale_log2,
                True, PRECISION, WIDTH, PADDED_WIDTH, BLOCK_QUERIES,
            )  # fmt: skip
        grad_k, grad_v = _add_key_value_gradients(
            grad_k, grad_v, k, v, head_q_ptr, head_grad_ptr, head_log_sum_exp_ptr, head_delta_ptr, columns,
            full_start, length, length, scale_log2,
            False, PRECISION, WIDTH, PADDED_WIDTH, BLOCK_QUERIES,
        )  # fmt: skip
    _store_rows(grad_k_ptr + offset, grad_k * scale, columns, length, WIDTH, PADDED_WIDTH)
    _store_rows(grad_v_ptr + offset, grad_v, columns, length, WIDTH, PADDED_WIDTH)


@triton.jit
def _add_query_gradient(
    grad_q, q, grad, log_sum_exp_log2, delta, k_ptr, v_ptr, rows, start, end, length, scale_log2,
    IS_MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Add what the keys from ``start`` to ``end`` contribute."""
    for first in range(start, end, BLOCK_KEYS):
        columns = first + tl.arange(0, BLOCK_KEYS)
        k = _load_rows(k_ptr, columns, length, WIDTH, PADDED_WIDTH)
        v = _load_rows(v_ptr, columns, length, WIDTH, PADDED_WIDTH)
        scores = _dot(q, tl.trans(k), None, PRECISION)
        weights = tl.exp2(scores * scale_log2 - log_sum_exp_log2[:, None])
        if IS_MASKED:  # past the end of the sequence the weights may be infinite
            weights = tl.where(_is_visible(rows[:, None], columns[None, :], length, IS_CAUSAL), weights, 0.0)
        grad_weights = _dot(grad, tl.trans(v), None, PRECISION)
        grad_scores = weights * (grad_weights - delta[:, None])
        grad_q = _dot(_cast(grad_scores, k.dtype), k, grad_q, PRECISION)
    return grad_q


@_autotune(_BACKWARD_TILES)
@triton.jit(do_not_specialize=["length_key"])
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, log_sum_exp_ptr, delta_ptr, grad_q_ptr, scale, length, length_key, group_size,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of queries."""
    blocks = tl.cdiv(length, BLOCK_QUERIES)
    first_row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_QUERIES
    head = (tl.program_id(0) // blocks).to(tl.int64)
    offset, kv_offset = head * length * WIDTH, head // group_size * length * WIDTH
    rows = first_row + tl.arange(0, BLOCK_QUERIES)
    q = _load_rows(q_ptr + offset, rows, length, WIDTH, PADDED_WIDTH)
    grad = _load_rows(grad_ptr + offset, rows, length, WIDTH, PADDED_WIDTH)
    log_sum_exp_log2 = tl.load(log_sum_exp_ptr + head * length + rows, mask=rows < length, other=0.0) * _LOG2_E
    delta = tl.load(delta_ptr + head * length + rows, mask=rows < length, other=0.0)
    grad_q = tl.zeros([BLOCK_QUERIES, PADDED_WIDTH], tl.float32)
    full_end = (first_row if IS_CAUSAL else length) // BLOCK_KEYS * BLOCK_KEYS
    end = tl.minimum(first_row + BLOCK_QUERIES, length) if IS_CAUSAL else length
    scale_log2 = scale * _LOG2_E
    grad_q = _add_query_gradient(
        grad_q, q, grad, log_sum_exp_log2, delta, k_ptr + kv_offset, v_ptr + kv_offset, rows, 0, full_end, length,
        scale_log2, False, IS_CAUSAL, PRECISION, WIDTH, PADDED_WIDTH, BLOCK_KEYS,
    )  # fmt: skip
    grad_q = _add_query_gradient(
        grad_q, q, grad, log_sum_exp_log2, delta, k_ptr + kv_offset, v_ptr + kv_offset, rows, full_end, end, length,
        scale_log2, True, IS_CAUSAL, PRECISION, WIDTH, PADDED_WIDTH, BLOCK_KEYS,
    )  # fmt: skip
    _store_rows(grad_q_ptr + offset, grad_q * scale, rows, length, WIDTH, PADDED_WIDTH)
