"""Cross-entropy fused with the head's matmul. Memory holds one chunk of the logits at a time.

Shapes: N tokens, C tokens of a chunk, D d_model, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.model.functional import IGNORE_INDEX
from lm.model.ops.matmul import linear_forward, linear_weight_grad

# float32 logits of a chunk: half of a CPU's cache, or enough work for a GPU.
_CHUNK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 30}
_MIN_ROWS = 256  # of a chunk: with fewer, reading a large head takes longer than the products


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, softcap: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of the logits ``x weightᵀ`` and ``targets``, in nats; a float32 scalar,
    float64 for float64 inputs.

    ``x`` (N, D) float, ``weight`` (V, D), ``targets`` int (N,). The mean is over the targets that are not
    ``IGNORE_INDEX``. Without any such target the loss and its gradients are 0 (torch returns nan), so that a
    micro-batch of padding can be added with weight 0. A ``softcap`` above 0 limits the logits to ± its value. Under
    autocast the matmuls run in autocast's dtype. The gradients are computed in the forward pass, chunk by chunk.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    # Decided here, because autograd turns gradients off inside forward.
    is_recorded = torch.is_grad_enabled()
    needs_weight_grad = is_recorded and weight.requires_grad  # not of a frozen head
    needs_grad = needs_weight_grad or (is_recorded and x.requires_grad)
    loss: Tensor = _LinearCrossEntropy.apply(x, weight, targets, softcap, dtype, needs_grad, needs_weight_grad)
    return loss


def logit_chunk_bytes(device_type: str, tokens: int, vocab_size: int) -> int:
    """Return the bytes of the float32 logits of a chunk."""
    return 4 * vocab_size * min(tokens, rows_of_chunk(device_type, vocab_size))


def rows_of_chunk(device_type: str, vocab_size: int) -> int:
    """Return the tokens of a full chunk."""
    return max(_MIN_ROWS, _CHUNK_BYTES.get(device_type, 1 << 27) // (4 * vocab_size))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        softcap: float,
        dtype: torch.dtype,
        needs_grad: bool,
        needs_weight_grad: bool,
    ) -> Tensor:
        with torch.autocast(x_ND.device.type, enabled=False):
            rows = rows_of_chunk(x_ND.device.type, len(weight_VD))
            inputs_ND, matrix_VD = x_ND.to(dtype), weight_VD.to(dtype)
            grad_x_ND = torch.empty_like(inputs_ND) if needs_grad else None
            sum_dtype = torch.promote_types(dtype, torch.float32)
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=sum_dtype) if needs_weight_grad else None
            total = torch.zeros((), dtype=sum_dtype, device=x_ND.device)
            is_ignored_N1 = targets_N[:, None] == IGNORE_INDEX
            safe_targets_N1 = targets_N[:, None].masked_fill(is_ignored_N1, 0)
            # N / counted targets. On the device, so that the host does not wait. Exactly 1 if all targets count.
            count = (~is_ignored_N1).sum().clamp_(min=1)
            correction = torch.full((), len(x_ND), dtype=sum_dtype, device=x_ND.device) / count
            softmax = _softmax_to_compile if x_ND.is_cuda and torch.compiler.is_compiling() else _softmax_in_place
            for start in range(0, len(x_ND), rows):
                chunk = slice(start, start + rows)
                loss, grad_CV = softmax(  # no name for the logits: their memory is free after the cast of the gradient
                    linear_forward(inputs_ND[chunk], matrix_VD).to(sum_dtype),
                    safe_targets_N1[chunk],
                    is_ignored_N1[chunk],
                    softcap,
                    needs_grad,
                )
                total += loss
                if grad_x_ND is None:
                    continue
                grad_CV = grad_CV.to(dtype)
                grad_x_ND[chunk] = linear_forward(grad_CV, matrix_VD.T)
                if grad_weight_VD is not None:
                    grad_weight_VD += linear_weight_grad(inputs_ND[chunk], grad_CV)
            ctx.save_for_backward(grad_x_ND, grad_weight_VD, correction)
        return total / len(x_ND) * correction

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_ND, grad_weight_VD, correction = ctx.saved_tensors
        scale = grad / len(grad_x_ND) * correction
        grad_weight_VD = None if grad_weight_VD is None else grad_weight_VD * scale
        return grad_x_ND * scale, grad_weight_VD, None, None, None, None, None


def _softmax_in_place(
    logits_CV: Tensor, target_C1: Tensor, is_ignored_C1: Tensor, softcap: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the logits, which it overwrites, and its gradients for them if needed."""
    if softcap:
        tanh_CV = logits_CV.div_(softcap).tanh_()
        logits_CV = tanh_CV * softcap
    max_logit_C1, target_logit_C1 = logits_CV.amax(-1, keepdim=True), logits_CV.gather(-1, target_C1)
    grad_CV = logits_CV.sub_(max_logit_C1).exp_()
    exp_sum_C1 = grad_CV.sum(-1, keepdim=True)
    loss = (exp_sum_C1.log() + max_logit_C1 - target_logit_C1).masked_fill_(is_ignored_C1, 0).sum()
    if needs_grad:
        # Division by infinity zeroes the ignored rows without another pass over the logits.
        grad_CV.scatter_add_(-1, target_C1, -exp_sum_C1.masked_fill(is_ignored_C1, 0))
        grad_CV.div_(exp_sum_C1.masked_fill(is_ignored_C1, torch.inf))
        if softcap:
            grad_CV.mul_(1 - tanh_CV.square_())
    return loss, grad_CV


def _softmax_to_compile(
    logits_CV: Tensor, target_C1: Tensor, is_ignored_C1: Tensor, softcap: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Compute what :func:`_softmax_in_place` does in plain operations, which torch.compile fuses into one kernel.

    On a GPU the kernel reads the logits twice and writes the gradients once.
    """
    tanh_CV = torch.tanh(logits_CV / softcap) if softcap else None
    capped_CV = logits_CV if tanh_CV is None else tanh_CV * softcap
    log_sum_C1 = capped_CV.logsumexp(-1, keepdim=True)
    loss = (log_sum_C1 - capped_CV.gather(-1, target_C1)).masked_fill(is_ignored_C1, 0).sum()
    is_target_CV = torch.arange(logits_CV.shape[-1], device=logits_CV.device) == target_C1
    grad_CV = ((capped_CV - log_sum_C1).exp() - is_target_CV.to(logits_CV.dtype)).masked_fill(is_ignored_C1, 0)
    return loss, grad_CV if tanh_CV is None else grad_CV * (1 - tanh_CV.square())
