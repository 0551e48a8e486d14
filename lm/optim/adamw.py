"""AdamW (Loshchilov & Hutter 2019; CS336 assignment 1, section 4.3)."""

import logging
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from lm.optim.adamw_cpu import update_on_cpu
from lm.optim.optimizer import Optimizer
from lm.optim.shards import local_shard
from lm.optim.weight_decay import decay_weights

log = logging.getLogger(__name__)


class AdamW(Optimizer):
    """Adam with decoupled weight decay. Gives the same result as ``torch.optim.AdamW``.

    Contiguous float32 parameters are updated by kernels: on a CPU by one call for all, on a GPU with Triton by one call
    for each. Other parameters, and all on a CPU with ``found_inf``, are updated by ``torch._foreach``. Parameters must
    not share memory. With ``is_cautious``, weight decay is that of :func:`lm.optim.weight_decay.decay_weights`.
    """

    is_elementwise: ClassVar[bool] = True
    """True if each element is updated on its own. Then a parameter can be sharded by rows."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        is_cautious: bool = False,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr {lr}, eps {eps}, weight_decay {weight_decay} must be at least 0; betas {betas} must be in [0, 1)"
            )
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "is_cautious": is_cautious}
        super().__init__(params, options)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, found_inf: Tensor | None = None
    ) -> float | None:
        """Update all parameters that have a gradient. Return the loss of ``closure``, or None without it.

        If ``found_inf``, a bool scalar on the device, is true, parameters and moments do not change; only the count of
        steps for the bias correction does. The host does not read it.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            params_by_step: dict[int, list[Tensor]] = {}  # bias correction depends on the parameter's own step count
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["t"] = 0
                        state["m"] = torch.zeros_like(p)
                        state["v"] = torch.zeros_like(p)
                    state["t"] += 1
                    params_by_step.setdefault(state["t"], []).append(p)
            for t, params in params_by_step.items():
                tensors = [(p, cast(Tensor, p.grad), self.state[p]["m"], self.state[p]["v"]) for p in params]
                rows = [tuple(map(local_shard, row)) for row in tensors]
                if rows := _update_by_kernel(rows, t, group, found_inf):
                    weights, grads, m, v = map(list, zip(*rows, strict=True))
                    _update(weights, grads, m, v, t, group, found_inf)
        return loss


def _update(
    params: list[Tensor],
    grads: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    t: int,
    group: Any,
    found_inf: Tensor | None,
) -> None:
    beta1, beta2 = group["betas"]
    weight_decay = group["lr"] * group["weight_decay"]
    if found_inf is None:
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        decay_weights(params, m, 1 - weight_decay, group["is_cautious"])
    else:
        is_applied = (~found_inf).to(v[0].dtype)
        for grad in grads:
            grad.masked_fill_(found_inf, 0)
        torch._foreach_mul_(m, 1 - is_applied * (1 - beta1))
        torch._foreach_add_(m, grads, alpha=1 - beta1)
        torch._foreach_mul_(v, 1 - is_applied * (1 - beta2))
        decay_weights(params, m, 1 - is_applied * weight_decay, group["is_cautious"])
    torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
    denominators = torch._foreach_sqrt(v)
    torch._foreach_div_(denominators, math.sqrt(1 - beta2**t))
    torch._foreach_add_(denominators, group["eps"])
    if found_inf is not None:
        for denominator in denominators:  # infinite for a skipped step; not by a division, as 0 / 0 is nan
            denominator.masked_fill_(found_inf, math.inf)
    torch._foreach_addcdiv_(params, m, denominators, -group["lr"] / (1 - beta1**t))


def _update_by_kernel(
    rows: list[tuple[Tensor, ...]], t: int, group: dict[str, Any], found_inf: Tensor | None
) -> list[tuple[Tensor, ...]]:
    """Update what the kernel can, and return the other rows: all of them if the device has no kernel."""
    device = rows[0][0].device
    if device.type == "cpu":  # the trainer reads found_inf itself and leaves out the step
        return update_on_cpu(rows, t, group) if found_inf is None else rows
    kernel = _load_kernel(device) if device.type == "cuda" else None
    if kernel is None:
        return rows
    is_applied = torch.ones((), device=device) if found_inf is None else (~found_inf).float()
    others = []
    for row in rows:
        if all(x.shape == row[0].shape and x.dtype == torch.float32 and x.is_cuda and x.is_contiguous() for x in row):
            kernel(row, t, group, is_applied)
        else:
            others.append(row)
    return others


@cache
def _load_kernel(device: torch.device) -> Callable[[tuple[Tensor, ...], int, dict[str, Any], Tensor], None] | None:
    """Return the kernel; None, with a warning, if it does not work, for example without a C compiler."""
    try:
        from lm.optim.adamw_triton import update
    except ModuleNotFoundError:
        return None
    options = {"lr": 0.0, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.0, "is_cautious": False}
    try:
        update(tuple(torch.zeros(4, 1, device=device)), 1, options, torch.ones((), device=device))
    except Exception as error:  # of many kinds: Triton compiles C
        log.warning("Triton does not work here, AdamW updates without it: %s", str(error).partition("\n")[0])
        return None
    return update
