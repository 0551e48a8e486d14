"""Data parallelism: several processes train one model, each on its part of every batch.

Sources: CS336 assignment 2 (data parallelism); Li et al. 2020 (gradients sent in buckets during the backward pass).
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lm.errors import UserError

_BUCKET = 25 << 20  # bytes of gradients that are sent at once


@contextmanager
def joined(device: torch.device) -> Iterator[torch.device]:
    """Be one of the processes that ``torchrun`` started, as its environment variables tell; gives this one's device.

    They talk by nccl on GPUs and by gloo on processors. Where there is only this process, nothing is done. Raises
    UserError where a process has no GPU of its own, or the device is neither.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device
        return
    if device.type == "cuda":
        number = int(os.environ["LOCAL_RANK"])
        if number >= torch.cuda.device_count():
            raise UserError(f"Process {number} has no GPU: there are {torch.cuda.device_count()}; start one each.")
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise UserError(f"Several processes cannot train on {device}; use cpu or cuda.")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def mean_over_processes(values: Tensor) -> Tensor:
    """The mean of a tensor over all processes, in place; itself where there is one process."""
    if dist.is_initialized():
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values


def told_by_first(value: Any) -> Any:
    """What the first process gives, in all of them: plain data."""
    if not dist.is_initialized():
        return value
    told = [value]
    dist.broadcast_object_list(told)
    return told[0]


class DDP:
    """Keeps the gradients of a model the same in all processes: their mean.

    Weights and buffers start as those of the first process. While the backward pass runs, each bucket of gradients is
    sent as soon as all of it is there, in the same order everywhere; :meth:`finish` waits for them. Only while
    ``is_last`` is set; before (in the micro-batches before the last one) gradients add up.
    """

    def __init__(self, model: nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self.is_last = False
        # Gradients come from the last layer to the first.
        parameters = [parameter for parameter in reversed(list(model.parameters())) if parameter.requires_grad]
        self._buckets = [_Bucket(group) for group in _by_size(parameters)]
        self._sent = 0  # buckets
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._arrived(bucket))

    def _arrived(self, bucket: "_Bucket") -> None:
        if self.is_last:
            bucket.missing -= 1
            while self._sent < len(self._buckets) and self._buckets[self._sent].missing == 0:
                self._buckets[self._sent].send()
                self._sent += 1

    def finish(self) -> None:
        """Wait until the gradients of all processes are averaged. A parameter without one counts as zeros."""
        for bucket in self._buckets[self._sent :]:
            bucket.send()
        for bucket in self._buckets:
            bucket.receive()
        self._sent = 0


class _Bucket:
    """Parameters of one type whose gradients are sent together."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        self._flat = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        self._views = [part.view_as(p) for part, p in zip(self._flat.split(sizes), parameters, strict=True)]
        self._work: Any = None

    def send(self) -> None:
        for view, parameter in zip(self._views, self.parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
        self._flat /= dist.get_world_size()
        self._work = dist.all_reduce(self._flat, async_op=True)

    def receive(self) -> None:
        self._work.wait()
        for view, parameter in zip(self._views, self.parameters, strict=True):
            parameter.grad = view
        self.missing = len(self.parameters)


def _by_size(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups in order, each of one type and of about a bucket's size."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        if not groups or size > _BUCKET or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.nbytes
    return groups
