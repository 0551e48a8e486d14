"""Low-rank adapters (LoRA) around the linear layers of a model: add, turn off, fuse.

Source: Hu et al. 2021. Initialization and dropout are those of the library peft. The model's own code knows nothing of
adapters: a layer is replaced by one that contains it.
Shapes: I in_features, O out_features, R rank.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.common.errors import UserError
from lm.model.config import AdapterConfig
from lm.model.linear import Linear
from lm.model.nf4 import NF4Linear
from lm.model.ops.matmul import linear
from lm.model.transformer import TransformerLM


class LowRank(NamedTuple):
    """The change of one matrix: ``scale · B A``."""

    a: Tensor
    """(R, I) float32."""
    b: Tensor
    """(O, R) float32."""
    scale: float


class LoRALinear(nn.Module):
    """``base(x) + alpha / rank · B A x``. ``base`` is frozen; ``lora_A`` (R, I) and ``lora_B`` (O, R) are float32.

    A is drawn from a uniform distribution with the standard deviation 1 / sqrt(3 I), B is 0: a new adapter changes
    nothing. ``dropout`` sets inputs of A to 0, in training mode and only where gradients are computed: the trainer
    evaluates in training mode.
    """

    def __init__(self, base: Linear | NF4Linear, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.base: Linear | NF4Linear = base.requires_grad_(False)
        self.role = base.role
        self.scale, self.dropout, self.is_on = alpha / rank, dropout, True
        weight = base.get_buffer("levels") if isinstance(base, NF4Linear) else base.weight
        (out_features, in_features), device = base.shape, weight.device
        # On the CPU, so that it is the same for any device.
        a_RI = nn.init.kaiming_uniform_(torch.empty(rank, in_features), a=math.sqrt(5))
        self.lora_A = nn.Parameter(a_RI.to(device))
        self.lora_B = nn.Parameter(torch.zeros(out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) → (..., O)."""
        out: Tensor = self.base(x)
        if not self.is_on:
            return out
        inputs = F.dropout(x.to(self.lora_A.dtype), self.dropout, self.training and torch.is_grad_enabled())
        change = linear(linear(inputs, self.lora_A) * self.scale, self.lora_B)
        return out + change.to(out.dtype)

    @torch.no_grad()
    def fuse(self) -> Linear:
        """Add the adapter to the weight of ``base``, in float32, and return that layer."""
        change_OI = self.lora_B @ self.lora_A * self.scale
        base = self.base.dequantize() if isinstance(self.base, NF4Linear) else self.base
        base.weight.copy_(base.weight.float() + change_OI)
        return base


def add_adapter(model: TransformerLM, config: AdapterConfig) -> TransformerLM:
    """Freeze ``model``, store its weights in ``config.dtype``, and put an adapter around each target; return it.

    With nf4, the linear layers are quantized, and all else is float32. The initial matrices depend on torch's
    generator. Raises UserError for a target that the model does not have.
    """
    names = [*choose_targets(model, config.targets)]
    model.requires_grad_(False)
    if config.dtype == "nf4":
        for name in [*choose_targets(model, [])]:  # no layer is held, so that the memory of its file is free
            model.set_submodule(name, NF4Linear(cast(Linear, model.get_submodule(name))))
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    for parameter in model.parameters():  # the rotary buffers stay float32
        parameter.data = parameter.data.to(dtype, copy=True)  # it may be mapped from a file
    return wrap_layers(model, names, config)


def wrap_layers(model: TransformerLM, names: Iterable[str], config: AdapterConfig) -> TransformerLM:
    """Put an adapter around the linear layers of these names, in place, and return ``model``."""
    for name in names:
        base = cast(Linear | NF4Linear, model.get_submodule(name))
        model.set_submodule(name, LoRALinear(base, config.rank, config.alpha, config.dropout))
    return model


def choose_targets(model: TransformerLM, targets: list[str]) -> dict[str, Linear]:
    """Return by name the layers that ``targets`` name by their last part; all linear layers if it is empty.

    The head is none of them, nor are routers. Raises UserError for an unknown target.
    """
    layers = {
        f"layers.{name}": module
        for name, module in model.layers.named_modules()
        if isinstance(module, Linear) and module.role != "router"
    }
    known = {name.rpartition(".")[2] for name in layers}
    for target in targets:
        if target not in known:
            raise UserError(
                f"adapter.targets has {target!r}; the linear layers of this model are {', '.join(sorted(known))}. Name "
                "some of them, or leave it out for all."
            )
    return {name: layer for name, layer in layers.items() if not targets or name.rpartition(".")[2] in targets}


def adapted_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Return the layers with an adapter by name; empty if the model has none."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a training by name: all, or of a model with an adapter those that are not frozen."""
    has_adapter = bool(adapted_layers(model))
    return {name: p for name, p in model.named_parameters() if p.requires_grad or not has_adapter}


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint of a training holds of ``model``: its state dict, or of a model with an adapter the
    trained parameters."""
    state: dict[str, Tensor] = model.state_dict()
    names = trained_parameters(model)
    return {name: state[name] for name in names} if adapted_layers(model) else state


def fuse_adapter(model: TransformerLM) -> TransformerLM:
    """Add the adapters to the weights, in place, and return ``model``, which is an ordinary one afterwards."""
    for name, layer in adapted_layers(model).items():
        model.set_submodule(name, layer.fuse())
    for name, module in list(model.named_modules()):
        if isinstance(module, NF4Linear):
            model.set_submodule(name, module.dequantize())
    return model.requires_grad_(True)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Compute with the frozen weights alone inside the ``with`` block. A model without an adapter stays as it is."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


def copy_layers(source: TransformerLM, target: TransformerLM, weights: Mapping[str, Tensor]) -> None:
    """Put the adapters and the layers in 4 bits of ``source`` into ``target``, in place.

    Their parameters are those in ``weights``, by the names of the model; their buffers are those of ``source``.
    """
    for name, module in source.named_modules():
        if isinstance(module, LoRALinear | NF4Linear):
            tensors = {id(p): nn.Parameter(weights[key], p.requires_grad) for key, p in module.named_parameters(name)}
            target.set_submodule(name, deepcopy(module, tensors | {id(buffer): buffer for buffer in module.buffers()}))


def make_reference(model: TransformerLM) -> TransformerLM:
    """Return a frozen copy of ``model`` as it is now. If it has an adapter, return the model that the adapter started
    from, with the same tensors: it needs no memory."""
    if not (layers := adapted_layers(model)):
        return deepcopy(model).requires_grad_(False)
    reference = deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    for name in layers:
        reference.set_submodule(name, cast(LoRALinear, reference.get_submodule(name)).base)
    return reference
