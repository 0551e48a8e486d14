"""Shards of DTensors, the tensors of a model that tensor parallelism divides. Plain tensors pass unchanged."""

from typing import Any

from torch import Tensor


def local_shard(x: Tensor) -> Tensor:
    """Return this rank's shard of ``x``: of a DTensor its local tensor, of any other tensor all of it.

    In-place operations on views of a DTensor may change a copy.
    """
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def gather(x: Tensor) -> Tensor:
    """Return all of a DTensor, on all ranks that share it, which must do this together; any other tensor as it is."""
    whole: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole


def as_shard(local: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard ``local`` as a DTensor with the shape and the ranks of ``like``, without a copy; if that
    is no DTensor, ``local`` itself."""
    if not hasattr(like, "to_local"):
        return local
    from torch.distributed.tensor import DTensor  # slow to import

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return DTensor.from_local(local, mesh, placements, shape=like.shape, stride=like.stride())


def shard_like(x: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor as a DTensor with the shards of ``like``. If ``like`` is no DTensor, or has another shape,
    return ``x``.

    All ranks have ``x``, so nothing is sent.
    """
    if not hasattr(like, "to_local") or hasattr(x, "to_local") or x.shape != like.shape:
        return x
    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    for dim, placement in enumerate(like.placements):  # type: ignore[attr-defined]
        if placement.is_shard():
            x = x.chunk(mesh.size(dim), placement.dim)[mesh.get_local_rank(dim)]
    return as_shard(x.to(like.device, copy=True).contiguous(), like)  # a view would keep the whole in memory
