"""RMSNorm (Zhang & Sennrich 2019) that saves only its input and one factor per row for the backward pass."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x²) + eps) · weight`` over the last dimension.

    Computed in float32, or in float64 for float64 ``x``; the result has the shape and dtype of ``x``.
    """
    if torch.compiler.is_compiling():  # the compiler fuses the plain form
        h = x.to(_compute_dtype(x))
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        return (h * weight.to(h.dtype)).to(x.dtype)
    if not torch.is_grad_enabled():
        return _normalize(x, weight, eps)[0]
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, inverse_rms = _normalize(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        normed, grad = x.to(inverse_rms.dtype) * inverse_rms, grad.to(inverse_rms.dtype)
        product = (grad * normed).reshape(-1, x.shape[-1])
        grad_weight = product.sum(0).to(weight.dtype)
        # The component of the gradient along the normalized row does not reach x.
        projection = torch.mv(product, weight.to(product.dtype)).div_(x.shape[-1]).view(inverse_rms.shape)
        grad_x = (grad * weight).sub_(normed.mul_(projection)).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight, None


def _normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalized ``x`` times ``weight``, and ``1 / rms`` of each row in the dtype of the computation."""
    h = x.to(_compute_dtype(x))
    mean_square = torch.linalg.vector_norm(h, dim=-1, keepdim=True).square_().div_(h.shape[-1])
    inverse_rms = mean_square.add_(eps).rsqrt_()
    return (h * inverse_rms).mul_(weight).to(x.dtype), inverse_rms


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
