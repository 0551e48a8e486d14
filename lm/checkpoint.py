"""Saving and restoring training: the single-file form, and the checkpoint directories of a training run.

A checkpoint directory counts only once its ``checkpoint.json``, written last, is there. No file is ever unpickled
without restriction. Source: CS336 assignment 1 (section 5.2).
"""

import hashlib
import os
import pickle  # nosec B403 # for the name of the exception that torch raises
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from lm.errors import UserError, nearest
from lm.model import ModelConfig, RotaryEmbedding, TransformerLM
from lm.signed import read_signed, sign

PathOrFile = str | os.PathLike[str] | IO[bytes]

_FILES = {"model.safetensors", "optimizer.pt"}  # of a checkpoint directory, besides the description


def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, iteration: int, out: PathOrFile) -> None:
    """Write model, optimizer and iteration to one file (a path, written atomically, or a binary file object)."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
    if not isinstance(out, (str, os.PathLike)):
        torch.save(state, out)
        return
    temporary = Path(f"{os.fspath(out)}.{os.getpid()}.tmp")
    try:
        _save_tensors(state, temporary)
        _sync(temporary)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)


def _save_tensors(state: dict[str, Any], path: Path) -> None:
    """``torch.save``, but a disk that is full or read-only raises the OSError that says so."""
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # of its own archive, in which the other is lost
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def load_checkpoint(src: PathOrFile, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Restore what :func:`save_checkpoint` wrote into ``model`` and ``optimizer``; returns the iteration.

    Raises UserError when the file is damaged, holds anything but tensors and plain data, or does not fit the model.
    """
    state = read_tensors(src)
    match state:
        case {"model": weights, "optimizer": about, "iteration": int(iteration)}:
            load_weights(model, weights, str(src))
            if optimizer is not None:
                _load_optimizers([optimizer], [about], str(src))
            return iteration
        case _:
            raise UserError(f"{src} is not a checkpoint: it lacks model, optimizer or iteration.")


def read_tensors(src: PathOrFile, mmap: bool = False) -> Any:
    """What ``torch.save`` wrote, on the CPU; with ``mmap`` a tensor is read where it is used. Runs no code.

    Raises UserError when the file is missing or damaged, or holds anything but tensors and plain data.
    """
    try:
        return torch.load(src, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError:
        raise UserError(f"The checkpoint {src} does not exist.") from None
    except pickle.UnpicklingError:  # torch's own message advises to run the code
        raise UserError(
            f"The checkpoint {src} is damaged or not a checkpoint: it holds more than tensors and plain data, which "
            "could run code and was not read; have it saved again as tensors only."
        ) from None
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = str(error).partition("\n")[0]
        raise UserError(f"The checkpoint {src} is damaged or not a checkpoint: {reason}") from None


def read_safetensors(path: Path, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """The tensors of a file, mapped from the disk; raises UserError where it is missing or damaged."""
    try:
        return load_file(path, device=str(device))
    except (OSError, ValueError, SafetensorError) as error:  # the second for a name that is none
        raise UserError(f"{path} cannot be read: {error}. The weights must be there, whole, as safetensors.") from None


def is_plain(tensor: Any) -> bool:
    """Whether it is a tensor with a number in the memory for each of its places."""
    is_strided = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
    return is_strided and not tensor.is_meta and not tensor.is_quantized


def load_weights(model: nn.Module, weights: Any, name: str, assign: bool = False) -> None:
    """Load a state dict, or raise UserError that names the first parameter that is missing, unknown or misshapen."""
    if not isinstance(weights, dict) or not all(isinstance(key, str) and is_plain(weights[key]) for key in weights):
        raise UserError(f"{name} has something else than plain tensors by their names; have it saved as a state dict.")
    expected = model.state_dict()
    for key, tensor in expected.items():
        if key not in weights:
            raise UserError(f"{name} has no {key}{nearest(key, weights)}; it belongs to another model config.")
        if weights[key].shape != tensor.shape:
            raise UserError(
                f"{name} does not fit the model: {key} is {tuple(weights[key].shape)}, "
                f"the config wants {tuple(tensor.shape)}."
            )
        if weights[key].is_floating_point() != tensor.is_floating_point():
            raise UserError(f"{name} does not fit the model: {key} is {weights[key].dtype}, not {tensor.dtype}.")
    if unknown := weights.keys() - expected.keys():
        raise UserError(f"{name} has {sorted(unknown)[0]}, which the model config does not know.")
    model.load_state_dict(weights, assign=assign)


def empty_model(config: ModelConfig, tensors: int, name: str) -> TransformerLM:
    """A model without weights yet, for :func:`fill`; raises UserError where no ``tensors`` would fill it, before it
    takes memory."""
    if config.num_layers > tensors:
        raise UserError(f"{name} has {tensors} tensors, and its config {config.num_layers} layers; they do not fit.")
    try:
        return TransformerLM(config, device="meta")
    except (RuntimeError, TypeError, OverflowError) as error:  # torch has several kinds for a size that is none
        raise UserError(f"{name} describes a model that cannot be made: {error}") from None


def fill(model: TransformerLM, weights: dict[str, torch.Tensor], name: str, device: str | torch.device) -> None:
    """Give an :func:`empty_model` these very tensors; raises as :func:`load_weights` does."""
    load_weights(model, weights, name, assign=True)
    config = model.config
    rope = RotaryEmbedding(config.rope_theta, config.d_model // config.num_heads, config.context_length, device)
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.cos, module.sin = rope.cos, rope.sin


def _load_optimizers(optimizers: list[torch.optim.Optimizer], states: list[dict[str, Any]], name: str) -> None:
    try:
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
            for p, found in optimizer.state.items():
                for part, value in found.items():
                    if isinstance(value, torch.Tensor) and value.ndim and value.shape != p.shape:
                        raise ValueError(f"{part} is {tuple(value.shape)} beside a parameter of {tuple(p.shape)}")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise UserError(f"{name} belongs to another optimizer config: {error}") from None


def save_training(
    directory: Path,
    model: TransformerLM,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    about: dict[str, Any],
) -> None:
    """Write a checkpoint directory: ``model.safetensors``, ``optimizer.pt`` (with the states of the random number
    generators), then ``checkpoint.json`` with the model's config, the step, ``about``, the size and sha256 of both
    files, and its own. An older one of that name is replaced."""
    with replaced_directory(directory) as temporary:
        weights = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
        save_file(weights, temporary / "model.safetensors")
        rng = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}  # the second empty without one
        state = {"optimizers": [optimizer.state_dict() for optimizer in optimizers], "rng": rng}
        _save_tensors(state, temporary / "optimizer.pt")
        files = {path.name: _digest(path) for path in sorted(temporary.iterdir())}
        description = {"step": step, "model": asdict(model.config), **about, "files": files}
        (temporary / "checkpoint.json").write_text(sign(description), encoding="utf-8")


@contextmanager
def replaced_directory(directory: Path) -> Iterator[Path]:
    """A new directory to write files into, which takes the place of ``directory`` once all are on the disk. After an
    exception nothing of it stays, and ``directory`` is as it was."""
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    older = directory.with_name(f".{directory.name}.{os.getpid()}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        if directory.exists():
            directory.replace(older)  # whole until the new one stands in its place
        try:
            temporary.replace(directory)
        except OSError:
            if older.exists():
                older.replace(directory)
            raise
        _sync(directory.parent)
        shutil.rmtree(older, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk is not left fuller


def _sync(path: Path) -> None:
    """Make the content of a file, or the names in a directory, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_intact(path: Path, about: Any) -> bool:
    return path.is_file() and _digest(path) == about  # reading a device would never end


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_description(directory: Path) -> dict[str, Any] | None:
    """The ``checkpoint.json`` of an intact checkpoint directory (sizes and digests checked); None for any other."""
    try:
        match read_signed((directory / "checkpoint.json").read_bytes()):
            case {"step": int(), "model": dict(), "files": dict(files)} as description if files.keys() == _FILES:
                return description if all(_is_intact(directory / name, files[name]) for name in files) else None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def step_name(step: int) -> str:
    """The name of the directory of a checkpoint."""
    return f"step-{step:07d}"


def newest_checkpoint(directory: Path) -> Path | None:
    """The intact checkpoint with the most steps among the ``step-*`` directories in ``directory``."""
    intact = ((path, read_description(path)) for path in directory.glob("step-*"))
    found = [(description["step"], path) for path, description in intact if description]
    return max(found)[1] if found else None


def load_training(directory: Path, model: TransformerLM, optimizers: list[torch.optim.Optimizer]) -> int:
    """Restore a checkpoint directory; returns its step. Raises UserError when it is damaged or does not fit."""
    description = read_description(directory)
    if description is None:
        raise UserError(f"The checkpoint {directory} is damaged or incomplete.")
    load_weights(model, read_safetensors(directory / "model.safetensors"), str(directory))
    match read_tensors(directory / "optimizer.pt"):
        case {"optimizers": list(states), "rng": {"cpu": torch.Tensor() as cpu, "cuda": list(cuda)}}:
            _load_optimizers(optimizers, states, str(directory))
        case _:
            raise UserError(f"The checkpoint {directory} lacks the states of optimizers or random numbers.")
    try:
        torch.set_rng_state(cpu)
        if len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda)
    except (TypeError, RuntimeError) as error:
        raise UserError(f"The checkpoint {directory} has a state of random numbers that is none: {error}") from None
    step: int = description["step"]
    return step


def load_model(directory: Path, device: str | torch.device = "cpu") -> TransformerLM:
    """The model of a checkpoint directory, ready to generate. Raises UserError when it is missing or damaged."""
    description = read_description(directory)
    if description is None:
        raise UserError(f"{directory} is not an intact checkpoint.")
    try:
        config = ModelConfig(**description["model"])
    except TypeError as error:
        raise UserError(f"The checkpoint {directory} cannot be read: {error}") from None
    weights = read_safetensors(directory / "model.safetensors", device)
    model = empty_model(config, len(weights), str(directory))
    fill(model, {key: tensor.clone() for key, tensor in weights.items()}, str(directory), device)
    return model.eval()
