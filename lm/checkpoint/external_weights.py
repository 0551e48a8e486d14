"""Build a model from the weights of another project: its config fields, tensor names and shards. Name the options that
another project lacks."""

import re
from collections.abc import Collection, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.checkpoint.safe_load import (
    WEIGHT_DTYPES,
    assign_weights,
    check_weights_are_finite,
    create_empty_model,
)
from lm.common.errors import UserError
from lm.files.json import read_json
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM

FieldTable = dict[str, tuple[str, Any]]
"""External field name → (name in ModelConfig, default). A default of None means: required, a whole number."""

_DERIVED_TENSORS = ("rope.freqs", "rotary_emb.inv_freq")  # in some files, though they follow from the config
_EMBEDDING = "token_embeddings.weight"
_MAX_NUMBER = 1 << 40  # of a config field


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the fields of a JSON object that are not null. Raises UserError if the file holds anything else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a model's config: expected one JSON object.")
    return {name: value for name, value in content.items() if value is not None}


def read_field(path: Path, content: dict[str, Any], name: str, default: int | float | bool | None) -> Any:
    """Return a config field, or ``default`` if it is absent. Raises UserError for a value of another type."""
    value: Any = content.get(name, default)
    if isinstance(default, bool):
        is_valid, requirement = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        is_valid, requirement = type(value) in (int, float) and 0 <= value < _MAX_NUMBER, "a number of at least 0"
    else:
        is_valid, requirement = type(value) is int and 0 < value < _MAX_NUMBER, "a whole number of at least 1"
    if not is_valid:
        state = "missing" if value is None else repr(value)
        raise UserError(f"{path}: {name} is {state}; it must be {requirement}.")
    return value


def read_model_config(path: Path, content: dict[str, Any], table: FieldTable, **options: Any) -> ModelConfig:
    """Return the config that ``content`` describes by the fields of ``table``; ``options`` are set as given."""
    options = {ours: read_field(path, content, name, default) for name, (ours, default) in table.items()} | options
    try:
        return ModelConfig(**options)
    except UserError as error:
        raise UserError(f"{path} describes an unsupported model: {error}") from None


def check_fixed_fields(path: Path, content: dict[str, Any], fixed: dict[str, Any]) -> None:
    """Raise UserError if a field is present with another value than in ``fixed``."""
    for name, value in fixed.items():
        if content.get(name, value) != value:
            raise UserError(
                f"{path}: {name} {content[name]!r} is not supported; use a model whose {name} is {value!r}."
            )


def assemble_model(
    config: ModelConfig,
    shards: Sequence[dict[str, Tensor]],
    names: dict[str, str],
    directory: Path,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> TransformerLM:
    """Build the model of ``config`` from the tensors of ``shards``, and return it in evaluation mode.

    ``names`` maps module names to the external ones; ``dtype`` of the parameters defaults to that of the
    embedding: a model computes in one dtype. Each tensor is copied once.
    Raises UserError if a tensor is missing, unknown, not finite or does not fit.
    """
    model = create_empty_model(config, sum(map(len, shards)), str(directory))
    external_names = {name: translate_name(name, names) for name in model.state_dict()}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if dtype is None:
        dtype = collect_parts(shards, external_names[_EMBEDDING], directory)[0].dtype
    weights = {}
    for name, expected in model.state_dict().items():
        parts = collect_parts(shards, external_names[name], directory)
        weight = _join_parts(parts, expected.shape)
        if weight is None:
            shapes = " and ".join(str(tuple(part.shape)) for part in parts)
            raise UserError(
                f"{directory}: {external_names[name]} has the shape {shapes}; the config requires "
                f"{tuple(expected.shape)} as one tensor, in equal copies or in equal pieces. Use all files of one "
                "model, with its own config."
            )
        # A copy does not depend on the memory-mapped file. Buffers keep their dtype: a bias in the choice of experts
        # that is rounded chooses others.
        weights[name] = weight.to(device, dtype if name in parameters else expected.dtype, copy=True)
    known = set(external_names.values())
    if unknown := [name for name in chain(*shards) if name not in known and not name.endswith(_DERIVED_TENSORS)]:
        raise UserError(f"{directory} has {unknown[0]}, which no Llama of its config has; use the weights' own config.")
    assign_weights(model, weights, str(directory), device)
    check_weights_are_finite({external_names[name]: weight for name, weight in weights.items()}, str(directory))
    return model.eval()


def translate_name(name: str, names: dict[str, str]) -> str:
    """Replace the module names in a tensor's name, e.g. in ``layers.0.attn.q_proj.weight``; the first match wins."""
    return re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", lambda match: names[match[0]], name)


def collect_parts(shards: Sequence[dict[str, Tensor]], name: str, directory: Path) -> list[Tensor]:
    """Return the tensor ``name`` of each shard, not joined. Raises UserError if one is missing or dtypes differ."""
    parts = [shard[name] for shard in shards if name in shard]
    if not parts:
        raise UserError(f"{directory} has no {name}; use all files of one model, with its own config.")
    if len(parts) < len(shards):
        raise UserError(f"{directory} has {name} in {len(parts)} of {len(shards)} files; use all files of one model.")
    if bad := [part.dtype for part in parts if part.dtype not in WEIGHT_DTYPES or part.dtype != parts[0].dtype]:
        raise UserError(f"{directory}: {name} is {bad[0]}; it must be floating-point, and the same in all files.")
    return parts


def _join_parts(parts: list[Tensor], shape: torch.Size) -> Tensor | None:
    """Return the tensor of ``shape`` whose equal copies or equal pieces ``parts`` are; None if they are neither.

    The dimension of the cut follows from the shapes: for the embedding it differs between versions of Meta's code.
    """
    if all(part.shape == shape for part in parts):
        are_equal = all(part.allclose(parts[0], rtol=0, atol=0, equal_nan=True) for part in parts[1:])
        return parts[0] if are_equal else None
    for dim, size in enumerate(shape):
        piece_shape = (*shape[:dim], size // len(parts), *shape[dim + 1 :])
        if size % len(parts) == 0 and all(part.shape == piece_shape for part in parts):
            return torch.cat(parts, dim)
    return None


def check_is_expressible(config: ModelConfig, expressible: Collection[str], reader: str) -> None:
    """Raise UserError if an option that ``reader`` does not know, one not in ``expressible``, differs from its default.

    The defaults describe a Llama, so options that are added later are refused without being listed.
    """
    defaults = type(config)()
    for option in (field.name for field in fields(config) if field.name not in expressible):
        value, default = getattr(config, option), getattr(defaults, option)
        if value != default:
            raise UserError(
                f"model.{option} {value!r} cannot be exported: {reader} supports only {default!r}; train a model with "
                "that."
            )


def reorder_rotary_rows(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Transpose the rows of each head, seen as a grid (rows, columns), to (columns, rows).

    (2, K/2) turns Hugging Face's order, pairs (i, i + K/2), into adjacent pairs; (K/2, 2) reverses that.
    """
    return weight.unflatten(0, (-1, rows, columns)).transpose(1, 2).flatten(0, 2)
