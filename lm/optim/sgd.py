"""SGD with a decaying learning rate, the toy example of CS336 assignment 1 (section 4.2)."""

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from lm.optim.optimizer import Optimizer


class SGD(Optimizer):
    """``p ← p - lr / sqrt(t + 1) · grad``, with ``t`` the number of steps the parameter has taken."""

    is_elementwise: ClassVar[bool] = True
    """True if each element is updated on its own. Then a parameter can be sharded by rows."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        if lr < 0:
            raise ValueError(f"lr {lr} must be at least 0")
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. Return the loss of ``closure``, or None without it."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    t = self.state[p].get("t", 0)
                    p.add_(p.grad, alpha=-group["lr"] / math.sqrt(t + 1))
                    self.state[p]["t"] = t + 1
        return loss
