"""Adapters in the format of the library peft: read with their base, and written from checkpoints of trainings.

A directory has ``adapter_config.json``, which names the directory of the base, and ``adapter_model.safetensors``.
Matrices of queries and keys have their rows in Hugging Face's order of rotary pairs, as in the base's files.
Shapes: I in_features, O out_features, R rank.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lm.checkpoint.adapter_base import read_adapter
from lm.checkpoint.external_weights import pair_rotary_rows, read_json_object, translate_name, unpair_rotary_rows
from lm.checkpoint.hugging_face.architectures import ARCHITECTURES, choose_architecture
from lm.checkpoint.hugging_face.model_files import find_rotary
from lm.checkpoint.safe_load import check_weights_are_finite, read_safetensors, save_safetensors
from lm.checkpoint.training_checkpoint import find_base, read_description, read_weights
from lm.common.errors import UserError, translate_write_errors
from lm.files.checksum import file_checksum
from lm.model.adapter import LowRank, choose_targets
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MAX_ALPHA = 10**9  # larger ones overflow
_BASE_DIGEST = "base_sha256"  # in the metadata of the weights' file, which peft ignores
_FIXED_FIELDS: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "use_qalora": False,
}


@dataclass(frozen=True)
class StoredAdapter:
    """The adapters of a checkpoint, joined, and the checkpoint without any that is below them."""

    layers: dict[str, LowRank]
    """By the name of our module."""
    base: Path
    config: ModelConfig
    dropout: float


def is_peft(directory: Path) -> bool:
    """Return whether a directory holds an adapter and no whole model."""
    return (directory / CONFIG_FILE).exists() and not any(directory.glob("model*.safetensors"))


def model_directories(directory: Path) -> list[Path]:
    """Return the directories with the files of a model: ``directory``, and that of the base if it holds an adapter."""
    return [directory, base_of_peft(directory)] if is_peft(directory) else [directory]


def base_of_peft(directory: Path) -> Path:
    """Return the directory of the base that ``adapter_config.json`` names: as it stands, or in ``directory``, or its
    directory ``base``. Raises UserError if there is none, or if it is an adapter too."""
    name = read_json_object(directory / CONFIG_FILE).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise UserError(f"{directory / CONFIG_FILE} names no base_model_name_or_path; set it to the base's directory.")
    base = None
    for place in (name, directory / name, directory / "base"):
        with suppress(OSError, RuntimeError):  # a name that is too long, or the home directory of an unknown user
            path = Path(place).expanduser()
            if base is None and path.is_dir() and path.resolve() != directory.resolve():
                base = path
    if base and is_peft(base):
        raise UserError(f"{base}, the base of the adapter {directory}, is an adapter too; merge it first.")
    if base:
        return base
    raise UserError(
        f"{directory} holds an adapter of the model {name[:200]!r}, and there is no such directory; textmill does not "
        f"download models. Set base_model_name_or_path in {CONFIG_FILE} to the directory of the base."
    )


def fuse_peft(model: TransformerLM, directory: Path) -> TransformerLM:
    """Add the adapter in ``directory`` to the weights of ``model``, its base, in place; return the model.

    Sums are float32, and rounded to the dtype of ``model``. Raises UserError as :func:`read_peft` does.
    """
    for name, (a_RI, b_OR, scale) in read_peft(directory, model, base_of_peft(directory)).items():
        weight = model.get_parameter(f"{name}.weight")
        weight.data = (weight.data.float() + (b_OR @ a_RI * scale).to(weight.device)).to(weight.dtype)
    return model


def read_peft(directory: Path, model: TransformerLM, base: Path) -> dict[str, LowRank]:
    """Return the matrices of the adapter in ``directory``, float32, by the names of the layers of ``model``.

    ``base`` has the files of ``model``. Raises UserError if a file is missing or damaged, if the adapter has parts that
    are not supported, and if it belongs to another base by its digest, names or shapes.
    """
    path = directory / CONFIG_FILE
    content = read_json_object(path)
    _check_config(path, content)
    check_base(directory, base)
    tensors = read_safetensors(directory / WEIGHTS_FILE)
    check_weights_are_finite(tensors, str(directory))
    ours = {name: weight for name, weight in model.named_parameters() if name.endswith(".weight") and weight.ndim == 2}
    names = _names(model.config, base)
    by_name = {_PREFIX + translate_name(name, names).removesuffix(".weight"): name for name in ours}
    is_rotary = find_rotary(model)
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if _is_copy(name, tensor, by_name, ours):
            continue
        match = re.fullmatch(r"(.*)\.lora_([AB])\.weight", name)
        is_known = match and by_name.get(match[1], "token_embeddings.weight") != "token_embeddings.weight"
        if not match or not is_known or not tensor.is_floating_point():
            raise UserError(
                f"{directory} has {name}, which is no low-rank matrix of a linear layer of its base; use an adapter "
                "that was trained on this model, with LoRA on linear layers alone."
            )
        matrices.setdefault(match[1], {})[match[2]] = tensor.float()
    layers = {}
    for theirs, pair in matrices.items():
        name = by_name[theirs]
        weight = ours[name]
        if pair.keys() != {"A", "B"} or not _fits(pair["A"], pair["B"], weight):
            shapes = " and ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in sorted(pair.items()))
            raise UserError(
                f"{directory}: the matrices of {theirs.removeprefix(_PREFIX)} are {shapes}, and its base has "
                f"{tuple(weight.shape)}; use an adapter that was trained on this model."
            )
        b_OR = pair_rotary_rows(pair["B"], model.config) if is_rotary[name] else pair["B"]
        scale = _scale(path, content, theirs.removeprefix(_PREFIX), len(pair["A"]))
        layers[name.removesuffix(".weight")] = LowRank(pair["A"], b_OR, scale)
    return layers


def read_served_peft(directory: Path, model: TransformerLM, base: Path) -> dict[str, LowRank]:
    """Return :func:`read_peft` of an adapter that is served beside others, over the same weights.

    Raises UserError also if the adapter is empty, or if it changes other layers than those of the blocks.
    """
    layers = read_peft(directory, model, base)
    if not layers:
        raise UserError(f"{directory} holds no matrices of an adapter; train it again.")
    if others := layers.keys() - choose_targets(model, []).keys():
        raise UserError(
            f"{directory} has matrices for {min(others)}; beside others, only adapters of the linear layers of blocks "
            f"are served. Serve it alone: textmill serve --model {directory}"
        )
    return layers


def _is_copy(name: str, tensor: Tensor, by_name: dict[str, str], ours: dict[str, nn.Parameter]) -> bool:
    """Return whether a tensor is that of the base: peft stores embedding and head too if the head has an adapter."""
    base = ours.get(by_name.get(name.removesuffix(".weight").removesuffix(".base_layer"), ""))
    return base is not None and base.shape == tensor.shape and torch.equal(base.to(tensor.dtype), tensor)


def _fits(a_RI: Tensor, b_OR: Tensor, weight_OI: Tensor) -> bool:
    if not a_RI.ndim == b_OR.ndim == 2 or not len(a_RI):
        return False
    return (len(b_OR), a_RI.shape[1]) == weight_OI.shape and len(a_RI) == b_OR.shape[1]


def _check_config(path: Path, content: dict[str, Any]) -> None:
    for name, value in _FIXED_FIELDS.items():
        if content.get(name, value) != value:
            raise UserError(f"{path}: {name} {content[name]!r} is not supported, only {value!r}; {_MERGE}")
    for name in ("modules_to_save", "trainable_token_indices", "target_parameters", "alora_invocation_tokens"):
        if content.get(name):
            raise UserError(f"{path}: {name} is not supported; {_MERGE}")


_MERGE = "merge the adapter into its base (in peft: merge_and_unload, then save_pretrained) and load the result."


def _scale(path: Path, content: dict[str, Any], name: str, rank: int) -> float:
    """Return the factor of a layer's change, by its rank and alpha."""
    patterns = content.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(re.fullmatch(r"\^?[\w.]+", key) for key in patterns):
        raise UserError(f"{path}: alpha_pattern is supported with names of layers alone; {_MERGE}")
    alphas = [patterns[key] for key in patterns if f".{name}".endswith(f".{key}") or key == f"^{name}"]
    alpha = alphas[0] if alphas else content.get("lora_alpha", 8)
    if type(alpha) not in (int, float) or not 0 < alpha <= _MAX_ALPHA:
        raise UserError(
            f"{path}: lora_alpha is {repr(alpha)[:40]}; it must be a number above 0, at most {_MAX_ALPHA:,}."
        )
    return float(alpha) / (math.sqrt(rank) if content.get("use_rslora") else rank)


def check_base(directory: Path, base: Path) -> None:
    """Raise UserError if the adapter states the digest of another base than ``base``. Adapters of peft state none."""
    try:
        with safe_open(directory / WEIGHTS_FILE, "pt") as file:
            expected = (file.metadata() or {}).get(_BASE_DIGEST)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory / WEIGHTS_FILE} cannot be read: {error}.") from None
    files = tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in base.glob("*.safetensors"))
    if expected and expected != _digest_of_versions(files):
        raise UserError(
            f"{directory} holds an adapter of another model than {base}: the digest of the base's weights differs. "
            f"Name the directory of its base: as base_model_name_or_path in {CONFIG_FILE}, or beside --adapters as "
            "--model."
        )


@cache
def _digest_of_versions(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Return the digest of files by their size and time: several adapters of one base are read in turn."""
    return digest_of_files(file_checksum(path.open("rb")) for path, _, _ in files)


def digest_of_files(checksums: Iterable[str]) -> str:
    """Return one digest of the SHA-256 checksums of a base's files of weights."""
    return hashlib.sha256(json.dumps(sorted(checksums)).encode()).hexdigest()


def read_stored_adapter(checkpoint: Path) -> StoredAdapter | None:
    """Return the adapter of a training's checkpoint; None if the checkpoint holds a whole model.

    An adapter on an adapter is joined with it: ``B A + B' A'`` is the product of matrices side by side. Raises
    UserError if a checkpoint is missing or damaged.
    """
    description = read_description(checkpoint)
    if description is None:
        raise UserError(f"{checkpoint} is not an intact checkpoint.")
    if "adapter" not in description:
        return None
    tensors = read_weights(checkpoint, description)
    adapter, digest = read_adapter(description["adapter"], tensors, str(checkpoint))
    base = find_base(checkpoint, digest)
    names = {name.rpartition(".")[0] for name in tensors}
    scale = adapter.alpha / adapter.rank
    layers = {name: LowRank(tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"], scale) for name in names}
    below = read_stored_adapter(base)
    for name, (a, b, other_scale) in (below.layers if below else {}).items():
        if name not in layers:
            layers[name] = LowRank(a, b, other_scale)
            continue
        above = layers[name]
        b_OR = torch.cat([b * other_scale, above.b * scale], 1)
        layers[name] = LowRank(torch.cat([a, above.a]), b_OR, 1.0)
    config = ModelConfig(**description["model"])
    return StoredAdapter(layers, below.base if below else base, config, adapter.dropout)


def save_peft(adapter: StoredAdapter, directory: Path, base: Path, base_digest: str) -> None:
    """Write an adapter to an existing ``directory`` for peft's ``PeftModel.from_pretrained``.

    ``base`` is the Hugging Face directory of the base, ``base_digest`` its :func:`digest_of_files`. Raises UserError if
    that format cannot express the model, or if a file cannot be written.
    """
    config, model = adapter.config, TransformerLM(adapter.config, device="meta")
    names, is_rotary = _names(config, base), find_rotary(model)
    tensors, ranks, scales = {}, {}, {}
    for name, (a, b, scale) in adapter.layers.items():
        theirs = translate_name(name, names)
        if is_rotary[f"{name}.weight"]:
            b = unpair_rotary_rows(b, config)
        tensors[f"{_PREFIX}{theirs}.lora_A.weight"] = a.contiguous()
        tensors[f"{_PREFIX}{theirs}.lora_B.weight"] = b.contiguous()
        ranks[theirs], scales[theirs] = len(a), scale
    rank, scale = next(iter(ranks.values())), next(iter(scales.values()))
    # Of experts, the names of linear layers are those of routed ones too.
    targets = {name if config.moe else name.rpartition(".")[2] for name in ranks}
    content = {
        **{name: value for name, value in _FIXED_FIELDS.items() if name not in ("lora_bias", "use_qalora")},
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank * scale,
        "lora_dropout": adapter.dropout,
        "target_modules": sorted(targets),
        "rank_pattern": {name: other for name, other in ranks.items() if other != rank},
        "alpha_pattern": {
            name: ranks[name] * scales[name] for name in ranks if (ranks[name], scales[name]) != (rank, scale)
        },
    }
    with translate_write_errors(directory, (OSError, SafetensorError)):
        save_safetensors(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt", _BASE_DIGEST: base_digest})
        (directory / CONFIG_FILE).write_text(json.dumps(content, indent=2), encoding="utf-8")


def _names(config: ModelConfig, base: Path) -> dict[str, str]:
    """Return the names of modules, ours → those in the files of ``base``. Raises UserError if some are fused there."""
    path = base / "config.json"
    model_type = read_json_object(path).get("model_type") if path.exists() else None
    architecture = ARCHITECTURES[model_type if model_type in ARCHITECTURES else choose_architecture(config)]
    if architecture.fused:
        raise UserError(
            f"{base}: {architecture.label} holds several matrices as one, and adapters in peft's format are not "
            "supported for it. Export the model with its adapter fused (--fuse_adapter); to load an adapter, merge it "
            "into its base (in peft: merge_and_unload, then save_pretrained)."
        )
    return architecture.module_names
