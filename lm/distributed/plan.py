"""Preparation of a model for training from outside: ``parallelize`` (tensor parallel, checkpointing, ddp, zero, fsdp),
compilation."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm.common.errors import UserError
from lm.common.execution import Execution, ParallelKind
from lm.common.phases import phase
from lm.distributed.ddp import DDP
from lm.distributed.fsdp import FSDP
from lm.distributed.process_group import get_data_group, get_rank, get_tensor_mesh, is_true_on_any_rank
from lm.distributed.sharding import Bounds
from lm.distributed.zero import ShardedOptimizer
from lm.hardware.device import is_out_of_memory
from lm.model.adapter import copy_layers
from lm.model.attention import AttentionFunction
from lm.model.initialization import LateWeights
from lm.model.ops.causal_attention import causal_attention, choose_attention
from lm.model.rope import RotaryEmbedding
from lm.model.transformer import TransformerLM
from lm.optim.clip import clip_grad_norm
from lm.optim.shards import gather

log = logging.getLogger(__name__)

_CAST_ROLES = ("query_key", "value_output", "feed_forward")  # of matrices that autocast casts whenever they are used
_MIN_FLOPS_TO_COMPILE = 5e13  # compilation takes half a minute, and saves a fifth of some minutes on two cores


def parallelize(
    model: TransformerLM,
    execution: Execution,
    kind: ParallelKind,
    whole: Collection[nn.Parameter] = (),
    autocast_dtype: torch.dtype | None = None,
    late: LateWeights | None = None,
) -> "Parallel":
    """Prepare ``model`` for training as ``execution`` says, in place, and share it among the ranks.

    ``autocast_dtype``: the model is called under autocast with this dtype alone. ``late``: its matrices that have no
    memory yet.

    In order: tensor parallelism as the process group has it, the attention backend, activation checkpointing by block,
    then ``kind`` of data parallelism; see :class:`Parallel`, which also compiles. Make the optimizers with its method.
    Raises UserError if the attention backend is not installed, or if tensor parallelism cannot divide the model.
    """
    if late and kind not in ("zero2", "fsdp"):
        late.draw()
    mesh = get_tensor_mesh()
    ranks = 1 if mesh is None else mesh.size()
    if execution.tensor_parallel != ranks:
        raise UserError(
            f"execution.tensor_parallel is {execution.tensor_parallel}, but the process group was joined for {ranks}; "
            "pass it to process_group too."
        )
    if mesh is not None:
        from lm.distributed.tensor_parallel import apply_tensor_parallel  # slow to import

        apply_tensor_parallel(model, mesh)
    attention_function = choose_attention(execution.attention, model.head_weight.device)
    if execution.activation_checkpointing or attention_function is not causal_attention:
        for layer in model.layers:
            layer.forward = BlockForward(layer.forward, attention_function, execution.activation_checkpointing)
    return Parallel(model, kind, whole, autocast_dtype, late or ())


class Parallel:
    """Shares the training of ``model`` among the ranks.

    none: one process. ddp: all ranks have everything. zero1: optimizer state is sharded. zero2: also gradients; weights
    are gathered once a step. fsdp: weights are gathered and freed block by block, in each pass. zero2 and fsdp leave
    vectors unsharded; with ``autocast_dtype`` they gather the matrices of the blocks in that. The matrices in ``whole``
    are not sharded themselves but belong to one rank each, for optimizers that need whole matrices; stacks of them are
    sharded.

    Tensor parallelism is none or ddp of models that are divided: weights and state are those of this rank's part.
    """

    def __init__(
        self,
        model: TransformerLM,
        kind: ParallelKind,
        whole: Collection[nn.Parameter] = (),
        autocast_dtype: torch.dtype | None = None,
        late: Iterable[nn.Parameter] = (),
    ) -> None:
        self.model, self.kind, self.is_compiled = model, kind, False
        is_divided = get_tensor_mesh() is not None
        self.shards_weights = kind in ("zero2", "fsdp") or is_divided
        self.shards_state = kind in ("zero1", "zero2", "fsdp") or is_divided
        self.wrapper: DDP | FSDP | None = None
        if kind in ("ddp", "zero1"):
            self.wrapper = DDP(model, get_data_group())
        elif kind != "none":
            roles = model.parameter_roles()
            uncast = [p for name, p in model.named_parameters() if p.ndim < 2 or roles[name] not in _CAST_ROLES]
            # As autocast casts them, with half the traffic. Gradients are added in float32, as with autocast.
            self.wrapper = FSDP(
                model,
                autocast_dtype,
                reduce_dtype=autocast_dtype and torch.float32,
                whole=whole,
                uncast=uncast,
                is_resharded_after_forward=kind == "fsdp",
                late=late,
            )
        self._bounds = self.wrapper.bounds if isinstance(self.wrapper, FSDP) else {}

    def make_optimizer(
        self, optimizer_cls: type[torch.optim.Optimizer], params: Iterable[Any], **kwargs: Any
    ) -> torch.optim.Optimizer:
        """Make an optimizer of parameters of the model."""
        if self.kind == "zero1":
            optimizer = ShardedOptimizer(params, optimizer_cls, **kwargs)
            self._bounds |= optimizer.bounds
            return optimizer
        return optimizer_cls(params, **kwargs)

    def local(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that holds the state of this rank's rows: ``optimizer``, or the one that it wraps."""
        return optimizer.local if isinstance(optimizer, ShardedOptimizer) else optimizer

    def bounds(self, parameter: nn.Parameter) -> Bounds | None:
        """Return the rows of each rank, for a parameter of the model or of a local optimizer; None without shards."""
        return self._bounds.get(parameter)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients in backward passes without traffic."""
        return self.wrapper.no_sync() if self.wrapper else nullcontext()

    def finish_gradient_synchronization(self) -> None:
        """Wait until the gradients are averaged over the ranks."""
        if self.wrapper:
            self.wrapper.finish_gradient_synchronization()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the gradients by their global norm, and return it; see :func:`lm.optim.clip_grad_norm`."""
        params = list(self.model.parameters())
        if not isinstance(self.wrapper, FSDP):
            return clip_grad_norm(params, max_norm)
        return clip_grad_norm(params, max_norm, _sum_over_ranks, {p for p in params if self.bounds(p) is None})

    def iterate_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all parameters with their names, unsharded. All ranks must do this together."""
        if isinstance(self.wrapper, FSDP):
            yield from self.wrapper.iterate_full_params()
        else:
            yield from ((name, gather(p.detach())) for name, p in self.model.named_parameters())

    def full_model(self) -> TransformerLM:
        """Return the model, or on rank 0 an unsharded copy if its weights are sharded: on the CPU, for the memory.

        All ranks must call this together.
        """
        if not self.shards_weights:
            return self.model
        weights = {name: p.cpu() for name, p in self.iterate_full_weights() if get_rank() == 0}
        if get_rank() > 0:
            return self.model
        full = TransformerLM(self.model.config, device="meta")
        copy_layers(self.model, full, weights)
        # The state dict adds the buffers.
        full.load_state_dict({name: x.cpu() for name, x in self.model.state_dict().items()} | weights, assign=True)
        for module in full.modules():
            if isinstance(module, RotaryEmbedding):
                module.fill("cpu")
        return full

    def compile_loss(self, loss: Callable[[Any], Tensor], micro_batch: Any) -> Callable[[Any], Tensor]:
        """Compile ``loss(micro_batch)`` and test it with a backward pass. All ranks call this together.

        With several processes the modules that have weights are compiled, each by itself: gradients travel while those
        of earlier blocks are computed, and FSDP works between the modules. It also takes a third of the time to
        compile, as all blocks are alike. One process compiles one graph with all of the loss.

        Return ``loss`` itself, with a warning, if torch.compile does not work on some rank. Raises torch's error if the
        device is out of memory: the training would need the memory without compilation too.
        """
        failures: list[Exception] = []
        by_module = self.wrapper is not None
        # Inside of the checkpointing. Not module.compile(): it would compile FSDP's hooks too.
        owners = [_owner_of_forward(module) for module in self._compiled_modules()] if by_module else []
        originals = [owner.forward for owner in owners]
        compiled = [torch.compile(forward) for forward in originals]
        for owner, forward, original in zip(owners, compiled, originals, strict=True):
            owner.forward = partial(_call_or_fall_back, forward, original, failures)
        compiled_loss = loss if by_module else torch.compile(loss)
        try:  # the first call compiles
            # Of activations to keep: a CPU recomputes the cheap ones in no more time. For a block by itself the dear
            # attention would be among the first 5 %.
            fraction = 0.95 if self.model.head_weight.device.type == "cpu" and not by_module else 1.0
            # The backward pass is compiled in the forward pass too, where a rank can still fall back.
            options = {"activation_memory_budget": fraction, "force_non_lazy_backward_lowering": by_module}
            # A mixture of experts records its routings, not once more in the backward pass of checkpointed blocks.
            skips_side_effects = torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
            with torch._functorch.config.patch(options), skips_side_effects:
                compiled_loss(micro_batch).backward()
        except Exception as error:  # e.g. without a C++ compiler
            if is_out_of_memory(error):
                raise
            failures.append(error)
        if failures:
            reason = str(failures[0]).partition("\n")[0]
            log.warning("torch.compile does not work here, training runs without: %s", reason)
        self.finish_gradient_synchronization()  # else the first step would take the gradients of the test
        self.model.zero_grad(set_to_none=True)
        has_failed = is_true_on_any_rank(bool(failures))
        for owner, forward, original in zip(owners, compiled, originals, strict=True):
            owner.forward = original if has_failed else partial(_call_in_training, forward, original)
        self.is_compiled = not has_failed
        return loss if has_failed else compiled_loss

    def _compiled_modules(self) -> list[nn.Module]:
        """Return the modules that are compiled by themselves: together they have all weights."""
        model = self.model
        return list(dict.fromkeys([*model.layers, model.token_embeddings, model.ln_final, model.head]))


def repays_compilation(training_flops: float) -> bool:
    """Return whether a training is long enough to be compiled."""
    return training_flops >= _MIN_FLOPS_TO_COMPILE


class BlockForward:
    """The forward pass of a block, with the attention backend and the checkpointing of a training.

    With ``is_checkpointed`` the block stores no activations: the backward pass runs it again, for about a third more
    work.
    """

    def __init__(
        self, forward: Callable[..., Tensor], attention_function: AttentionFunction, is_checkpointed: bool
    ) -> None:
        self.forward, self.attention_function, self.is_checkpointed = forward, attention_function, is_checkpointed

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the forward pass."""
        kwargs = {"attention_function": self.attention_function} | kwargs
        if not self.is_checkpointed or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        out: Tensor = checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return out


def _owner_of_forward(module: nn.Module) -> Any:
    """Return the object whose ``forward`` computes ``module``."""
    return module.forward if isinstance(module.forward, BlockForward) else module


def _call_in_training(compiled: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``compiled`` for the training's own batches; evaluation and generation have other shapes."""
    return (compiled if torch.is_grad_enabled() else original)(*args, **kwargs)


def _call_or_fall_back(
    compiled: Callable[..., Any], original: Callable[..., Any], failures: list[Exception], *args: Any, **kwargs: Any
) -> Any:
    """Call ``compiled``, or ``original`` after any failure: the other ranks wait for the collectives of this pass."""
    if not failures:
        try:
            return compiled(*args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failures.append(error)
    return original(*args, **kwargs)


@phase("communication")
def _sum_over_ranks(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values
