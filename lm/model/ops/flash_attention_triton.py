"""FlashAttention-2 (Dao 2023) in Triton, for GPUs. The readable form is :mod:`lm.model.ops.flash_attention`.

Triton is an extra and imported on first use. Torch sees the kernels as two operators, so that torch.compile need not
look into them.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.common.errors import UserError
from lm.model.ops.flash_attention import check_inputs

_MAX_WIDTH = 256
_MIN_PADDED_WIDTH = 16  # the smallest tile that tensor cores multiply
_DELTA_BLOCK_ROWS = 32


class FlashAttentionTriton(torch.autograd.Function):
    """The same as :class:`lm.model.ops.flash_attention.FlashAttentionTorch`, with the same saved tensors, in Triton.

    Head widths up to 256, in bfloat16, float16 or float32. Products of float32 tiles are exact to float32, or run on
    tensor cores after ``torch.set_float32_matmul_precision("high")``. The kernels are tuned on first use for a head
    width, dtype and mask, and for each power of two of T. Raises UserError if Triton is missing, or if the tensors are
    on a CPU and Triton's interpreter is off.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Compute attention, and save what the backward pass needs."""
        check_inputs(q, k, v)
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


@cache
def load_kernels() -> ModuleType:
    """Import the kernels. Raises UserError if Triton is not installed."""
    try:
        from lm.model.ops import flash_attention_kernels
    except ModuleNotFoundError as error:
        raise UserError(f"FlashAttention in Triton needs an extra: pip install 'textmill[triton]' ({error}).") from None
    return flash_attention_kernels


@torch.library.custom_op("textmill::flash_attention_forward", mutates_args=())
def flash_attention_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of each query's scores, float32 (B, T)."""
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


@flash_attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@flash_attention_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_exp: Tensor, grad: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _kernels_for(q: Tensor) -> ModuleType:
    """Return the module of the kernels. Raises UserError if they cannot run on ``q``."""
    kernels = load_kernels()
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16) or q.shape[-1] > _MAX_WIDTH:
        raise UserError(
            f"FlashAttention in Triton takes heads up to {_MAX_WIDTH} wide in float32, bfloat16 or float16; got "
            f"{q.dtype} and a width of {q.shape[-1]}. Use FlashAttentionTorch."
        )
    if q.device.type == "cpu" and not kernels.IS_INTERPRETED.value:
        raise UserError(
            "FlashAttention in Triton needs a GPU, but the tensors are on the CPU. Use FlashAttentionTorch, or set the "
            "environment variable TRITON_INTERPRET to 1 to run Triton's slow interpreter."
        )
    return kernels


def _grid(x: Tensor, block: str) -> Callable[[dict[str, int]], tuple[int]]:
    """Return the number of programs for ``x`` (B, T, K), each of ``meta[block]`` rows."""
    return lambda meta: (len(x) * -(-x.shape[1] // meta[block]),)


def _arguments(q: Tensor, k: Tensor, is_causal: bool) -> dict[str, Any]:
    """Return the arguments of the kernels that are no tensors."""
    length, width = q.shape[1:]
    is_exact = q.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return {
        "scale": width**-0.5,
        "length": length,
        "length_key": _next_power_of_two(length),
        "group_size": len(q) // len(k),
        "IS_CAUSAL": is_causal,
        "PRECISION": "ieee" if is_exact else "tf32",
        "WIDTH": width,
        "PADDED_WIDTH": max(_MIN_PADDED_WIDTH, _next_power_of_two(width)),
    }


def _next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1
