"""Triton kernels of a decode step of a small batch: matmul with norm and residual, and attention over the KV cache.

A step reads every weight once, so memory bandwidth limits its speed. Few kernels leave little time between the reads.
The kernels of a layer are: norm and projections of queries, keys and values; attention; output projection and residual;
norm and gated values; matmul and residual. Numbers are float32 between loads and stores, except for the factors of
matmuls of several rows.

This module imports Triton, which is an extra; only :mod:`lm.inference.runners.cuda_runner` imports it.
"""

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # on the CPU, for tests


@triton.jit
def matmul(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, eps, num_rows,
    PADDED_ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Write a block of the outputs (rows, OUTPUTS): ``norm(x) weightᵀ``, plus ``bias`` and ``residual``.

    The norm is RMSNorm with the weight ``norm``, best for one row: each program computes it again. If gated, the weight
    has twice as many rows, and the result is that of SwiGLU: ``silu(x₁) ⊙ x₂`` with (x₁, x₂) = ``norm(x) weightᵀ``.
    """
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_output = outputs < OUTPUTS
    weight_rows = weight_ptr + outputs.to(tl.int64)[:, None] * INPUTS
    rows = tl.arange(0, PADDED_ROWS)
    is_row = rows < num_rows
    # One row: products are summed at the end. Several: tensor cores multiply.
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_INPUTS) if PADDED_ROWS == 1 else (PADDED_ROWS, BLOCK_OUTPUTS), tl.float32)
    value = total
    squares = tl.zeros((PADDED_ROWS, BLOCK_INPUTS), tl.float32)
    for start in range(0, INPUTS, BLOCK_INPUTS):
        inputs = start + tl.arange(0, BLOCK_INPUTS)
        is_input = inputs < INPUTS
        is_weight = is_output[:, None] & is_input[None, :]
        places = rows[:, None] * INPUTS + inputs[None, :]
        x = tl.load(x_ptr + places, mask=is_row[:, None] & is_input[None, :], other=0.0).to(tl.float32)
        if HAS_NORM:  # the factor of a row, 1 / rms, follows after the sum
            squares += x * x
            x *= tl.load(norm_ptr + inputs, mask=is_input, other=0.0).to(tl.float32)[None, :]
        weight = tl.load(weight_rows + inputs[None, :], mask=is_weight, other=0.0)
        total = _add_products(total, x, weight, PADDED_ROWS)
        if IS_GATED:
            weight = tl.load(weight_rows + OUTPUTS * INPUTS + inputs[None, :], mask=is_weight, other=0.0)
            value = _add_products(value, x, weight, PADDED_ROWS)
    factor = tl.rsqrt(tl.sum(squares, 1) / INPUTS + eps)[:, None] if HAS_NORM else 1.0
    out = _sum_products(total, PADDED_ROWS) * factor
    if IS_GATED:
        out *= tl.sigmoid(out) * _sum_products(value, PADDED_ROWS) * factor
    places = rows[:, None] * OUTPUTS + outputs[None, :]
    is_place = is_row[:, None] & is_output[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        out += tl.load(residual_ptr + places, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=is_place)


@triton.jit
def _add_products(total, x, weight, PADDED_ROWS: tl.constexpr):
    """Add the products of ``x`` (rows, inputs) with ``weight`` (outputs, inputs)."""
    if PADDED_ROWS == 1:
        total += weight.to(tl.float32) * x
    else:
        factor = x.to(weight.dtype)
        if IS_INTERPRETED:  # the interpreter's own product reads the bits of bfloat16 as integers
            factor, weight = factor.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(factor, tl.trans(weight), total)
    return total


@triton.jit
def _sum_products(total, PADDED_ROWS: tl.constexpr):
    """Return the sums (rows, outputs) of what :func:`_add_products` made."""
    return tl.sum(total, 1)[None, :] if PADDED_ROWS == 1 else total


@triton.jit
def _rotate(x_ptr, norm_ptr, cos_ptr, sin_ptr, i, mask, eps, HEAD_DIM, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr):
    """Return a head (head_dim,) with QK-norm, and with the rotary position of ``cos`` and ``sin``."""
    x = tl.load(x_ptr + i, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / HEAD_DIM + eps)
    if HAS_NORM:
        x *= factor * tl.load(norm_ptr + i, mask=mask, other=0.0).to(tl.float32)
    if HAS_ROPE:
        other = tl.load(x_ptr + (i ^ 1), mask=mask, other=0.0).to(tl.float32)  # of the same pair
        if HAS_NORM:
            other *= factor * tl.load(norm_ptr + (i ^ 1), mask=mask, other=0.0).to(tl.float32)
        cos, sin = tl.load(cos_ptr + i // 2, mask=mask, other=0.0), tl.load(sin_ptr + i // 2, mask=mask, other=0.0)
        x = x * cos + tl.where(i % 2 == 0, -other, other) * sin
    return x


@triton.jit
def attend(
    qkv_ptr, keys_ptr, values_ptr, pages_ptr, positions_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, out_ptr, eps,
    scale, num_pages, row_pages, heads, kv_heads,
    HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, PAGE_TOKENS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Attend from a query to a split of the keys of its row. The split with the new token also stores its key and
    value. Keys and values are (kv_heads, num_pages, PAGE_TOKENS, head_dim); ``pages`` (rows, row_pages) are those of
    each row.

    The last axis of ``qkv`` is the queries, keys and values of all heads. ``out`` receives the attention (rows, heads,
    head_dim) if one split has all keys. Else it receives, for :func:`combine_splits`, the weighted sum of values, the
    largest score and the sum of weights (rows, heads, splits, head_dim + 2), float32.
    """
    row, head, split = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    group_size = heads // kv_heads
    kv_head = head // group_size
    position = tl.load(positions_ptr + row)
    i = tl.arange(0, PADDED_HEAD_DIM)
    is_inside = i < HEAD_DIM
    row_ptr = qkv_ptr + row * (heads + 2 * kv_heads) * HEAD_DIM
    key_ptr = row_ptr + (heads + kv_head) * HEAD_DIM
    cos_ptr += position * (HEAD_DIM // 2)
    sin_ptr += position * (HEAD_DIM // 2)
    q = _rotate(
        row_ptr + head * HEAD_DIM, q_norm_ptr, cos_ptr, sin_ptr, i, is_inside, eps, HEAD_DIM, HAS_NORM, HAS_ROPE
    ) * scale  # fmt: skip
    new_k = _rotate(key_ptr, k_norm_ptr, cos_ptr, sin_ptr, i, is_inside, eps, HEAD_DIM, HAS_NORM, HAS_ROPE)
    new_k = new_k.to(keys_ptr.dtype.element_ty)
    new_v = tl.load(key_ptr + kv_heads * HEAD_DIM + i, mask=is_inside, other=0.0)
    key = split * SPLIT_KEYS + tl.arange(0, SPLIT_KEYS)
    page = tl.load(pages_ptr + row * row_pages + key // PAGE_TOKENS, mask=key <= position, other=0)
    places = ((kv_head * num_pages + page) * PAGE_TOKENS + key % PAGE_TOKENS)[:, None] * HEAD_DIM + i[None, :]
    is_old = (key < position)[:, None] & is_inside[None, :]
    is_new = (key == position)[:, None] & is_inside[None, :]
    k = tl.load(keys_ptr + places, mask=is_old, other=0.0)
    v = tl.load(values_ptr + places, mask=is_old, other=0.0)
    k, v = tl.where(is_new, new_k[None, :], k), tl.where(is_new, new_v[None, :], v)
    if head % group_size == 0:
        tl.store(keys_ptr + places, k, mask=is_new)
        tl.store(values_ptr + places, v, mask=is_new)
    is_seen = key <= position
    scores = tl.where(is_seen, tl.sum(q[None, :] * k.to(tl.float32), 1), float("-inf"))
    largest = tl.max(scores, 0)  # -inf in a split after the new token
    weights = tl.exp(scores - tl.where(split * SPLIT_KEYS <= position, largest, 0.0))
    total, summed = tl.sum(weights, 0), tl.sum(weights[:, None] * v.to(tl.float32), 0)
    if IS_WHOLE:
        out = (summed / total).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + tl.program_id(0) * HEAD_DIM + i, out, mask=is_inside)
    else:
        out_ptr += (tl.program_id(0) * tl.num_programs(1) + split) * (HEAD_DIM + 2)
        tl.store(out_ptr + i, summed, mask=is_inside)
        tl.store(out_ptr + HEAD_DIM, largest)
        tl.store(out_ptr + HEAD_DIM + 1, total)


@triton.jit
def combine_splits(
    split_ptr, out_ptr, splits, HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr
):
    """Write the attention of a head (head_dim,) from the splits of :func:`attend`."""
    i = tl.arange(0, PADDED_HEAD_DIM)
    largest, total = float("-inf"), 0.0
    summed = tl.zeros((PADDED_HEAD_DIM,), tl.float32)
    for start in range(0, splits, BLOCK_SPLITS):  # the first block has a key
        split = start + tl.arange(0, BLOCK_SPLITS)
        is_split = split < splits
        rows = split_ptr + (tl.program_id(0) * splits + split) * (HEAD_DIM + 2)
        split_largest = tl.load(rows + HEAD_DIM, mask=is_split, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(split_largest, 0))
        factor, weights = tl.exp(largest - new_largest), tl.exp(split_largest - new_largest)
        values = tl.load(rows[:, None] + i[None, :], mask=is_split[:, None] & (i < HEAD_DIM)[None, :], other=0.0)
        total = total * factor + tl.sum(weights * tl.load(rows + HEAD_DIM + 1, mask=is_split, other=0.0), 0)
        summed = summed * factor + tl.sum(values * weights[:, None], 0)
        largest = new_largest
    out = (summed / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.program_id(0) * HEAD_DIM + i, out, mask=i < HEAD_DIM)
