"""Build a model from the weights of another project, or say why they cannot be loaded."""

import re
from collections.abc import Collection, Mapping, MutableMapping, Sequence
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

_MAX_NUMBER = 1 << 40  # of a config field
_OTHER_HEAD = re.compile(r"(.*\.)?(score|classifier|classification_head)\.(.*\.)?weight")
_MERGE = "merge it into its base model (in peft: merge_and_unload, then save_pretrained) and load the result"
_OTHER_FORMATS = {  # of weights, by the names of their files
    "*.gguf": "GGUF; name the file itself, not its directory",
    **{
        f"{name}-*{suffix}": f"one of several, and their {name}{suffix}.index.json is missing; use all files"
        for name, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin"))
    },
    **dict.fromkeys(
        ("*.pt", "*.ckpt", "tf_model.h5", "flax_model.msgpack"),
        "not safetensors; load it with transformers, and save it with save_pretrained(safe_serialization=True)",
    ),
}


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
    shards: Sequence[Mapping[str, Tensor]],
    names: dict[str, str],
    directory: Path,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> TransformerLM:
    """Build the model of ``config`` from the tensors of ``shards``, and return it in evaluation mode.

    ``names`` maps module names to the external ones; ``dtype`` of the parameters defaults to that of the
    embedding: a model computes in one dtype. Each tensor is copied once, and then removed from shards that are
    mutable, so that files which are mapped tensor by tensor are not in memory as a whole.
    Raises UserError if a tensor is missing, unknown, not finite or does not fit.
    """
    model = create_empty_model(config, sum(map(len, shards)), str(directory))
    external_names = {name: translate_name(name, names) for name in model.state_dict()}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if dtype is None:
        dtype = collect_parts(shards, external_names["token_embeddings.weight"], directory)[0].dtype
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
        del parts, weight
        for shard in shards:
            if isinstance(shard, MutableMapping):
                del shard[external_names[name]]
    known = set(external_names.values())
    derived = (
        "rope.freqs",
        "rotary_emb.inv_freq",
        "rope_freqs.weight",
    )  # in some files, though they follow from the config
    if unknown := [name for name in chain(*shards) if name not in known and not name.endswith(derived)]:
        raise UserError(f"{directory} has {unknown[0]}, which no Llama of its config has; use the weights' own config.")
    assign_weights(model, weights, str(directory), device)
    check_weights_are_finite({external_names[name]: weight for name, weight in weights.items()}, str(directory))
    return model.eval()


def translate_name(name: str, names: dict[str, str]) -> str:
    """Replace the module names in a tensor's name, e.g. in ``layers.0.attn.q_proj.weight``; the first match wins."""
    return re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", lambda match: names[match[0]], name)


def collect_parts(shards: Sequence[Mapping[str, Tensor]], name: str, directory: Path) -> list[Tensor]:
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
    for option in config.unusual_options(expressible):
        default = getattr(type(config)(), option)
        raise UserError(
            f"model.{option} {getattr(config, option)!r} cannot be exported: {reader} supports only {default!r}; train "
            "a model with that."
        )


def pair_rotary_rows(weight: Tensor, config: ModelConfig) -> Tensor:
    """Reorder the rotated rows of each head from Hugging Face's pairs, (i, i + half), to adjacent ones."""
    return _reorder_rotary_rows(weight, config, 2, config.rotary_dim // 2)


def unpair_rotary_rows(weight: Tensor, config: ModelConfig) -> Tensor:
    """Undo :func:`pair_rotary_rows`."""
    return _reorder_rotary_rows(weight, config, config.rotary_dim // 2, 2)


def _reorder_rotary_rows(weight: Tensor, config: ModelConfig, rows: int, columns: int) -> Tensor:
    """Transpose the rotated rows of each head, seen as a grid (rows, columns), to (columns, rows)."""
    heads = weight.unflatten(0, (-1, config.resolved_head_dim))
    rotated, rest = heads[:, : config.rotary_dim], heads[:, config.rotary_dim :]
    rotated = rotated.unflatten(1, (rows, columns)).transpose(1, 2).flatten(1, 2)
    return torch.cat((rotated, rest), 1).flatten(0, 1)


def refuse_other_formats(directory: Path) -> None:
    """Raise UserError if a directory without readable weights holds an adapter, or weights in another format."""
    if (directory / "adapter_config.json").exists():
        base = read_json_object(directory / "adapter_config.json").get("base_model_name_or_path", "unknown")
        raise UserError(f"{directory} holds an adapter (LoRA) of the model {base!r}, not a whole model; {_MERGE}.")
    for pattern, reason in _OTHER_FORMATS.items():
        if paths := sorted(directory.glob(pattern)):
            raise UserError(f"{directory} has no weights that textmill can read: {paths[0].name} is {reason}.")


def use_plain_names(tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Return the tensors under the names that transformers' causal models have: without the modules that training
    code wraps around a model, and with its own prefix, ``model.``.

    Raises UserError if two tensors get one name, and for matrices of an adapter that is not merged.
    """
    adapter_matrix = re.compile(r"\.(lora_[A-Z]+|lora_embedding_[AB]|base_layer)\.")
    if adapters := [name for name in tensors if adapter_matrix.search(name)]:
        raise UserError(f"{directory} has {adapters[0]}, a matrix of an adapter (LoRA) that is not merged; {_MERGE}.")
    # Of torch.compile, DDP, FSDP and activation checkpointing; around the model, or around a part of it.
    wrappers = re.compile(r"\b(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
    names = {name: wrappers.sub("", name) for name in tensors}
    anchor = re.compile(r"((?:.*\.)?)layers\.0\.post_attention_layernorm\.weight")  # what precedes it is the prefix
    prefixes = {match[1] for name in names.values() if (match := anchor.fullmatch(name))}
    if len(prefixes) == 1:
        prefix = prefixes.pop()
        for name, inner in names.items():
            if inner.endswith("lm_head.weight"):
                names[name] = "lm_head.weight"
            elif inner.startswith(prefix) and not _OTHER_HEAD.fullmatch(inner):
                names[name] = f"model.{inner.removeprefix(prefix)}"
    plain = {names[name]: tensor for name, tensor in tensors.items()}
    if len(plain) < len(tensors):
        raise UserError(f"{directory} holds the same tensor under two names; use the files of one model.")
    return plain


def refuse_quantized(tensors: dict[str, Tensor], config: dict[str, Any], directory: Path) -> None:
    """Raise UserError, with the name of the method, if a tensor is neither floating-point of at least 16 bits nor FP8,
    as in all files of other quantized weights."""
    for name, tensor in tensors.items():
        if tensor.dtype not in (*WEIGHT_DTYPES, torch.float8_e4m3fn):
            raise UserError(
                f"{directory}: {name} is {tensor.dtype}: the weights are quantized ({_quantization(tensors, config)}), "
                "and textmill reads floating-point of at least 16 bits, and FP8; use the original model, or a GGUF "
                "file of it. textmill quantizes when it serves (--quantize)."
            )


def _quantization(tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    """Return the name of the method by which weights are quantized, from the config or else from their names."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if isinstance(method, str):
        return {"gptq": "GPTQ", "awq": "AWQ"}.get(method, method)
    if any(name.endswith(".qweight") for name in tensors):  # older files have the method in one of their own
        return "GPTQ" if any(name.endswith(".g_idx") for name in tensors) else "AWQ or GPTQ"
    return "no method is named"


def refuse_missing_head(tensors: dict[str, Tensor], is_tied: bool, directory: Path) -> None:
    """Raise UserError if the model cannot write text: it has a reward model's or a classifier's head, or no head."""
    if "lm_head.weight" in tensors:
        return
    if heads := [name for name in tensors if _OTHER_HEAD.fullmatch(name)]:
        raise UserError(
            f"{directory} has {heads[0]} in place of lm_head.weight: it is a reward model or a classifier, and cannot "
            "write text; use a causal language model."
        )
    if not is_tied:
        raise UserError(
            f"{directory} has no lm_head.weight, so the model cannot write text; use all files of a causal language "
            "model. If its embedding is its head too, set tie_word_embeddings to true in config.json."
        )
