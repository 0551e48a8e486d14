"""ZeRO stage 1: an optimizer whose state and work are sharded among the ranks (Rajbhandari et al. 2020)."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from lm.distributed.process_group import get_world_size
from lm.distributed.sharding import MAX_BUCKET_BYTES, RowExchange, group_by_size, local_rows, shard_rows
from lm.optim.optimizer import Optimizer


class ShardedOptimizer(Optimizer):
    """Wraps an optimizer. Each rank updates its share of the parameters, and all ranks exchange the results.

    ``params`` are parameters or groups, as for ``optimizer_cls``; ``kwargs`` are its options. The parameters and their
    gradients must be the same on all ranks, e.g. by :class:`lm.distributed.DDP`. If ``optimizer_cls.is_elementwise``,
    each parameter is sharded by rows. Otherwise each matrix belongs to one rank, balanced by bytes.

    :attr:`local` is the wrapped optimizer, which holds this rank's rows and their state.
    """

    local: torch.optim.Optimizer

    def __init__(self, params: Iterable[Any], optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any) -> None:
        self._make_local: Callable[[Any], torch.optim.Optimizer] = lambda groups: optimizer_cls(groups, **kwargs)
        self._is_elementwise = bool(getattr(optimizer_cls, "is_elementwise", False))
        self._loads = [0] * get_world_size()
        self._exchanges: list[tuple[RowExchange, list[nn.Parameter], list[nn.Parameter]]] = []
        self.bounds: dict[nn.Parameter, list[int]] = {}
        super().__init__(params, kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and shard them among the ranks."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        params: list[nn.Parameter] = group["params"]
        bounds = shard_rows(params, [not self._is_elementwise] * len(params), self._loads)
        rows = [nn.Parameter(local_rows(p.detach(), b), p.requires_grad) for p, b in zip(params, bounds, strict=True)]
        self.bounds |= dict(zip(rows, bounds, strict=True))
        local_group = group | {"params": rows}
        if len(self.param_groups) == 1:
            self.local = self._make_local([local_group])
        else:
            self.local.add_param_group(local_group)
        for key, value in self.local.param_groups[-1].items():
            group.setdefault(key, value)  # the defaults of the wrapped optimizer
        rows_of = dict(zip(params, rows, strict=True))
        for bucket in group_by_size(params, MAX_BUCKET_BYTES):
            shards = [rows_of[p] for p in bucket]
            exchange = RowExchange(bucket, [self.bounds[shard] for shard in shards], bucket[0].dtype)
            self._exchanges.append((exchange, bucket, shards))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *arguments: Any) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. Return the loss of ``closure``, or None without it.

        The wrapped optimizer gets the other ``arguments``.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group, local_group in zip(self.param_groups, self.local.param_groups, strict=True):
            local_group.update({key: value for key, value in group.items() if key != "params"})
            for p, rows in zip(group["params"], local_group["params"], strict=True):
                rows.grad = local_rows(p.grad, self.bounds[rows]) if p.grad is not None and len(rows) else None
        self.local.step(None, *arguments)
        self.local.zero_grad(set_to_none=True)
        unfinished: list[Callable[[], None]] = []
        for exchange, params, rows in self._exchanges:
            unfinished.append(partial(exchange.finish_gather, exchange.start_gather(rows), params))
            if len(unfinished) > 1:  # two at a time, for the memory of their buffers
                unfinished.pop(0)()
        for finish_gather in unfinished:
            finish_gather()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's rows."""
        return self.local.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of this rank's rows, from as many ranks."""
        self.local.load_state_dict(state_dict)
        for group, local_group in zip(self.param_groups, self.local.param_groups, strict=True):
            group.update({key: value for key, value in local_group.items() if key != "params"})
