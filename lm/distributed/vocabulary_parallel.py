"""Embedding, logits and cross-entropy of a vocabulary that is divided among ranks (Shoeybi et al. 2019, Megatron-LM).

For the loss no rank has the logits of all ids. The ranks exchange three numbers per token: the maximum, the sum of the
exponentials and the target's logit.
"""

from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from lm.model.functional import IGNORE_INDEX
from lm.model.ops.matmul import linear

_CHUNK_BYTES = 1 << 27  # float32 logits of a chunk of tokens, on one rank


def sum_gradients(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return ``x``, which all ranks have; in the backward pass its gradients are summed over the ranks."""
    return DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])


def sum_over_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of ``x`` over the ranks; in the backward pass each rank has the gradient of the sum."""
    return DTensor.from_local(x, mesh, [Partial()]).redistribute(mesh, [Replicate()]).to_local()


def parallel_embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Look up rows of ``weight``, a DTensor (V, D) divided by rows: integer ids (...) → (..., D) on every rank."""
    weight = cast(DTensor, weight)
    local_ids, is_local = _find_local_ids(token_ids, weight)
    rows = F.embedding(local_ids, weight.to_local()).masked_fill(~is_local[..., None], 0)
    return sum_over_ranks(rows, weight.device_mesh)


def parallel_logits(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """Return the logits of all ids on every rank: (..., D), DTensor (V, D) divided by rows → (..., V)."""
    weight = cast(DTensor, weight)
    mesh = weight.device_mesh
    logits = linear(sum_gradients(hidden_states, mesh), weight.to_local())
    shape = torch.Size((*hidden_states.shape[:-1], len(weight)))
    stride = torch.empty(shape, device="meta").stride()
    divided = DTensor.from_local(logits, mesh, [Shard(logits.ndim - 1)], shape=shape, stride=stride)
    return divided.redistribute(mesh, [Replicate()]).to_local()


def parallel_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, softcap: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of the logits ``x weightᵀ`` and ``targets`` on every rank, in nats; float32, or
    float64 for float64 inputs.

    ``x`` (N, D), ``weight`` DTensor (V, D) divided by rows, ``targets`` int (N,). The same as
    :func:`lm.model.ops.cross_entropy.linear_cross_entropy`. Memory holds one chunk of this rank's logits at a time;
    the backward pass computes them again.
    """
    weight = cast(DTensor, weight)
    mesh, local = weight.device_mesh, weight.to_local()
    rows = max(1, _CHUNK_BYTES // (4 * _ids_per_rank(weight)))  # the same on all ranks
    local_ids, is_local = _find_local_ids(targets, weight)
    parts = (tensor.split(rows) for tensor in (sum_gradients(x, mesh), local_ids, is_local, targets != IGNORE_INDEX))
    sums = [
        checkpoint(_loss_sum, *part, local, softcap, mesh, use_reentrant=False) for part in zip(*parts, strict=True)
    ]
    return torch.stack(sums).sum() / (targets != IGNORE_INDEX).sum().clamp(min=1)


def _loss_sum(
    x: Tensor, local_ids: Tensor, is_local: Tensor, is_counted: Tensor, weight: Tensor, softcap: float, mesh: DeviceMesh
) -> Tensor:
    """Return the sum of the losses of some tokens, from this rank's rows of the weight."""
    logits = linear(x, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    max_logit = logits.detach().amax(-1)
    dist.all_reduce(max_logit, dist.ReduceOp.MAX, mesh.get_group())
    exp_sum = (logits - max_logit[:, None]).exp().sum(-1)
    target_logit = logits.gather(-1, local_ids[:, None]).squeeze(-1).masked_fill(~is_local, 0)
    exp_sum, target_logit = sum_over_ranks(torch.stack((exp_sum, target_logit)), mesh)
    return (exp_sum.log() + max_logit - target_logit).masked_fill(~is_counted, 0).sum()


def _find_local_ids(ids: Tensor, weight: DTensor) -> tuple[Tensor, Tensor]:
    """Return the row of each id on this rank, and whether this rank has it; the row is 0 if it does not."""
    rows = ids - _ids_per_rank(weight) * weight.device_mesh.get_local_rank()
    is_local = (rows >= 0) & (rows < len(weight.to_local()))
    return rows.where(is_local, 0), is_local


def _ids_per_rank(weight: DTensor) -> int:
    """Return the number of ids of each rank. Shard gives the last ranks fewer, if the ids do not divide evenly."""
    return -(-len(weight) // weight.device_mesh.size())
