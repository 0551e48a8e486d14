"""Optimizers, the learning-rate schedule and gradient clipping, from torch primitives.

Sources: CS336 assignment 1 (section 4); Loshchilov & Hutter 2019 (AdamW); Jordan et al. 2024 (Muon).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

_IN_CACHE = 1 << 18  # elements of parameters, each with a gradient and two moments


class SGD(torch.optim.Optimizer):
    """``p ← p - lr / sqrt(t + 1) · grad``, the decaying SGD of CS336 assignment 1 (section 4.2)."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        if lr < 0:
            raise ValueError(f"lr is {lr}; it must not be negative")
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; returns the closure's loss if one is given."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    t = self.state[p].get("t", 0)
                    p.add_(p.grad, alpha=-group["lr"] / math.sqrt(t + 1))
                    self.state[p]["t"] = t + 1
        return loss


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay; ``p ← p - lr·wd·p`` beside the bias-corrected Adam step.

    Equal to ``torch.optim.AdamW``. The update runs over lists of tensors at once (``torch._foreach``), so that its cost
    does not grow with the number of parameters; on a processor over pieces of them that stay in its cache.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr {lr}, eps {eps}, weight_decay {weight_decay} must not be negative, betas {betas} in [0, 1)"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; returns the closure's loss if one is given."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            by_age: dict[int, list[Tensor]] = {}  # the bias correction depends on a parameter's own step count
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["t"] = 0
                        state["m"] = torch.zeros_like(p)
                        state["v"] = torch.zeros_like(p)
                    state["t"] += 1
                    by_age.setdefault(state["t"], []).append(p)
            for t, params in by_age.items():
                moments = [self.state[p] for p in params]
                rows = [(p, cast(Tensor, p.grad), its["m"], its["v"]) for p, its in zip(params, moments, strict=True)]
                for weights, grads, m, v in _in_cache(rows):
                    _adam(weights, grads, m, v, t, group)
        return loss


def _adam(params: list[Tensor], grads: list[Tensor], m: list[Tensor], v: list[Tensor], t: int, group: Any) -> None:
    beta1, beta2 = group["betas"]
    torch._foreach_lerp_(m, grads, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
    denominators = torch._foreach_sqrt(v)
    torch._foreach_div_(denominators, math.sqrt(1 - beta2**t))
    torch._foreach_add_(denominators, group["eps"])
    torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_addcdiv_(params, m, denominators, -group["lr"] / (1 - beta1**t))


def _in_cache(rows: Sequence[tuple[Tensor, ...]]) -> Iterator[list[list[Tensor]]]:
    """The columns of ``rows``, whose tensors have one shape each: on a processor some pieces at a time, which its cache
    holds, elsewhere whole."""
    if not all(x.device.type == "cpu" and x.is_contiguous() for row in rows for x in row):
        yield [list(column) for column in zip(*rows, strict=True)]
        return
    part: list[tuple[Tensor, ...]] = []
    room = _IN_CACHE
    for row in rows:
        for pieces in zip(*(x.view(-1).split(_IN_CACHE) for x in row), strict=True):
            if part and pieces[0].numel() > room:
                yield [list(column) for column in zip(*part, strict=True)]
                part, room = [], _IN_CACHE
            part.append(pieces)
            room -= pieces[0].numel()
    yield [list(column) for column in zip(*part, strict=True)]


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalized: for the hidden matrices; everything else wants AdamW.

    The momentum matrix M = U S Vᵀ is replaced by about U Vᵀ (five Newton–Schulz steps), so every direction of the
    matrix is learned at the same rate. ``lr`` is the root mean square of an update of one entry, as for AdamW, times
    five: scaled by ``0.2 · sqrt(max(rows, columns))`` (Liu et al. 2025), so AdamW's lr and decay fit.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        if lr < 0 or weight_decay < 0 or not 0 <= momentum < 1:
            raise ValueError(
                f"lr {lr}, weight_decay {weight_decay} must not be negative, momentum {momentum} in [0, 1)"
            )
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim != 2:  # vectors of one shape would be stacked, and orthogonalized against each other
                raise ValueError(f"a parameter has shape {tuple(p.shape)}; Muon takes matrices only")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient, each a matrix; returns the closure's loss if one is given."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                buffers = []
                for p in params:
                    grad = cast(Tensor, p.grad)
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(grad, 1 - group["momentum"])
                    buffers.append(grad.lerp(buffer, group["momentum"]))  # Nesterov
                updates = orthogonalize(torch.stack(buffers))
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, list(updates.unbind()), alpha=-group["lr"] * 0.2 * math.sqrt(max(shape)))
        return loss


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of each matrix of ``matrices`` (n, rows, columns) near 1, in bfloat16.

    A quintic Newton–Schulz iteration whose coefficients are chosen for a steep start, not for convergence: singular
    values end in about [0.7, 1.2] (Jordan et al. 2024). Returns the dtype of the input.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def _evaluate(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def lr_cosine_schedule(it: int, max_lr: float, min_lr: float, warmup_iters: int, cosine_iters: int) -> float:
    """Linear warm-up to ``max_lr`` at ``warmup_iters``, half a cosine to ``min_lr`` at ``cosine_iters``, then flat.

    CS336 assignment 1, section 4.4 (after Touvron et al. 2023).
    """
    if it < warmup_iters:
        return max_lr * it / warmup_iters
    if it >= cosine_iters:
        return min_lr
    progress = (it - warmup_iters) / (cosine_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (max_lr - min_lr)


def lr_wsd_schedule(it: int, max_lr: float, min_lr: float, warmup_iters: int, decay_iters: int, iters: int) -> float:
    """Linear warm-up to ``max_lr`` at ``warmup_iters``, flat, then over the last ``decay_iters`` of ``iters`` linearly
    down to ``min_lr``: warm-up, stable, decay (Hu et al. 2024, MiniCPM; Hägele et al. 2024 for the straight line)."""
    lr = max_lr * it / warmup_iters if it < warmup_iters else max_lr
    if it <= iters - decay_iters or decay_iters == 0:
        return lr
    return min(lr, min_lr + max(0, iters - it) / decay_iters * (max_lr - min_lr))


@torch.no_grad()
def clip_grad_norm(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients in place so that their common L2 norm is at most ``max_norm``; returns the norm before.

    CS336 assignment 1, section 4.5. No host synchronization: the scale is computed and applied on the device.
    """
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
