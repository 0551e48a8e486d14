"""``torch.compile`` for the loss of a training step."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from lm.distributed.plan import Parallel
from lm.distributed.process_group import is_true_on_any_rank
from lm.hardware.device import is_out_of_memory
from lm.model.transformer import TransformerLM

log = logging.getLogger(__name__)

_MIN_FLOPS_TO_COMPILE = 5e13  # compilation takes half a minute, and saves a fifth of some minutes on two cores
_CPU_ACTIVATION_FRACTION = 0.95  # activations to keep; a CPU recomputes the cheap ones in no more time


def compile_loss(
    loss: Callable[[Any], Tensor], model: TransformerLM, parallel: Parallel, micro_batch: Any, training_flops: float
) -> Callable[[Any], Tensor]:
    """Compile ``loss(micro_batch)`` and test it with a backward pass. All ranks call this together.

    With FSDP, which works between the blocks, only these are compiled, each by itself.

    Return ``loss`` itself if the training is short, or, with a warning, if torch.compile does not work on some rank.
    Raises torch's error if the device is out of memory: the training would need the memory without compilation too.
    """
    if not repays_compilation(training_flops):
        return loss
    failures: list[Exception] = []
    by_block = parallel.divides_weights
    layers = list(model.layers) if by_block else []
    originals = [layer.forward for layer in layers]
    blocks = [torch.compile(forward) for forward in originals]  # not layer.compile(): it would compile FSDP's hooks too
    for layer, compiled, original in zip(layers, blocks, originals, strict=True):
        layer.forward = partial(_call_or_fall_back, compiled, original, failures)
    compiled_loss = loss if by_block else torch.compile(loss)
    try:  # the first call compiles
        fraction = _CPU_ACTIVATION_FRACTION if next(model.parameters()).device.type == "cpu" else 1.0
        # The backward pass is compiled in the forward pass too, where a rank can still fall back.
        options = {"activation_memory_budget": fraction, "force_non_lazy_backward_lowering": by_block}
        with torch._functorch.config.patch(options):
            compiled_loss(micro_batch).backward()
    except Exception as error:  # e.g. without a C++ compiler
        if is_out_of_memory(error):
            raise
        failures.append(error)
    if failures:
        reason = str(failures[0]).partition("\n")[0]
        log.warning("torch.compile does not work here, training runs without: %s", reason)
    parallel.finish_gradient_synchronization()  # else the first step would take the gradients of the test
    model.zero_grad(set_to_none=True)
    has_failed = is_true_on_any_rank(bool(failures))
    for layer, forward in zip(layers, originals if has_failed else blocks, strict=True):
        layer.forward = forward
    return loss if has_failed else compiled_loss


def _call_or_fall_back(
    compiled: Callable[..., Any], original: Callable[..., Any], failures: list[Exception], *args: Any
) -> Any:
    """Call ``compiled``, or ``original`` after any failure: the other ranks wait for the collectives of this pass."""
    if not failures:
        try:
            return compiled(*args)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failures.append(error)
    return original(*args)


def repays_compilation(training_flops: float) -> bool:
    """Return whether a training is long enough to be compiled."""
    return training_flops >= _MIN_FLOPS_TO_COMPILE


def is_compiled(function: Callable[..., Any]) -> bool:
    """Return whether torch.compile made the function."""
    return hasattr(function, "_torchdynamo_orig_callable")
