"""Cross-entropy fused with the head's matrix product. Memory holds one chunk of the logits at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.model.functional import IGNORE_INDEX
from lm.model.ops.matmul import linear_forward, linear_weight_grad

# float32 logits of a chunk: half of a CPU's cache, or enough work for a GPU.
_CHUNK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 30}
_DEFAULT_CHUNK_BYTES = 1 << 27


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, softcap: float = 0.0, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Return the mean cross-entropy of the logits ``x weightᵀ`` and ``targets``, in nats; a float32 scalar,
    float64 for float64 inputs.

    ``x`` (N, D) float, ``weight`` (V, D), ``targets`` int (N,). The mean is over the targets that are not
    ``ignore_index``. Without any such target the loss and its gradients are 0 (torch returns nan), so that a
    micro-batch of padding can be added with weight 0. A ``softcap`` above 0 limits the logits to ± its value. Under
    autocast the products run in autocast's dtype. The gradients are computed in the forward pass, chunk by chunk.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    # Decided here, because autograd turns gradients off inside forward.
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss: Tensor = _LinearCrossEntropy.apply(x, weight, targets, softcap, ignore_index, dtype, needs_grad)
    return loss


def logit_chunk_bytes(device_type: str) -> int:
    """Return the bytes of the float32 logits of a full chunk."""
    return _CHUNK_BYTES.get(device_type, _DEFAULT_CHUNK_BYTES)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        softcap: float,
        ignore_index: int,
        dtype: torch.dtype,
        needs_grad: bool,
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            rows = max(1, logit_chunk_bytes(x.device.type) // (4 * len(weight)))
            inputs, matrix = x.to(dtype), weight.to(dtype)
            grad_x = torch.empty_like(inputs) if needs_grad else None
            sum_dtype = torch.promote_types(dtype, torch.float32)
            grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if needs_grad else None
            total = torch.zeros((), dtype=sum_dtype, device=x.device)
            is_ignored = targets[:, None] == ignore_index
            safe_targets = targets[:, None].masked_fill(is_ignored, 0)
            # N / counted targets. On the device, so that the host does not wait. Exactly 1 if all targets count.
            correction = torch.full((), len(x), dtype=sum_dtype, device=x.device) / (~is_ignored).sum().clamp_(min=1)
            softmax = _softmax_to_compile if x.is_cuda and torch.compiler.is_compiling() else _softmax_in_place
            for start in range(0, len(x), rows):
                chunk = slice(start, start + rows)
                chunk_x, target, ignored = inputs[chunk], safe_targets[chunk], is_ignored[chunk]
                loss, grad = softmax(
                    linear_forward(chunk_x, matrix).to(sum_dtype), target, ignored, softcap, needs_grad
                )
                total += loss
                if grad_x is None or grad_weight is None:
                    continue
                grad = grad.to(dtype)
                grad_x[chunk] = linear_forward(grad, matrix.T)
                grad_weight += linear_weight_grad(chunk_x, grad)
            ctx.save_for_backward(grad_x, grad_weight, correction)
        return total / len(x) * correction

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, correction = ctx.saved_tensors
        scale = grad / len(grad_x) * correction
        return grad_x * scale, grad_weight * scale, None, None, None, None, None


def _softmax_in_place(
    logits: Tensor, target: Tensor, ignored: Tensor, softcap: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of ``logits`` (N, V), which it overwrites, and its gradients for them if needed.

    ``target`` and ``ignored`` are (N, 1).
    """
    if softcap:
        tanh = logits.div_(softcap).tanh_()
        logits = tanh * softcap
    max_logit, target_logit = logits.amax(-1, keepdim=True), logits.gather(-1, target)
    grad = logits.sub_(max_logit).exp_()
    exp_sum = grad.sum(-1, keepdim=True)
    loss = (exp_sum.log() + max_logit - target_logit).masked_fill_(ignored, 0).sum()
    if needs_grad:
        # Division by infinity zeroes the ignored rows without another pass over the logits.
        grad.scatter_add_(-1, target, -exp_sum.masked_fill(ignored, 0))
        grad.div_(exp_sum.masked_fill(ignored, torch.inf))
        if softcap:
            grad.mul_(1 - tanh.square_())
    return loss, grad


def _softmax_to_compile(
    logits: Tensor, target: Tensor, ignored: Tensor, softcap: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Compute what :func:`_softmax_in_place` does in plain operations, which torch.compile fuses into one kernel.

    On a GPU the kernel reads the logits twice and writes the gradients once.
    """
    tanh = torch.tanh(logits / softcap) if softcap else None
    capped = logits if tanh is None else tanh * softcap
    log_sum = capped.logsumexp(-1, keepdim=True)
    loss = (log_sum - capped.gather(-1, target)).masked_fill(ignored, 0).sum()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == target
    grad = ((capped - log_sum).exp() - is_target.to(logits.dtype)).masked_fill(ignored, 0)
    return loss, grad if tanh is None else grad * (1 - tanh.square())
