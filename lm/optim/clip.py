"""Gradient clipping by the global norm (CS336 assignment 1, section 4.5)."""

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor


@torch.no_grad()
def clip_grad_norm(
    params: Iterable[Tensor],
    max_norm: float,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    replicated: Collection[Tensor] = (),
) -> Tensor:
    """Scale the gradients in place so that their global L2 norm is at most ``max_norm``. Return the norm before
    clipping, a scalar.

    If each rank has a part of the gradients, ``sum_over_ranks`` adds up the squared norms of the parts; DTensors need
    none. The parameters in ``replicated`` are whole on every rank, with the same gradients: they count once. Does not
    wait for the device; reading the returned norm does.
    """
    params = list(params)
    grads = [p.grad for p in params if p.grad is not None]
    zero = torch.zeros((), device=params[0].device if params else None)
    if sum_over_ranks is None and not grads:
        return zero

    def norm_of(params: list[Tensor]) -> Tensor:
        norms = torch._foreach_norm([p.grad for p in params if p.grad is not None] or [zero])
        return torch.linalg.vector_norm(torch.stack(norms))

    norm = norm_of([p for p in params if p not in replicated])
    if hasattr(norm, "full_tensor"):  # a DTensor, if the gradients are
        norm = norm.full_tensor()
    if sum_over_ranks is not None:
        norm = sum_over_ranks(norm.square()).sqrt()
    if replicated:
        norm = torch.hypot(norm, norm_of([p for p in params if p in replicated]))
    if grads:
        torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
