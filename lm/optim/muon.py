"""Muon: momentum with an orthogonalized update (Jordan et al. 2024)."""

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from lm.optim.optimizer import Optimizer
from lm.optim.shards import gather, local_shard, shard_like
from lm.optim.weight_decay import decay_weights

RMS_OF_UPDATES = 0.2
"""Root mean square of an update's entries over the learning rate: about that of AdamW (Liu et al. 2025)."""


class Muon(Optimizer):
    """Momentum with an orthogonalized update, for the hidden matrices. Train all other parameters with AdamW.

    Five Newton–Schulz steps replace the momentum matrix M = U S Vᵀ by about U Vᵀ, so that all directions of the matrix
    learn at the same rate. The update is scaled by ``0.2 · sqrt(max(rows, columns))`` (Liu et al. 2025). The root mean
    square of its entries is then about 0.2 · ``lr``, as with AdamW, so the two can share lr and weight decay. Each
    matrix of a stack (n, rows, columns), such as those of experts, is updated by itself. The steps are computed in
    ``product_dtype``; bfloat16 is enough for training. Default: the dtype of the parameters. The ranks that share a
    DTensor all compute the steps of the whole matrix. With ``is_cautious``, weight decay is that of
    :func:`lm.optim.weight_decay.decay_weights`.

    Raises ValueError for a parameter that is neither a matrix nor a stack of matrices.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        product_dtype: torch.dtype | None = None,
        is_cautious: bool = False,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not 0 <= momentum < 1:
            raise ValueError(
                f"lr {lr}, weight_decay {weight_decay} must be at least 0; momentum {momentum} must be in [0, 1)"
            )
        self.product_dtype = product_dtype
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "is_cautious": is_cautious}
        super().__init__(params, options)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim not in (2, 3):  # step would stack vectors and orthogonalize them against each other
                raise ValueError(f"a parameter has shape {tuple(p.shape)}; Muon takes matrices and stacks of matrices")

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, found_inf: Tensor | None = None
    ) -> float | None:
        """Update all parameters that have a gradient. Return the loss of ``closure``, or None without it.

        If ``found_inf``, a bool scalar on the device, is true, parameters and momenta do not change. The host does not
        read it.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            params_by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    params_by_shape.setdefault(p.shape, []).append(p)
            for params in params_by_shape.values():
                is_applied: float | Tensor = 1.0 if found_inf is None else (~found_inf).to(params[0].dtype)
                for p in params:
                    grad = local_shard(cast(Tensor, p.grad))
                    if found_inf is not None:
                        grad.masked_fill_(found_inf, 0)
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    local_shard(state["momentum"]).lerp_(grad, is_applied * (1 - group["momentum"]))
                nesterov_momenta = torch.stack(
                    [gather(cast(Tensor, p.grad).lerp(self.state[p]["momentum"], group["momentum"])) for p in params]
                )
                updates, scale = self.find_updates(nesterov_momenta, params, is_applied)
                if found_inf is not None:
                    updates *= is_applied
                shards = [local_shard(p) for p in params]
                own_updates = [local_shard(shard_like(x, p)) for x, p in zip(updates.unbind(), params, strict=True)]
                factor = 1 - is_applied * group["lr"] * group["weight_decay"]
                decay_weights(shards, own_updates, factor, group["is_cautious"])
                torch._foreach_add_(shards, own_updates, alpha=-group["lr"] * scale)
        return loss

    def find_updates(self, momenta: Tensor, params: list[Tensor], is_applied: float | Tensor) -> tuple[Tensor, float]:
        """Return what is subtracted from ``params``, divided by the learning rate, as a tensor and its factor.

        ``momenta`` are the Nesterov momenta of parameters of one shape, stacked. If ``is_applied`` is 0, state must not
        change.
        """
        return orthogonalize(momenta, self.product_dtype), RMS_OF_UPDATES * math.sqrt(max(momenta.shape[-2:]))


def orthogonalize(matrices: Tensor, product_dtype: torch.dtype | None = None) -> Tensor:
    """Bring the singular values of each of ``matrices`` (..., rows, columns) near 1. Same shape and dtype.

    Five steps of a quintic Newton–Schulz iteration in ``product_dtype``, or in the dtype of the matrices. Its
    coefficients are chosen for a steep start, not for convergence: singular values end in about [0.7, 1.2] (Jordan et
    al. 2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.flatten(0, -3).to(product_dtype or matrices.dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype).reshape(matrices.shape)
