"""How the processes of a training divide the model, its gradients and the state of its optimizers."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lm.common.execution import ParallelKind
from lm.common.phases import in_phase
from lm.distributed.ddp import DDP
from lm.distributed.fsdp import FSDP
from lm.distributed.sharding import Bounds
from lm.distributed.zero import ShardedOptimizer
from lm.optim.clip import clip_grad_norm


class Parallel:
    """Divides the training of ``model`` among the ranks.

    none: one process. ddp: all ranks have everything. zero1: optimizer state is divided. zero2: also gradients, and
    weights outside of the passes. fsdp: also weights between the passes. zero2 and fsdp leave vectors whole. The
    matrices in ``whole`` are not divided themselves but belong to one rank each, for optimizers that need whole
    matrices; stacks of them are divided.
    """

    def __init__(self, model: nn.Module, kind: ParallelKind, whole: Collection[nn.Parameter] = ()) -> None:
        self.model, self.kind = model, kind
        self.divides_weights = kind in ("zero2", "fsdp")
        self.divides_state = kind in ("zero1", "zero2", "fsdp")
        self.wrapper: DDP | FSDP | None = None
        if kind in ("ddp", "zero1"):
            self.wrapper = DDP(model)
        elif kind != "none":
            self.wrapper = FSDP(model, whole=whole, is_resharded_after_forward=kind == "fsdp")

        self._bounds = self.wrapper.bounds if isinstance(self.wrapper, FSDP) else {}

    def make_optimizer(
        self, optimizer_cls: type[torch.optim.Optimizer], params: Iterable[Any], **kwargs: Any
    ) -> torch.optim.Optimizer:
        """Make an optimizer of parameters of the model."""
        if self.kind == "zero1":
            optimizer = ShardedOptimizer(params, optimizer_cls, **kwargs)
            self._bounds |= optimizer.bounds
            return optimizer
        return optimizer_cls(params, **kwargs)

    def local(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that holds the state of this rank's rows: ``optimizer``, or the one that it wraps."""
        return optimizer.local if isinstance(optimizer, ShardedOptimizer) else optimizer

    def bounds(self, parameter: nn.Parameter) -> Bounds | None:
        """Return the rows of each rank, for a parameter of the model or of a local optimizer; None if it is whole."""
        return self._bounds.get(parameter)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients in backward passes without traffic."""
        return self.wrapper.no_sync() if self.wrapper else nullcontext()

    def finish_gradient_synchronization(self) -> None:
        """Wait until the gradients are averaged over the ranks."""
        if self.wrapper:
            self.wrapper.finish_gradient_synchronization()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the gradients by their global norm, and return it; see :func:`lm.optim.clip_grad_norm`."""
        params = list(self.model.parameters())
        if not isinstance(self.wrapper, FSDP):
            return clip_grad_norm(params, max_norm)
        return clip_grad_norm(params, max_norm, _sum_over_ranks, {p for p in params if self.bounds(p) is None})

    def iterate_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all parameters with their names, whole. All ranks must do this together."""
        if isinstance(self.wrapper, FSDP):
            yield from self.wrapper.iterate_full_params()
        else:
            yield from ((name, p.detach()) for name, p in self.model.named_parameters())


@in_phase("communication")
def _sum_over_ranks(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values
