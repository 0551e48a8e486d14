"""Tensor parallelism: each rank computes with a shard of every matrix (Shoeybi et al. 2019, Megatron-LM).

The first matrices of a sublayer are sharded by their outputs, that is by heads or by hidden units, and its last matrix
by its inputs. So a sublayer needs one all-reduce in the forward pass and one in the backward pass. Parameters become
DTensors of torch. A module computes with this rank's shard as a plain tensor, because the fused operations of
:mod:`lm.model.ops` take no DTensors.

The vocabulary is sharded too: for the loss no rank has the logits of all ids. The ranks exchange three numbers per
token: the maximum, the sum of the exponentials and the target's logit.
Shapes: N tokens, D d_model, V vocabulary.
"""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import checkpoint

from lm.common.errors import UserError
from lm.model.config import ModelConfig
from lm.model.functional import IGNORE_INDEX
from lm.model.ops.matmul import linear
from lm.model.transformer import TransformerLM
from lm.optim.shards import gather, shard_like

_CHUNK_BYTES = 1 << 27  # float32 logits of a chunk of tokens, on one rank


def apply_tensor_parallel(model: TransformerLM, mesh: DeviceMesh) -> None:
    """Shard the weights of ``model`` among the ranks of the one-dimensional ``mesh``, in place.

    Every rank calls the model with the same batch and gets the same output. Parameters are DTensors afterwards: make
    the optimizer then, of :mod:`lm.optim` or of torch. Weights start as those of the mesh's first rank, and
    ``model.load_state_dict`` takes whole ones. To divide the batch too, apply torch's ``fully_shard`` over another
    dimension of the mesh next. Raises UserError if the heads, the hidden units or the vocabulary cannot be sharded, and
    for a mixture of experts.
    """
    if mesh.ndim != 1:
        raise UserError(
            f"The mesh has {mesh.ndim} dimensions; pass the one of tensor parallelism, e.g. mesh['tensor']."
        )
    config_of_rank(model.config, mesh.size())
    parallelize_module(model, mesh, _plan(model))
    model.register_load_state_dict_pre_hook(_shard_state_dict)


def gather_full_params(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters by name, unsharded, on every rank, as new tensors. All ranks must call this together."""
    return {name: gather(p).detach().clone() for name, p in model.named_parameters()}


def config_of_rank(config: ModelConfig, ranks: int) -> ModelConfig:
    """Return the config of the part of a model that each of ``ranks`` ranks has. Its parameters and activations have
    the shapes of that part.

    Raises UserError if the model cannot be divided.
    """
    if config.moe is not None:
        raise UserError("model.moe cannot be divided by tensor parallelism; use execution.parallel, e.g. fsdp.")
    if not config.qk_norm_per_head:
        raise UserError(
            "model.qk_norm_per_head false cannot be divided by tensor parallelism; use execution.parallel, e.g. fsdp."
        )
    widths = {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads, "d_ff": config.d_ff}
    for name, width in widths.items():
        if width % ranks:
            raise UserError(
                f"model.{name} {width} cannot be divided among {ranks} processes of tensor parallelism; "
                "make it a multiple of their number, or use fewer processes."
            )
    vocab_size = config.vocab_size
    if vocab_size and _ids_per_rank(vocab_size, ranks) * (ranks - 1) >= vocab_size:
        raise UserError(
            f"model.vocab_size {vocab_size} is too small to be divided among {ranks} processes; use fewer processes."
        )
    return replace(
        config,
        vocab_size=vocab_size and _ids_per_rank(vocab_size, ranks),
        num_heads=config.num_heads // ranks,
        num_kv_heads=config.kv_heads // ranks,
        head_dim=config.resolved_head_dim,
        d_ff=config.d_ff // ranks,
    )


def _shard_state_dict(model: nn.Module, state_dict: dict[str, Any], *_: Any) -> None:
    """Shard whole tensors as the parameters of the model. A hook before ``load_state_dict``, which passes a copy."""
    for name, p in model.named_parameters():
        if isinstance(state_dict.get(name), Tensor):
            state_dict[name] = shard_like(state_dict[name], p)


def _plan(model: TransformerLM) -> dict[str, ParallelStyle]:
    """Return the style of each module that has weights, or at which a sharded sublayer begins."""
    replicated, by_output = _LocalWeight(Replicate()), _LocalWeight(Shard(0))
    by_input = _LocalWeight(Shard(1), is_output_partial=True)
    plan: dict[str, ParallelStyle] = {
        "token_embeddings": _Vocabulary(),
        "layers.*.attn": _SublayerInput(),
        "layers.*.attn.[qkv]_proj": by_output,
        # Each rank has other heads, and so a partial gradient.
        "layers.*.attn.[qk]_norm": _LocalWeight(Replicate(), is_gradient_partial=True),
        "layers.*.attn.output_proj": by_input,
        "layers.*.ffn": _SublayerInput(),
        "layers.*.ffn.w[13]": by_output,
        "layers.*.ffn.w2": by_input,
        "layers.*.ln[12]": replicated,
        "ln_final": replicated,
    }
    if model.config.norm_placement == "sandwich":
        plan["layers.*.ln[12]_out"] = replicated
    if model.config.value_residual:
        plan["layers.*.attn.value_sum"] = _LocalWeight(Replicate(), is_gradient_partial=True)
    if model.lm_head is not None:
        plan["lm_head"] = _Vocabulary()
    if model.scalar_head is not None:
        plan["scalar_head"] = replicated
    return plan


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, p in list(module.named_parameters(recurse=False)):
        sharded = distribute_tensor(p.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(sharded, p.requires_grad))


class _LocalWeight(ParallelStyle):
    """Shards the weights of a module. Its calls see this rank's shard of each as a plain tensor.

    ``is_gradient_partial``: the gradients of the weights are summed over the ranks. ``is_output_partial``: the outputs.
    """

    def __init__(
        self, placement: Placement, *, is_gradient_partial: bool = False, is_output_partial: bool = False
    ) -> None:
        super().__init__()
        self.placement = placement
        self.is_gradient_partial, self.is_output_partial = is_gradient_partial, is_output_partial

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, self.placement)
        module.register_forward_pre_hook(lambda module, _: self._use_local_weights(module, device_mesh))
        # Also after an exception: activation checkpointing ends its second forward pass by one.
        module.register_forward_hook(lambda module, *_: self._use_parameters(module), always_call=True)
        if self.is_output_partial:
            module.register_forward_hook(lambda _, args, output: _sum_over_mesh(output, device_mesh))
        return module

    def _use_local_weights(self, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, p in module.named_parameters(recurse=False):
            local = p.to_local()  # type: ignore[attr-defined]
            # An attribute of the instance hides the parameter, which stays registered.
            module.__dict__[name] = _sum_gradients(local, mesh) if self.is_gradient_partial else local

    def _use_parameters(self, module: nn.Module) -> None:
        for name, _ in module.named_parameters(recurse=False):
            module.__dict__.pop(name, None)


class _SublayerInput(ParallelStyle):
    """Sums the gradients of a sublayer's input over the ranks: each has that of its heads or hidden units."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: (_sum_gradients(args[0], device_mesh), *args[1:]))
        return module


class _Vocabulary(ParallelStyle):
    """Shards the weight of an embedding or a head by token ids, and replaces its forward pass."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Shard(0))
        module.forward = partial(_call_vocabulary, module)
        return module


def _call_vocabulary(module: nn.Module, x: Tensor, targets: Tensor | None = None, softcap: float = 0.0) -> Tensor:
    """Compute what :class:`lm.model.linear.Embedding`, ``TiedEmbedding`` and ``Head`` do, the same on every rank."""
    weight = cast(DTensor, module.get_parameter("weight"))  # which torch's fully_shard replaces
    mesh = weight.device_mesh
    if not x.is_floating_point():
        local_ids, is_local = _find_local_ids(x, weight)
        return _sum_over_mesh(F.embedding(local_ids, weight.to_local()).masked_fill(~is_local[..., None], 0), mesh)
    if targets is not None:
        return _parallel_cross_entropy(x, weight, targets, softcap)
    logits = linear(_sum_gradients(x, mesh), weight.to_local())
    shape = torch.Size((*x.shape[:-1], len(weight)))
    stride = torch.empty(shape, device="meta").stride()
    sharded = DTensor.from_local(logits, mesh, [Shard(logits.ndim - 1)], shape=shape, stride=stride)
    return sharded.redistribute(mesh, [Replicate()]).to_local()


def _sum_gradients(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return ``x``, which all ranks have; in the backward pass its gradients are summed over the ranks."""
    return DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])


def _sum_over_mesh(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of ``x`` over the ranks; in the backward pass each rank has the gradient of the sum."""
    return DTensor.from_local(x, mesh, [Partial()]).redistribute(mesh, [Replicate()]).to_local()


def _parallel_cross_entropy(x: Tensor, weight: DTensor, targets: Tensor, softcap: float) -> Tensor:
    """Return the mean cross-entropy of the logits ``x weightᵀ`` and ``targets`` on every rank, in nats; float32, or
    float64 for float64 inputs.

    ``x`` (N, D), ``weight`` DTensor (V, D) sharded by rows, ``targets`` int (N,). The same as
    :func:`lm.model.ops.cross_entropy.linear_cross_entropy`. Memory holds one chunk of this rank's logits at a time;
    the backward pass computes them again.
    """
    mesh, local = weight.device_mesh, weight.to_local()
    rows = max(1, _CHUNK_BYTES // (4 * _ids_per_rank(len(weight), mesh.size())))  # the same on all ranks
    local_ids, is_local = _find_local_ids(targets, weight)
    parts = (tensor.split(rows) for tensor in (_sum_gradients(x, mesh), local_ids, is_local, targets != IGNORE_INDEX))
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
    exp_sum, target_logit = _sum_over_mesh(torch.stack((exp_sum, target_logit)), mesh)
    return (exp_sum.log() + max_logit - target_logit).masked_fill(~is_counted, 0).sum()


def _find_local_ids(ids: Tensor, weight: DTensor) -> tuple[Tensor, Tensor]:
    """Return the row of each id on this rank, and whether this rank has it; the row is 0 if it does not."""
    rows = ids - _ids_per_rank(len(weight), weight.device_mesh.size()) * weight.device_mesh.get_local_rank()
    is_local = (rows >= 0) & (rows < len(weight.to_local()))
    return rows.where(is_local, 0), is_local


def _ids_per_rank(vocab_size: int, ranks: int) -> int:
    """Return the number of ids of each rank. Shard gives the last ranks fewer, if they do not divide the ids evenly."""
    return -(-vocab_size // ranks)
