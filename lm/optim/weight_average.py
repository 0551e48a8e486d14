"""The mean of the weights over steps of a training (Polyak & Juditsky 1992; Izmailov et al. 2018)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from lm.optim.optimizer import Optimizer
from lm.optim.shards import local_shard


class WeightAverage(Optimizer):
    """Averages parameters over the calls of :meth:`step`, and changes none.

    An optimizer in form, so that checkpoints save its state with that of the others, also in shards.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @property
    def has_started(self) -> bool:
        """Whether there was a step."""
        return bool(self.state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Include the present parameters in the mean. Return the loss of ``closure``, or None without it."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if not p.numel():  # a rank without rows of it
                    continue
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["mean"] = torch.zeros_like(p)
                state["count"] += 1
                local_shard(state["mean"]).lerp_(local_shard(p), 1 / state["count"])
        return loss

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the parameters the values of their means inside the ``with`` block. Their own values return bit for
        bit, without a copy of all."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for p, state in self.state.items():
            value, mean = (local_shard(cast(Tensor, x)) for x in (p, state["mean"]))
            own = value.clone()
            value.copy_(mean)
            mean.copy_(own)
