"""What a checkpoint holds of a training: this process's weights, optimizer states and random number generators."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.distributed.plan import Parallel
from lm.distributed.process_group import get_rank, get_world_size
from lm.model.adapter import trained_state
from lm.model.transformer import TransformerLM
from lm.optim.shards import gather

Buffers = dict[tuple[Any, ...], Tensor]
"""Tensors of an earlier copy by their places in the snapshot. Memory that was used before is filled in a third of the
time of new memory."""


class TrainingSnapshot(NamedTuple):
    """The state of a training at one step; the tensors may be those of the training itself."""

    weights: dict[str, Tensor]
    """By name; those of an adapter's training are the adapter's. Empty if other ranks save them."""
    states: list[dict[str, Any]]
    """The state dict of each optimizer."""
    rng: dict[str, Any]
    """States of torch's random number generators: ``cpu``, and ``cuda``, one per device."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors: list[Tensor] = [*self.weights.values()]
        for states in self.states:
            tensors += [x for state in states["state"].values() for x in state.values() if isinstance(x, Tensor)]
        return sum(tensor.nbytes for tensor in tensors)

    def copy(self, buffers: Buffers) -> "TrainingSnapshot":
        """Return a copy on the CPU in the memory of ``buffers``, which are extended if they lack a place."""
        return TrainingSnapshot(*(_copy(value, buffers, (name,)) for name, value in self._asdict().items()))


def _copy(value: Any, buffers: Buffers, place: tuple[Any, ...]) -> Any:
    match value:
        case dict():
            return {key: _copy(entry, buffers, (*place, key)) for key, entry in value.items()}
        case list():
            return [_copy(entry, buffers, (*place, number)) for number, entry in enumerate(value)]
        case Tensor():
            buffer = buffers.get(place)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = buffers[place] = torch.empty(value.shape, dtype=value.dtype)
            return buffer.copy_(value.detach())
    return value


def take_snapshot(
    model: TransformerLM, optimizers: list[torch.optim.Optimizer], parallel: Parallel | None = None
) -> TrainingSnapshot:
    """Return what this process saves of a training, without a copy.

    If ``parallel`` shards weights or state, all ranks must call this together, and each gets its rows of every tensor.
    """
    rank, world_size = (get_rank(), get_world_size()) if parallel and parallel.shards_state else (0, 1)
    weight_shards = world_size if parallel and parallel.shards_weights else 1
    return TrainingSnapshot(
        weights=_local_weights(model, rank, weight_shards, parallel) if rank < weight_shards else {},
        states=[_local_state(o, rank, world_size, parallel) if parallel else o.state_dict() for o in optimizers],
        rng={"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()},
    )


def _local_weights(model: TransformerLM, shard: int, shards: int, parallel: Parallel | None) -> dict[str, Tensor]:
    """Return a shard's rows of all weights."""
    sharded = {name for name, p in model.named_parameters(remove_duplicate=False) if parallel and parallel.bounds(p)}
    return {
        key: tensor.contiguous() if key in sharded or shards == 1 else _rows_of_shard(tensor, shard, shards)
        for key, tensor in trained_state(model).items()
    }


def _local_state(optimizer: torch.optim.Optimizer, shard: int, shards: int, parallel: Parallel) -> dict[str, Any]:
    """Return the state dict of a shard's rows. Of a parameter that all ranks have whole, each saves a share."""
    optimizer = parallel.local(optimizer)
    state_dict = optimizer.state_dict()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {
            key: _rows_of_shard(value, shard, shards)
            if shards > 1 and isinstance(value, Tensor) and value.ndim and parallel.bounds(params[index]) is None
            else value
            for key, value in entry.items()
        }
        for index, entry in state_dict["state"].items()
    }
    return state_dict | {"state": state}


def _rows_of_shard(tensor: Tensor, shard: int, shards: int) -> Tensor:
    rows = torch.atleast_1d(gather(tensor))
    # A view would be saved with the whole tensor.
    return rows[len(rows) * shard // shards : len(rows) * (shard + 1) // shards].clone()
