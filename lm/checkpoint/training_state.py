"""The checkpoint directories of a training run: ``model.safetensors``, ``optimizer.pt`` and ``checkpoint.json``.

A directory counts as a checkpoint only if its ``checkpoint.json`` is intact, and the size and SHA-256 of the other two
files are as stated there.
"""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lm.checkpoint.atomic_dir import atomic_directory
from lm.checkpoint.safe_load import (
    assign_weights,
    create_empty_model,
    load_optimizer_states,
    load_weights,
    read_safetensors,
    read_tensors,
    save_tensors,
)
from lm.common.checksum import dumps_with_checksum, file_checksum, loads_with_checksum
from lm.common.errors import UserError
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM

ROW_FILES = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl", "reference.jsonl")
"""Files that a training may write beside its checkpoints: a JSON object per line, each with its ``step``."""
_FILE_NAMES = {"model.safetensors", "optimizer.pt"}
_STEP_NAME = re.compile("step-([0-9]+)")


def save_training(
    directory: Path,
    model: TransformerLM,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    metadata: dict[str, Any],
) -> None:
    """Write a checkpoint directory atomically, replacing an older one of that name.

    ``optimizer.pt`` also holds the states of torch's random number generators; ``checkpoint.json`` holds the step, the
    model's config and ``metadata``.
    """
    with atomic_directory(directory) as temporary:
        weights = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
        save_file(weights, temporary / "model.safetensors")
        rng = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}  # cuda: one state per device
        state = {"optimizers": [optimizer.state_dict() for optimizer in optimizers], "rng": rng}
        save_tensors(state, temporary / "optimizer.pt")
        files = {path.name: _describe_file(path) for path in sorted(temporary.iterdir())}
        description = {"step": step, "model": asdict(model.config), **metadata, "files": files}
        (temporary / "checkpoint.json").write_text(dumps_with_checksum(description), encoding="utf-8")


def _describe_file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_checksum(path.open("rb"))}


def read_description(directory: Path) -> dict[str, Any] | None:
    """Return the content of ``checkpoint.json`` if ``directory`` is an intact checkpoint, else None."""
    try:
        match loads_with_checksum((directory / "checkpoint.json").read_bytes()):
            case {"step": int(), "model": dict(), "files": dict(files)} as description if files.keys() == _FILE_NAMES:
                paths = {name: directory / name for name in files}
                # Only regular files: reading a device or a named pipe may never end.
                is_intact = all(paths[name].is_file() and _describe_file(paths[name]) == files[name] for name in files)
                return description if is_intact else None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _require_description(directory: Path) -> dict[str, Any]:
    description = read_description(directory)
    if description is None:
        raise UserError(f"{directory} is not an intact checkpoint.")
    return description


def step_name(step: int) -> str:
    """Return the directory name of a checkpoint. Names get longer past step 9,999,999, so sort them by number."""
    return f"step-{step:07d}"


def step_directories(directory: Path) -> list[Path]:
    """Return all ``step-NNNNNNN`` directories in ``directory``, intact or not, sorted by number."""
    matches = ((_STEP_NAME.fullmatch(path.name), path) for path in directory.glob("step-*"))
    return [path for _, path in sorted((int(match[1]), path) for match, path in matches if match)]


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the intact checkpoint in ``directory`` with the highest step, or None."""
    described = ((read_description(path), path) for path in step_directories(directory))
    intact = [(description["step"], path) for description, path in described if description]
    return max(intact)[1] if intact else None


def load_training(directory: Path, model: TransformerLM, optimizers: list[torch.optim.Optimizer]) -> int:
    """Restore all state of a checkpoint, and return its step. Raises UserError if it is damaged or does not fit."""
    description = _require_description(directory)
    load_weights(model, read_safetensors(directory / "model.safetensors"), str(directory))
    match read_tensors(directory / "optimizer.pt"):
        case {"optimizers": list(states), "rng": {"cpu": torch.Tensor() as cpu, "cuda": list(cuda)}}:
            load_optimizer_states(optimizers, states, str(directory))
        case _:
            raise UserError(f"The checkpoint {directory} lacks the states of optimizers or random number generators.")
    try:
        torch.set_rng_state(cpu)
        if len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda)
    except (TypeError, RuntimeError) as error:
        raise UserError(f"The checkpoint {directory} has an invalid random number generator state: {error}") from None
    step: int = description["step"]
    return step


def load_model(directory: Path, device: str | torch.device = "cpu") -> TransformerLM:
    """Load the model of a checkpoint directory in evaluation mode. Raises UserError if it is missing or damaged."""
    try:
        config = ModelConfig(**_require_description(directory)["model"])
    except TypeError as error:
        raise UserError(f"The checkpoint {directory} cannot be read: {error}") from None
    weights = read_safetensors(directory / "model.safetensors", device)
    model = create_empty_model(config, len(weights), str(directory))
    assign_weights(model, {key: tensor.clone() for key, tensor in weights.items()}, str(directory), device)
    return model.eval()
