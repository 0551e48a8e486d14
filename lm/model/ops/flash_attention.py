"""FlashAttention-2 (Dao 2023): in plain torch operations, the readable form, and in Triton, for GPUs.

Attention is computed tile by tile: a block of queries against a block of keys. No tensor has T × T elements, so memory
grows with T. The forward pass saves the log-sum-exp of each query's scores; with it the backward pass recomputes the
attention weights of a tile without the other tiles of its row. The passes are operators of torch: torch.compile would
unroll the loops of the one form, and need not look into the kernels of the other.
Triton is an extra: :mod:`lm.model.ops.flash_attention_triton` is imported on first use.
Shapes: N = batch · query heads, M = batch · key and value heads, G = N / M query heads that share one, T tokens,
K head_dim.
"""

from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.common.errors import UserError

_BLOCK_QUERIES = 128  # of the form in torch
_BLOCK_KEYS = 128
_MAX_HEAD_DIM = 256  # of the kernels, as the lines below
_DELTA_BLOCK_ROWS = 32


def flash_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """Return causal attention by FlashAttention-2 for (batch, heads, T, K): in Triton on GPUs, in torch elsewhere."""
    function = FlashAttentionTriton if q_BHTK.device.type == "cuda" else FlashAttentionTorch
    out: Tensor = function.apply(*(x.flatten(0, 1) for x in (q_BHTK, k_BGTK, v_BGTK)), True)
    return out.view(q_BHTK.shape)


class FlashAttentionTorch(torch.autograd.Function):
    """Attention ``softmax(q kᵀ / sqrt(K)) v``: ``FlashAttentionTorch.apply(q, k, v, is_causal)`` → (N, T, K).

    ``q`` (N, T, K); ``k`` and ``v`` (M, T, K). N / M consecutive rows of ``q`` share a row of ``k`` and ``v``. Tiles
    are computed in float32, or in float64 for float64 inputs. Saves ``q``, ``k``, ``v``, the output and the log-sum-exp
    (N, T). Raises UserError if the shapes or dtypes do not fit together.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Compute attention, and save what the backward pass needs."""
        _check_inputs(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            out, log_sum_exp = tiled_attention(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, out, log_sum_exp)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of the inputs."""
        with torch.autocast(grad.device.type, enabled=False):
            q, k, v, out, log_sum_exp = ctx.saved_tensors
            return *_backward(q, k, v, out, log_sum_exp, grad, ctx.is_causal), None


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise UserError if FlashAttention cannot be computed for ``q``, ``k`` and ``v``."""
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[1:] != k.shape[1:]:
        raise UserError(
            f"FlashAttention needs q (B, T, K), and k and v (B', T, K) with the same T and K; got {shapes}."
        )
    if not len(k) or len(q) % len(k):
        raise UserError(f"The first dimension of q must be a multiple of that of k and v; got {shapes}.")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise UserError(f"q, k and v must have one floating-point dtype; got {q.dtype}, {k.dtype} and {v.dtype}.")


class FlashAttentionTriton(torch.autograd.Function):
    """The same as :class:`FlashAttentionTorch`, with the same saved tensors, in Triton.

    Head widths up to 256, in bfloat16, float16 or float32. Products of float32 tiles are exact to float32, or run on
    tensor cores after ``torch.set_float32_matmul_precision("high")``. The kernels are tuned on first use for a head
    width, dtype and mask, and for each power of two of T. Raises UserError if Triton is missing, or if the tensors are
    on a CPU and Triton's interpreter is off.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Compute attention, and save what the backward pass needs."""
        _check_inputs(q, k, v)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, log_sum_exp = flash_attention_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, out, log_sum_exp)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of the inputs."""
        return *flash_attention_backward(*ctx.saved_tensors, grad.contiguous(), ctx.is_causal), None


@torch.library.custom_op("textmill::tiled_attention", mutates_args=())
def tiled_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output (N, T, K) and the log-sum-exp of each query's scores (N, T). Algorithm 1 of the paper."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q_MGTK, k_M1TK, v_M1TK = q.unflatten(0, (len(k), -1)), k[:, None], v[:, None]
    out_MGTK = q_MGTK.new_empty(q_MGTK.shape)
    log_sum_exp_MGT = q_MGTK.new_empty(q_MGTK.shape[:-1], dtype=dtype)
    for rows in _blocks(q.shape[1], _BLOCK_QUERIES):
        query = q_MGTK[..., rows, :].to(dtype)
        total = torch.zeros_like(query)  # Σ exp(score - row_max) · value over the keys so far
        row_sum = query.new_zeros(*query.shape[:-1], 1)  # Σ exp(score - row_max)
        row_max = torch.full_like(row_sum, float("-inf"))
        for columns in _blocks(rows.stop if is_causal else q.shape[1], _BLOCK_KEYS):
            key, value = k_M1TK[..., columns, :].to(dtype), v_M1TK[..., columns, :].to(dtype)
            scores = _tile_scores(query, key, rows, columns, is_causal)
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            weights, correction = torch.exp(scores - new_max), torch.exp(row_max - new_max)
            total = total * correction + weights @ value
            row_sum = row_sum * correction + weights.sum(-1, keepdim=True)
            row_max = new_max
        out_MGTK[..., rows, :] = (total / row_sum).to(out_MGTK.dtype)
        log_sum_exp_MGT[..., rows] = (row_max + row_sum.log()).squeeze(-1)
    return out_MGTK.flatten(0, 1), log_sum_exp_MGT.flatten(0, 1)


@torch.library.custom_op("textmill::tiled_attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_exp: Tensor, grad: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v``. Algorithm 2 of the paper."""
    dtype, scale, groups = log_sum_exp.dtype, q.shape[-1] ** -0.5, (len(k), -1)
    q_MGTK, grad_MGTK, log_sum_exp_MGT1 = (x.unflatten(0, groups) for x in (q, grad, log_sum_exp[..., None]))
    # The component of the gradient of a row's weights along the weights, which softmax removes.
    delta_MGT1 = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True).unflatten(0, groups)
    grad_q_MGTK = q_MGTK.new_zeros(q_MGTK.shape, dtype=dtype)
    grad_k_MTK, grad_v_MTK = k.new_empty(k.shape), v.new_empty(v.shape)
    for columns in _blocks(q.shape[1], _BLOCK_KEYS):
        key, value = k[:, None, columns].to(dtype), v[:, None, columns].to(dtype)
        grad_key, grad_value = torch.zeros_like(key[:, 0]), torch.zeros_like(value[:, 0])
        for rows in _blocks(q.shape[1], _BLOCK_QUERIES):
            if is_causal and rows.stop <= columns.start:
                continue
            query, grad_out = q_MGTK[..., rows, :].to(dtype), grad_MGTK[..., rows, :].to(dtype)
            scores = _tile_scores(query, key, rows, columns, is_causal)
            weights = torch.exp(scores - log_sum_exp_MGT1[..., rows, :])
            grad_scores = weights * (grad_out @ value.mT - delta_MGT1[..., rows, :])
            grad_q_MGTK[..., rows, :] += grad_scores @ key * scale
            grad_key += (grad_scores.mT @ query).sum(1) * scale
            grad_value += (weights.mT @ grad_out).sum(1)
        grad_k_MTK[:, columns], grad_v_MTK[:, columns] = grad_key.to(k.dtype), grad_value.to(v.dtype)
    return grad_q_MGTK.flatten(0, 1).to(q.dtype), grad_k_MTK, grad_v_MTK


def _blocks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _tile_scores(query: Tensor, key: Tensor, rows: slice, columns: slice, is_causal: bool) -> Tensor:
    """Return the scores of a tile; with ``is_causal`` those of later keys are -inf."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if is_causal and columns.stop - 1 > rows.start:
        row, column = (torch.arange(part.start, part.stop, device=query.device) for part in (rows, columns))
        scores = scores.masked_fill(column > row[:, None], float("-inf"))
    return scores


@cache
def load_kernels() -> ModuleType:
    """Import the kernels. Raises UserError if Triton is not installed."""
    try:
        from lm.model.ops import flash_attention_triton
    except ModuleNotFoundError as error:
        raise UserError(f"FlashAttention in Triton needs an extra: pip install 'textmill[triton]' ({error}).") from None
    return flash_attention_triton


@torch.library.custom_op("textmill::flash_attention_forward", mutates_args=())
def flash_attention_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of each query's scores, float32 (N, T)."""
    kernels = _kernels_for(q)
    out, log_sum_exp = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    with torch.cuda.device_of(q):
        kernels.forward_kernel[_grid(q, "BLOCK_QUERIES")](
            q, k, v, out, log_sum_exp, **_arguments(q, k, is_causal), enable_fp_fusion=True
        )
    return out, log_sum_exp


@torch.library.custom_op("textmill::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_exp: Tensor, grad: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v``."""
    kernels, arguments = _kernels_for(q), _arguments(q, k, is_causal)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(log_sum_exp)
    inputs = (q, k, v, grad, log_sum_exp, delta)
    with torch.cuda.device_of(q):
        kernels.delta_kernel[(-(-delta.numel() // _DELTA_BLOCK_ROWS),)](
            out,
            grad,
            delta,
            delta.numel(),
            WIDTH=arguments["WIDTH"],
            PADDED_WIDTH=arguments["PADDED_WIDTH"],
            BLOCK_ROWS=_DELTA_BLOCK_ROWS,
            enable_fp_fusion=True,
        )
        kernels.key_value_gradient_kernel[_grid(k, "BLOCK_KEYS")](
            *inputs, grad_k, grad_v, **arguments, enable_fp_fusion=True
        )
        kernels.query_gradient_kernel[_grid(q, "BLOCK_QUERIES")](*inputs, grad_q, **arguments, enable_fp_fusion=True)
    return grad_q, grad_k, grad_v


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | bool) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


for _forward_op in (tiled_attention, flash_attention_forward):
    _forward_op.register_fake(_fake_forward)
for _backward_op in (_backward, flash_attention_backward):
    _backward_op.register_fake(_fake_backward)


def _kernels_for(q: Tensor) -> ModuleType:
    """Return the module of the kernels. Raises UserError if they cannot run on ``q``."""
    kernels = load_kernels()
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16) or q.shape[-1] > _MAX_HEAD_DIM:
        raise UserError(
            f"FlashAttention in Triton takes heads up to {_MAX_HEAD_DIM} wide in float32, bfloat16 or float16; got "
            f"{q.dtype} and a width of {q.shape[-1]}. Use FlashAttentionTorch."
        )
    if q.device.type == "cpu" and not kernels.IS_INTERPRETED.value:
        raise UserError(
            "FlashAttention in Triton needs a GPU, but the tensors are on the CPU. Use FlashAttentionTorch, or set the "
            "environment variable TRITON_INTERPRET to 1 to run Triton's slow interpreter."
        )
    return kernels


def _grid(x: Tensor, block: str) -> Callable[[dict[str, int]], tuple[int]]:
    """Return the number of programs for ``x`` (N, T, K), each of ``meta[block]`` rows."""
    return lambda meta: (len(x) * -(-x.shape[1] // meta[block]),)


def _arguments(q: Tensor, k: Tensor, is_causal: bool) -> dict[str, Any]:
    """Return the arguments of the kernels that are no tensors."""
    length, head_dim = q.shape[1:]
    is_exact = q.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return {
        "scale": head_dim**-0.5,
        "length": length,
        "length_key": 1 << (length - 1).bit_length(),
        "group_size": len(q) // len(k),
        "IS_CAUSAL": is_causal,
        "PRECISION": "ieee" if is_exact else "tf32",
        "WIDTH": head_dim,
        "PADDED_WIDTH": max(16, 1 << (head_dim - 1).bit_length()),  # tensor cores multiply 16 x 16 or more
    }
