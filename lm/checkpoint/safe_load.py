"""Load tensors without running code, and put them into models and optimizers after checking that they fit."""

import os
import pickle  # nosec B403 # only for the exception type that torch raises
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lm.common.errors import UserError, did_you_mean
from lm.hardware.device import explain_out_of_memory
from lm.model.adapter import adapted_layers, trained_state
from lm.model.config import ModelConfig
from lm.model.initialization import LateWeights
from lm.model.rope import RotaryEmbedding
from lm.model.transformer import TransformerLM
from lm.optim.optimizer import Optimizer

_MAX_ROTARY_NUMBERS = 1 << 28  # 1 GiB; contexts of 1 M tokens with heads of 128 need half of it
WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that a model can compute with."""
PathOrFile = str | os.PathLike[str] | IO[bytes]


def save_tensors(state: dict[str, Any], path: Path) -> None:
    """Write ``state`` with ``torch.save``: equal states give equal bytes. Raises OSError if the disk is full or
    read-only."""
    with path.open("wb") as file:
        try:
            torch.save(_without_shared_objects(state), file)
        except RuntimeError as error:  # torch's zip writer hides the OSError
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def _without_shared_objects(value: Any) -> Any:
    """Return ``value`` with new containers, and one object for all equal strings.

    Pickle writes an object in full where it first occurs, and a reference where it occurs again. Whether two equal
    objects are the same object differs between a loaded state and the state that was saved.
    """
    match value:
        case dict():
            return {_without_shared_objects(key): _without_shared_objects(entry) for key, entry in value.items()}
        case list():
            return [_without_shared_objects(entry) for entry in value]
        case tuple():
            return tuple([_without_shared_objects(entry) for entry in value])
        case str():
            return sys.intern(value)
    return value


def save_safetensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a new file of safetensors with the permissions of any new file. Raises OSError or SafetensorError."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)  # for the owner alone
    path.chmod(mode)


def read_tensors(src: PathOrFile, mmap: bool = False) -> Any:
    """Read a file of ``torch.save`` to the CPU without running code. With ``mmap``, tensors of an archive are read on
    first use.

    Raises UserError if the file is missing, damaged, or holds anything but tensors and plain data.
    """
    if isinstance(src, str | os.PathLike):
        refuse_lfs_pointer(Path(src))
    try:
        is_mapped = mmap and zipfile.is_zipfile(src)  # files of torch before 1.6 are no archives
        return torch.load(src, map_location="cpu", weights_only=True, mmap=is_mapped)
    except FileNotFoundError:
        raise UserError(f"The checkpoint {src} does not exist.") from None
    except pickle.UnpicklingError:  # torch's message suggests weights_only=False, which would run the code
        raise UserError(
            f"The checkpoint {src} is damaged or not a checkpoint: it holds objects that are not tensors or plain data "
            "and could run code. It was not read; save it again with tensors only."
        ) from None
    except Exception as error:  # torch raises many types for a damaged file
        reason = str(error).partition("\n")[0]
        raise UserError(f"The checkpoint {src} is damaged or not a checkpoint: {reason}") from None


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the memory-mapped tensors of a safetensors file. Raises UserError if it is missing or damaged."""
    refuse_lfs_pointer(path)
    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}. It must be a complete safetensors file.") from None


def map_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, each memory-mapped by itself: its memory is free when it is dropped.

    Raises UserError as :func:`read_safetensors` does.
    """
    tensors = {}
    for name in read_safetensors(path):
        with safe_open(path, "pt") as file:
            tensors[name] = file.get_tensor(name)
    return tensors


def refuse_lfs_pointer(path: Path) -> None:
    """Raise UserError if a file is only Git LFS's pointer to it, which a clone without LFS leaves in its place."""
    start = b"version https://git-lfs.github.com/spec/"
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(start)) == start
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return  # the file's own reader says why
    if is_pointer:
        raise UserError(f"{path} is a pointer of Git LFS, not the file itself; run in its directory: git lfs pull")


def is_state_dict(value: Any) -> bool:
    """Return whether ``value`` is a dict of plain tensors by name."""
    return isinstance(value, dict) and all(isinstance(name, str) and is_plain_tensor(value[name]) for name in value)


def is_plain_tensor(value: Any) -> bool:
    """Return whether ``value`` is a dense tensor with its data in memory: not sparse, quantized or on ``meta``, and not
    a small one that is expanded to a large shape."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta or value.is_quantized:
        return False
    return value.untyped_storage().nbytes() >= value.numel() * value.itemsize


def load_weights(model: nn.Module, weights: Any, name: str, assign: bool = False) -> None:
    """Load the state dict ``weights`` into ``model``; with ``assign``, the tensors become the parameters.

    Of a model with an adapter, ``weights`` are those of :func:`lm.model.adapter.trained_state`. Raises UserError with
    ``name`` and the first missing, unknown or misfitting parameter, before anything is loaded.
    """
    _check_fit(model, weights, name)
    model.load_state_dict(weights, assign=assign, strict=not adapted_layers(model))


def load_weights_later(model: nn.Module, weights: dict[str, Tensor], late: LateWeights, name: str) -> None:
    """Load the state dict ``weights`` into ``model``: of the matrices that are ``late`` when they get memory.

    Raises UserError as :func:`load_weights` does, and if a weight is not finite.
    """
    _check_fit(model, weights, name)
    check_weights_are_finite(weights, name)
    for key, tensor in model.state_dict().items():
        if tensor.untyped_storage().nbytes():
            tensor.copy_(weights[key])
    late.replace({p: weights[key] for key, p in model.named_parameters()})


def _check_fit(model: nn.Module, weights: Any, name: str) -> None:
    if not is_state_dict(weights):
        raise UserError(f"{name} is not a dict of plain tensors by parameter name; save it again as a state dict.")
    expected = trained_state(model)
    for key, tensor in expected.items():
        if key not in weights:
            raise UserError(f"{name} has no {key}{did_you_mean(key, weights)}; it belongs to another model config.")
        if weights[key].shape != tensor.shape:
            raise UserError(
                f"{name} does not fit the model: {key} is {tuple(weights[key].shape)}, "
                f"the config requires {tuple(tensor.shape)}."
            )
        if weights[key].is_floating_point() != tensor.is_floating_point():
            raise UserError(f"{name} does not fit the model: {key} is {weights[key].dtype}, not {tensor.dtype}.")
    if unknown := weights.keys() - expected.keys():
        raise UserError(f"{name} has {min(unknown)}, but the model config does not know it.")


def create_empty_model(config: ModelConfig, num_tensors: int, name: str) -> TransformerLM:
    """Create a model on the ``meta`` device, for :func:`assign_weights`.

    Raises UserError if ``num_tensors`` are too few or a shape is impossible: ``config`` may be from a hostile file.
    """
    if config.num_layers > num_tensors:
        raise UserError(f"{name} has {num_tensors} tensors, too few for the {config.num_layers} layers of its config.")
    try:
        return TransformerLM(config, device="meta")
    except (RuntimeError, TypeError, OverflowError) as error:  # torch's types for an impossible size
        raise UserError(f"{name} describes a model that cannot be created: {error}") from None


def assign_weights(model: TransformerLM, weights: dict[str, Tensor], name: str, device: str | torch.device) -> None:
    """Make ``weights`` the parameters of an empty model.

    Raises UserError as :func:`load_weights` does, and if the model's context is too long for the memory.
    """
    load_weights(model, weights, name, assign=True)
    length, width = model.config.context_length, model.config.resolved_head_dim
    message = f"{name}: the rotary table for a context of {length:,} tokens and heads of {width:,}"
    for rope in model.modules():  # a few, which blocks share
        if not isinstance(rope, RotaryEmbedding):
            continue
        if length * width > _MAX_ROTARY_NUMBERS:
            raise UserError(
                f"{message} has more than {_MAX_ROTARY_NUMBERS:,} numbers; lower the context in its config."
            )
        with explain_out_of_memory(f"{message} does not fit into memory; lower the context in its config."):
            rope.fill(device)


def check_weights_are_finite(weights: Mapping[str, Tensor], name: str) -> None:
    """Raise UserError with ``name`` and the first tensor that holds nan or infinity, or numbers of fewer than 16 bits.

    The logits of such a model are nan, from which the sampler would draw random text.
    """
    for key, tensor in weights.items():
        if not tensor.is_floating_point():
            continue
        if tensor.dtype not in WEIGHT_DTYPES:
            raise UserError(f"{name}: {key} is {tensor.dtype}; it must be floating-point of at least 16 bits.")
        # nan is the minimum and maximum of any tensor that holds it; unlike isfinite, aminmax needs no copy.
        if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            raise UserError(
                f"{name}: {key} holds numbers that are not finite (nan or infinity), so the model would write random "
                "text. Use an intact copy of the weights, or train the model again."
            )


def load_optimizer_states(optimizers: list[torch.optim.Optimizer], states: list[dict[str, Any]], name: str) -> None:
    """Load a state dict into each optimizer. Raises UserError if one does not fit its optimizer."""
    try:
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
            shape_of = (
                optimizer.state_shape if isinstance(optimizer, Optimizer) else lambda _, parameter: parameter.shape
            )
            for parameter, parameter_state in optimizer.state.items():
                for key, value in parameter_state.items():
                    is_count = key == "step"  # a scalar in torch's optimizers
                    if isinstance(value, Tensor) and not is_count and value.shape != shape_of(key, parameter):
                        shapes = f"{tuple(value.shape)} for a parameter of {tuple(parameter.shape)}"
                        raise ValueError(f"{key} is {shapes}")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise UserError(f"{name} belongs to another optimizer config: {error}") from None
