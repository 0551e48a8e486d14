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


class DDP(nn.Module):
    """Wraps a module and averages its gradients over all ranks during the backward pass.

    Weights and buffers start as those of rank 0. A backward pass sends each bucket of gradients as soon as the bucket
    is complete, in the same order on all ranks. Call :meth:`finish_gradient_synchronization` after it, before the
    optimizer step.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        # Gradients are computed from the last layer to the first.
        parameters = [parameter for parameter in reversed(list(module.parameters())) if parameter.requires_grad]
        max_bytes = gradient_bucket_bytes(sum(parameter.nbytes for parameter in parameters))
        self._buckets = [_Bucket(group) for group in group_by_size(parameters, max_bytes)]
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
    """Parameters of one dtype whose gradients share one all-reduce."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing_gradients = len(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        self._flat = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        self._views = [part.view_as(p) for part, p in zip(self._flat.split(sizes), parameters, strict=True)]
        self._work: Any = None

    @phase("communication")
    def send(self) -> None:
        for view, parameter in zip(self._views, self.parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            parameter.grad = view  # frees the gradient that was copied
        self._flat /= dist.get_world_size()
        self._work = dist.all_reduce(self._flat, async_op=True)

    def receive(self) -> None:
        self._work.wait()
        self.missing_gradients = len(self.parameters)
