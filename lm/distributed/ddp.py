"""Data parallel training with bucketed all-reduce.

Sources: Li et al. 2020 (PyTorch Distributed); CS336 assignment 2 (distributed data parallel training).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lm.common.phases import phase
from lm.distributed.sharding import gradient_bucket_bytes, group_by_size
from lm.optim.shards import as_shard, local_shard


class DDP(nn.Module):
    """Wraps a module and averages its gradients over all ranks, or those of ``group``, during the backward pass.

    Weights and buffers start as those of rank 0. A backward pass sends each bucket of gradients as soon as the bucket
    is complete, in the same order on all ranks. Call :meth:`finish_gradient_synchronization` after it, before the
    optimizer step.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(local_shard(tensor.detach()), group=group, group_src=0)
        # Gradients are computed from the last layer to the first.
        parameters = [parameter for parameter in reversed(list(module.parameters())) if parameter.requires_grad]
        max_bytes = gradient_bucket_bytes(sum(parameter.nbytes for parameter in parameters))
        self._buckets = [_Bucket(part, group) for part in group_by_size(parameters, max_bytes)]
        self._sent_buckets = 0
        self._is_synchronizing = True
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._count_gradient(bucket))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in backward passes, e.g. of all micro-batches except the last one."""
        self._is_synchronizing = False
        try:
            yield
        finally:
            self._is_synchronizing = True

    def _count_gradient(self, bucket: "_Bucket") -> None:
        if self._is_synchronizing:
            bucket.missing_gradients -= 1
            while self._sent_buckets < len(self._buckets) and not self._buckets[self._sent_buckets].missing_gradients:
                self._buckets[self._sent_buckets].send()
                self._sent_buckets += 1

    @phase("communication")
    def finish_gradient_synchronization(self) -> None:
        """Wait until the gradients are averaged over all ranks. A parameter without a gradient on this rank
        contributes zeros."""
        for bucket in self._buckets[self._sent_buckets :]:
            bucket.send()
        for bucket in self._buckets:
            bucket.receive()
        self._sent_buckets = 0


class _Bucket:
    """Parameters of one dtype whose gradients share one all-reduce. Of a DTensor this rank sends its shard."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.parameters, self._group = parameters, group
        self.missing_gradients = len(parameters)
        shards = [local_shard(parameter.detach()) for parameter in parameters]
        sizes = [shard.numel() for shard in shards]
        self._flat = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        self._views = [part.view_as(shard) for part, shard in zip(self._flat.split(sizes), shards, strict=True)]
        self._gradients = [as_shard(view, p) for view, p in zip(self._views, parameters, strict=True)]
        self._work: Any = None

    @phase("communication")
    def send(self) -> None:
        for view, gradient, parameter in zip(self._views, self._gradients, self.parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(local_shard(parameter.grad))
            parameter.grad = gradient  # frees the gradient that was copied
        self._flat /= dist.get_world_size(self._group)
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def receive(self) -> None:
        self._work.wait()
        self.missing_gradients = len(self.parameters)
