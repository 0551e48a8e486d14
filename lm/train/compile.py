"""``torch.compile`` for the loss of a training step."""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from lm.common.device import is_out_of_memory
from lm.distributed.parallel import Parallel
from lm.model.transformer import TransformerLM

log = logging.getLogger(__name__)

_MIN_FLOPS_TO_COMPILE = 5e13  # compilation takes half a minute, and saves a fifth of some minutes on two cores
_CPU_ACTIVATION_FRACTION = 0.95  # activations to keep; a CPU recomputes the cheap ones in no more time


def compile_loss(
    loss: Callable[[Any], Tensor], model: TransformerLM, parallel: Parallel, micro_batch: Any, training_flops: float
) -> Callable[[Any], Tensor]:
    """Compile ``loss(micro_batch)`` and test it with a backward pass. All ranks call this together.

    With FSDP, which works between the blocks, only these are compiled, each by itself.

    Return ``loss`` itself if the training is short, or, with a warning, if torch.compile does not work here. Raises
    torch's error if the device is out of memory: the training would need the memory without compilation too.
    """
    if not repays_compilation(training_flops):
        return loss
    by_block = parallel.divides_weights
    originals = [layer.forward for layer in model.layers]
    if by_block:
        for layer in model.layers:  # not layer.compile(), which would compile FSDP's hooks too
            layer.forward = torch.compile(layer.forward)
    compiled_loss = loss if by_block else torch.compile(loss)
    try:  # the first call compiles
        fraction = _CPU_ACTIVATION_FRACTION if next(model.parameters()).device.type == "cpu" else 1.0
        with torch._functorch.config.patch(activation_memory_budget=fraction):
            compiled_loss(micro_batch).backward()
    except Exception as error:  # e.g. without a C++ compiler
        if is_out_of_memory(error):
            raise
        log.warning("torch.compile does not work here, training runs without: %s", str(error).partition("\n")[0])
        for layer, forward in zip(model.layers, originals, strict=True):
            layer.forward = forward
        compiled_loss = loss
    parallel.finish_gradient_synchronization()  # else the first step would take the gradients of the test
    model.zero_grad(set_to_none=True)
    return compiled_loss


def repays_compilation(training_flops: float) -> bool:
    """Return whether a training is long enough to be compiled."""
    return training_flops >= _MIN_FLOPS_TO_COMPILE


def is_compiled(function: Callable[..., Any]) -> bool:
    """Return whether torch.compile made the function."""
    return hasattr(function, "_torchdynamo_orig_callable")
