"""Files of other projects: give tensors the plain names of Hugging Face's Llama, or say why they cannot be loaded."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from lm.checkpoint.external_weights import read_json_object
from lm.checkpoint.safe_load import WEIGHT_DTYPES
from lm.common.errors import UserError

# Modules around the model, or around a part of it: of torch.compile, DDP, FSDP and activation checkpointing.
_WRAPPERS = re.compile(r"\b(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_ANCHOR = re.compile(r"((?:.*\.)?)layers\.0\.input_layernorm\.weight")  # in each file; what precedes it is the prefix
_ADAPTER_MATRIX = re.compile(r"\.(lora_[A-Z]+|lora_embedding_[AB]|base_layer)\.")
_OTHER_HEAD = re.compile(r"(.*\.)?(score|classifier|classification_head)\.(.*\.)?weight")
_MERGE = "merge it into its base model (in peft: merge_and_unload, then save_pretrained) and load the result"
_OTHER_FORMATS = {  # of weights, by the names of their files
    "*.gguf": "GGUF, which textmill writes but does not read; use the safetensors files of the same model",
    **dict.fromkeys(
        ("pytorch_model*.bin", "*.pt", "*.ckpt", "tf_model.h5", "flax_model.msgpack"),
        "not safetensors; load it with transformers, and save it with save_pretrained(safe_serialization=True)",
    ),
    "model-*.safetensors": "one of several, and their model.safetensors.index.json is missing; use all files",
}


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
    if adapters := [name for name in tensors if _ADAPTER_MATRIX.search(name)]:
        raise UserError(f"{directory} has {adapters[0]}, a matrix of an adapter (LoRA) that is not merged; {_MERGE}.")
    names = {name: _WRAPPERS.sub("", name) for name in tensors}
    prefixes = {match[1] for name in names.values() if (match := _ANCHOR.fullmatch(name))}
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
    """Raise UserError if a tensor is not floating-point of at least 16 bits, as in all files of quantized weights."""
    for name, tensor in tensors.items():
        if tensor.dtype not in WEIGHT_DTYPES:
            quantization = config.get("quantization_config")
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            raise UserError(
                f"{directory}: {name} is {tensor.dtype}: the weights are quantized ({method or 'no method is named'}), "
                "and textmill reads floating-point of at least 16 bits; use the original model. textmill quantizes "
                "when it serves (--quantize)."
            )


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
