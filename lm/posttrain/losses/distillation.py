"""The loss of distillation: the divergence of a model from a teacher over the whole vocabulary, in chunks of tokens.

Sources: Agarwal et al. 2023 (GKD), whose divergences these are; Gu et al. 2023 (MiniLLM, the reverse KL divergence);
TRL's GKDTrainer, which counts ``beta`` the same way.
Shapes: N tokens, C tokens of a chunk, D width of a model, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.model.ops.cross_entropy import rows_of_chunk
from lm.model.ops.matmul import linear
from lm.model.transformer import TransformerLM

# Of the rows of a chunk of cross-entropy: about eight tensors of the size of the logits live at a time, here in twice
# the memory, since each chunk reads both heads.
_SHARE_OF_ROWS = 4


def compute_divergence(logits: Tensor, teacher_logits: Tensor, beta: float, temperature: float = 1.0) -> Tensor:
    """Return the generalized Jensen-Shannon divergence of each token, in nats: (..., V) twice → (...).

    With p the probabilities of the model, q those of the teacher, both at ``temperature``, and m = (1 − beta) p + beta
    q: beta KL(q ‖ m) + (1 − beta) KL(p ‖ m). At its ends, where that is 0, it is the forward KL(q ‖ p) for ``beta`` 0
    and the reverse KL(p ‖ q) for 1. Results are float32, or float64 for float64 logits.
    """
    p, q = (_log_softmax(part, temperature) for part in (logits, teacher_logits))
    if beta == 0:
        return _kl(q, p)
    if beta == 1:
        return _kl(p, q)
    mixture = torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))
    return beta * _kl(q, mixture) + (1 - beta) * _kl(p, mixture)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return (logits / temperature if temperature != 1 else logits).log_softmax(-1)


def _kl(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """Return KL(first ‖ second) of log-probabilities: (..., V) twice → (...)."""
    return F.kl_div(other_log_probs, log_probs, reduction="none", log_target=True).sum(-1)


def sum_divergences(
    model: TransformerLM,
    hidden: Tensor,
    teacher: TransformerLM,
    teacher_hidden: Tensor,
    beta: float,
    temperature: float,
) -> Tensor:
    """Return the sum over tokens of :func:`compute_divergence` for the heads of two models; a scalar.

    ``hidden`` (N, D) and ``teacher_hidden`` (N, D of the teacher) are results of ``hidden_states``. Only token ids that
    both have count. Memory holds the logits of one chunk of tokens at a time: the gradients are computed in the forward
    pass. The teacher gets none.
    """
    size = min(len(model.head_weight), len(teacher.head_weight))

    def function(hidden_CD: Tensor, weight_VD: Tensor, chunk: slice) -> Tensor:
        with torch.no_grad():
            teacher_logits_CV = teacher.logits(teacher_hidden[chunk])[:, :size]
        logits_CV = model.cap_logits(linear(hidden_CD, weight_VD[:size]))
        return compute_divergence(logits_CV, teacher_logits_CV, beta, temperature).sum()

    weight = model.head_weight if torch.is_grad_enabled() else model.head_weight.detach()
    total: Tensor = _SumOfChunks.apply(hidden, weight, function)
    return total


class _SumOfChunks(torch.autograd.Function):
    """Adds up a function of chunks of hidden states and of the head's weight, with the gradients for both."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, function: Callable[[Tensor, Tensor, slice], Tensor]
    ) -> Tensor:
        needs_grad, needs_weight_grad, _ = ctx.needs_input_grad
        rows = max(1, rows_of_chunk(hidden_ND.device.type, len(weight_VD)) // _SHARE_OF_ROWS)
        # Leaves of a graph for each chunk, which its backward pass frees. The gradients of the weight add up.
        weight_VD = weight_VD.detach().requires_grad_(needs_weight_grad)
        chunks = [chunk_CD.requires_grad_(needs_grad) for chunk_CD in hidden_ND.detach().split(rows)]
        total = torch.zeros((), dtype=torch.promote_types(weight_VD.dtype, torch.float32), device=hidden_ND.device)
        for number, hidden_CD in enumerate(chunks):
            with torch.set_grad_enabled(needs_grad):
                value = function(hidden_CD, weight_VD, slice(number * rows, (number + 1) * rows))
            if needs_grad:
                value.backward()
            total += value.detach()
        grad_ND = torch.cat([chunk_CD.grad for chunk_CD in chunks]) if needs_grad else None
        ctx.save_for_backward(grad_ND, weight_VD.grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_ND, grad_weight_VD = ctx.saved_tensors
        return grad_ND * grad, None if grad_weight_VD is None else grad_weight_VD * grad, None
