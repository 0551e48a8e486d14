"""The torch process group of a training."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lm.common.errors import UserError
from lm.common.phases import phase

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # slow to import

T = TypeVar("T")
RENDEZVOUS_VARIABLE = "TEXTMILL_RENDEZVOUS"  # environment variable: file:// URL of a file that does not exist yet

_host_group: dist.ProcessGroup | None = None  # of plain data and barriers: waits as long as rank 0 works alone
_mesh: "DeviceMesh | None" = None  # of data and tensor parallelism


@contextmanager
def process_group(device: torch.device, tensor_parallel: int = 1) -> Iterator[torch.device]:
    """Join the process group that the environment variables of ``torchrun`` describe; yield the device of this rank.

    Ranks meet through the file that RENDEZVOUS_VARIABLE names, or through torchrun's store. The backend is nccl for
    tensors on GPUs and gloo for those on CPUs. If WORLD_SIZE is 1 or not set, there is no process group. Each
    ``tensor_parallel`` consecutive ranks divide a model by tensor parallelism, and such groups divide the batch. Raises
    UserError if a rank has no GPU of its own, if several ranks are to train on a device other than GPU and CPU, or if
    WORLD_SIZE is not a multiple of ``tensor_parallel``.

    Collectives of tensors fail if a rank does not come within torch's time, 10 to 30 minutes. :func:`barrier` and those
    of plain data wait for a day: rank 0 may download, save or sample meanwhile.
    """
    global _host_group, _mesh
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_world_size(world_size, tensor_parallel)
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
        if tensor_parallel > 1:
            from torch.distributed.device_mesh import init_device_mesh

            shape = (world_size // tensor_parallel, tensor_parallel)
            _mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
        yield device
    finally:
        _host_group = _mesh = None
        dist.destroy_process_group()


def check_world_size(world_size: int, tensor_parallel: int) -> None:
    """Raise UserError if the processes of a training are not a multiple of those that divide a model."""
    if world_size % tensor_parallel:
        raise UserError(
            f"execution.tensor_parallel is {tensor_parallel}, and the training has {world_size} "
            f"{'process' if world_size == 1 else 'processes'}; set execution.processes, or --nproc-per-node of "
            f"torchrun, to a multiple of {tensor_parallel}."
        )


def get_rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_tensor_mesh() -> "DeviceMesh | None":
    """Return the ranks that divide the model with this one by tensor parallelism; None without it."""
    return _mesh["tensor"] if _mesh is not None else None


def get_data_group() -> dist.ProcessGroup | None:
    """Return the group of ranks that divide the batch, and have the same part of the model; None if all ranks do."""
    return _mesh.get_group("data") if _mesh is not None else None


def get_data_rank() -> int:
    """Return the number of this rank's part of the batch."""
    return _mesh.get_local_rank("data") if _mesh is not None else get_rank()


def get_data_world_size() -> int:
    """Return the number of parts of the batch. The ranks of a part divide the model by tensor parallelism."""
    return _mesh["data"].size() if _mesh is not None else get_world_size()


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
