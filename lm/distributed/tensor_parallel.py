"""Tensor parallelism: each rank computes with a part of every matrix (Shoeybi et al. 2019, Megatron-LM).

The first matrices of a sublayer are divided by their outputs, that is by heads or by hidden units, and its last matrix
by its inputs. So a sublayer needs one all-reduce in the forward pass and one in the backward pass. Parameters become
DTensors of torch. A module computes with this rank's part as a plain tensor, because the fused operations of
:mod:`lm.model.ops` take no DTensors.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lm.common.errors import UserError
from lm.distributed.vocabulary_parallel import (
    parallel_cross_entropy,
    parallel_embedding,
    parallel_logits,
    sum_gradients,
    sum_over_ranks,
)
from lm.model.transformer import TransformerLM


def apply_tensor_parallel(model: TransformerLM, mesh: DeviceMesh) -> None:
    """Divide the weights of ``model`` among the ranks of the one-dimensional ``mesh``, in place.

    Every rank calls the model with the same batch and gets the same output. Parameters are DTensors afterwards: make
    the optimizer then, of :mod:`lm.optim` or of torch. Weights start as those of the mesh's first rank. To divide the
    batch too, apply torch's ``fully_shard`` over another dimension of the mesh next. Raises UserError if the heads, the
    hidden units or the vocabulary cannot be divided, and
    for a mixture of experts.
    """
    _check_is_divisible(model, mesh)
    parallelize_module(model, mesh, _plan(model))
    model.head_function, model.loss_function = parallel_logits, parallel_cross_entropy


def gather_full_params(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters by name, whole, on every rank, as new tensors. All ranks must call this together."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def _check_is_divisible(model: TransformerLM, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise UserError(
            f"The mesh has {mesh.ndim} dimensions; pass the one of tensor parallelism, e.g. mesh['tensor']."
        )
    config, ranks = model.config, mesh.size()
    if config.moe is not None:
        raise UserError("model.moe cannot be divided by tensor parallelism; use execution.parallel, e.g. fsdp.")
    widths = {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads, "d_ff": config.d_ff}
    for name, width in widths.items():
        if width % ranks:
            raise UserError(
                f"model.{name} {width} cannot be divided among {ranks} processes of tensor parallelism; "
                "make it a multiple of their number, or use fewer processes."
            )
    vocab_size = len(model.token_embeddings.weight)
    if -(-vocab_size // ranks) * (ranks - 1) >= vocab_size:
        raise UserError(
            f"model.vocab_size {vocab_size} is too small to be divided among {ranks} processes; use fewer processes."
        )


def _plan(model: TransformerLM) -> dict[str, ParallelStyle]:
    """Return the style of each module that has weights, or at which a divided sublayer begins."""
    replicated, by_output = _LocalWeight(Replicate()), _LocalWeight(Shard(0))
    by_input = _LocalWeight(Shard(1), is_output_partial=True)
    plan: dict[str, ParallelStyle] = {
        "token_embeddings": _Vocabulary(parallel_embedding),
        "layers.*.attn": _SublayerInput(),
        "layers.*.attn.[qkv]_proj": by_output,
        # Each rank has other heads, and so a part of the gradient.
        "layers.*.attn.[qk]_norm": _LocalWeight(Replicate(), is_gradient_partial=True),
        "layers.*.attn.output_proj": by_input,
        "layers.*.ffn": _SublayerInput(),
        "layers.*.ffn.w[13]": by_output,
        "layers.*.ffn.w2": by_input,
        "layers.*.ln[12]": replicated,
        "ln_final": replicated,
    }
    if model.lm_head is not None:
        plan["lm_head"] = _Vocabulary(parallel_logits)
    if model.scalar_head is not None:
        plan["scalar_head"] = replicated
    return plan


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, p in list(module.named_parameters(recurse=False)):
        divided = distribute_tensor(p.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(divided, p.requires_grad))


class _LocalWeight(ParallelStyle):
    """Divides the weights of a module. Its calls see this rank's part of each as a plain tensor.

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
            module.register_forward_hook(lambda _, args, output: sum_over_ranks(output, device_mesh))
        return module

    def _use_local_weights(self, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, p in module.named_parameters(recurse=False):
            local = p.to_local()  # type: ignore[attr-defined]
            # An attribute of the instance hides the parameter, which stays registered.
            module.__dict__[name] = sum_gradients(local, mesh) if self.is_gradient_partial else local

    def _use_parameters(self, module: nn.Module) -> None:
        for name, _ in module.named_parameters(recurse=False):
            module.__dict__.pop(name, None)


class _SublayerInput(ParallelStyle):
    """Sums the gradients of a sublayer's input over the ranks: each has the part of its heads or hidden units."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: (sum_gradients(args[0], device_mesh), *args[1:]))
        return module


class _Vocabulary(ParallelStyle):
    """Divides the weight of an embedding or a head by token ids, and replaces its forward pass."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Shard(0))
        module.forward = lambda x: self.function(x, module.get_parameter("weight"))
        return module
