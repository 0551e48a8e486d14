"""The torch process group of a training."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lm.common.errors import UserError
from lm.common.phases import phase

T = TypeVar("T")
RENDEZVOUS_VARIABLE = "TEXTMILL_RENDEZVOUS"  # environment variable: file:// URL of a file that does not exist yet

_host_group: dist.ProcessGroup | None = None  # of plain data and barriers: waits as long as rank 0 works alone


@contextmanager
def process_group(device: torch.device) -> Iterator[torch.device]:
    """Join the process group that the environment variables of ``torchrun`` describe; yield the device of this rank.

    Ranks meet through the file that RENDEZVOUS_VARIABLE names, or through torchrun's store. The backend is nccl for
    tensors on GPUs and gloo for those on CPUs. If WORLD_SIZE is 1 or not set, there is no process group. Raises
    UserError if a rank has no GPU of its own, or if several ranks are to train on a device other than GPU and CPU.

    Collectives of tensors fail if a rank does not come within torch's time, 10 to 30 minutes. :func:`barrier` and those
    of plain data wait for a day: rank 0 may download, save or sample meanwhile.
    """
    global _host_group
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield device
        return
    if device.type == "cuda":
        local_rank = int(os.environ["LOCAL_RANK"])
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"Process {local_rank} has no GPU: this machine has {torch.cuda.device_count()}; "
                "start one process per GPU."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise UserError(f"Several processes cannot train on {device}; use cpu or cuda.")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=os.environ.get(RENDEZVOUS_VARIABLE),  # None: MASTER_ADDR and MASTER_PORT
        rank=int(os.environ["RANK"]),
        world_size=world_size,
    )
    try:
        _host_group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        yield device
    finally:
        _host_group = None
        dist.destroy_process_group()


def get_rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_local_world_size() -> int:
    """Return the number of processes on this machine. torchrun tells it; else all processes are here."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))


def barrier() -> None:
    """Wait until all ranks are here."""
    if dist.is_initialized():
        dist.barrier(_host_group)


@phase("communication")
def all_reduce_mean(values: Tensor) -> Tensor:
    """Average a tensor over all ranks, in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values


def is_true_on_any_rank(value: bool) -> bool:
    """Return whether ``value`` is True on any rank. The processes wait for each other, not for their GPUs."""
    return bool(all_reduce_mean(torch.tensor(float(value))) > 0) if dist.is_initialized() else value


def all_gather(value: T) -> list[T]:
    """Return the value of each rank (plain data), on all ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, _host_group)
    return values


def broadcast_from_rank0(value: Any) -> Any:
    """Return rank 0's ``value`` (plain data) on all ranks."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, group=_host_group)
    return values[0]


def call_on_rank0(function: Callable[[], T]) -> T:
    """Call ``function`` on rank 0, and return its result on all ranks.

    The result is plain data, in which tensors on the CPU may be large: they travel one by one. All ranks raise a
    UserError that ``function`` raises.
    """
    if not dist.is_initialized():
        return function()
    result: Any = None
    error: UserError | None = None
    if get_rank() == 0:
        try:
            result = tree_map_only(Tensor, Tensor.contiguous, function())
        except UserError as caught:
            error = caught
    shapes = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), result)
    shapes, error = broadcast_from_rank0((shapes, error))
    if error is not None:
        raise error
    if get_rank() > 0:
        result = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="cpu"), shapes)
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            dist.broadcast(leaf, 0, _host_group)
    return result
