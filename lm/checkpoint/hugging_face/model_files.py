"""Load and save models in Hugging Face's files: a Llama or a relative, see
:mod:`lm.checkpoint.hugging_face.architectures`."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from lm.checkpoint.external_weights import (
    assemble_model,
    pair_rotary_rows,
    read_json_object,
    refuse_missing_head,
    refuse_quantized,
    translate_name,
    unpair_rotary_rows,
    use_plain_names,
)
from lm.checkpoint.hugging_face.architectures import ARCHITECTURES, choose_architecture
from lm.checkpoint.hugging_face.chat_files import chat_fields
from lm.checkpoint.hugging_face.config_json import config_fields, read_config
from lm.checkpoint.hugging_face.tensor_forms import from_own_tensors, to_own_tensors
from lm.checkpoint.hugging_face.weight_files import DequantizedWeights, read_weights
from lm.checkpoint.safe_load import save_safetensors
from lm.common.errors import UserError, translate_write_errors
from lm.files.atomic_dir import atomic_directory, fill_directory
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer

_MODEL_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- textmill
---

# {name}

A language model of {parameters:,} parameters, a `{class_name}` with a context of {context:,} tokens. Its tokenizer is a
byte-level BPE of {ids:,} ids. Made with textmill.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({literal})
model = AutoModelForCausalLM.from_pretrained({literal}, dtype="auto")
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```
"""


def load_hugging_face(
    directory: Path,
    max_seq_len: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> TransformerLM:
    """Load a Llama, a Mistral, a Qwen2 or 3 or a relative with experts from ``config.json`` and safetensors, or from
    ``pytorch_model.bin``.

    The model is in evaluation mode. Weights in FP8 are multiplied by their scales.

    ``max_seq_len`` is the context length, by default ``max_position_embeddings``. ``dtype`` defaults to that of the
    embedding. Prefixes that training code puts before the names of tensors are removed. Raises UserError if a file, a
    field or a tensor is missing, unknown, damaged or does not fit the others, and for unsupported features: biases
    other than those of Qwen2 and GLM-4-MoE, scalings of rotary positions other than linear and llama3, windows shorter
    than the context, other quantized weights, adapters, reward models.
    """
    path = directory / "config.json"
    content = read_json_object(path)
    config, model_type = read_config(path, content, max_seq_len)
    architecture = ARCHITECTURES[model_type]
    weights = to_own_tensors(_read_tensors(directory, content, config), architecture, config, directory)
    model = assemble_model(config, [weights], architecture.module_names, directory, device, dtype)
    is_rotary = find_rotary(model)
    for name, parameter in model.named_parameters():
        if is_rotary[name]:
            parameter.data = pair_rotary_rows(parameter.data, config)
    return model


def _read_tensors(directory: Path, content: dict[str, Any], config: ModelConfig) -> DequantizedWeights:
    """Return the tensors under transformers' names, one of tied embeddings. Raises UserError as
    :func:`load_hugging_face` does."""
    tensors = use_plain_names(read_weights(directory), directory)
    refuse_quantized(tensors, content, directory)
    refuse_missing_head(tensors, config.tied_embeddings, directory)
    if config.tied_embeddings and "lm_head.weight" in tensors:  # some files store the tied matrix twice
        head = tensors.pop("lm_head.weight")
        if not head.equal(tensors.setdefault("model.embed_tokens.weight", head)):
            raise UserError(
                f"{directory / 'config.json'} ties the embeddings, but the weights have two; set tie_word_embeddings "
                "to false."
            )
    return DequantizedWeights(tensors, content, directory)


def save_hugging_face(model: TransformerLM, tokenizer: Tokenizer, directory: Path, details: str = "") -> None:
    """Write a directory for transformers' ``AutoModelForCausalLM`` and ``AutoTokenizer``, atomically; into one that
    exists and is empty, ``config.json`` last.

    A model with QK-norm becomes a Qwen3, one with biases a Qwen2, others a Llama; with experts, a Qwen3-MoE, a Mixtral
    or, with sigmoid affinities, a GLM-4-MoE. The weights keep the model's dtype. Generation stops at the tokenizer's
    ``stop_ids``. If the tokenizer has a chat template, ``apply_chat_template`` works. The model card, ``README.md``,
    ends with ``details``, sections of Markdown. Raises UserError if ``directory`` is not new or empty, if that
    architecture lacks an option of the model, if the tokenizer has more ids than the model, or if it cannot be written.
    """
    directory = directory.resolve()
    with translate_write_errors(directory):
        if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            raise UserError(f"{directory} already exists; name a new or an empty directory.")
    config = model.config
    model_type = choose_architecture(config)
    architecture = ARCHITECTURES[model_type]
    if tokenizer.size > (config.vocab_size or 0):
        raise UserError(
            f"The tokenizer has {tokenizer.size:,} ids, the model {config.vocab_size:,}; they do not belong together."
        )
    is_rotary, weights = find_rotary(model), {}
    for name, weight in model.state_dict().items():
        if is_rotary.get(name):
            weight = unpair_rotary_rows(weight, config)
        weights[translate_name(name, architecture.module_names)] = weight.cpu().contiguous()
    weights = from_own_tensors(weights, architecture)
    tokenizer_fields, generation_fields = chat_fields(tokenizer)
    contents = {
        "config.json": {
            **config_fields(config, model_type),
            "torch_dtype": str(model.head_weight.dtype).removeprefix("torch."),
            **{name: generation_fields[name] for name in ("bos_token_id", "eos_token_id")},
        },
        "generation_config.json": generation_fields,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.context_length,
            "clean_up_tokenization_spaces": False,
            **tokenizer_fields,
        },
    }
    card = _MODEL_CARD.format(
        name=directory.name,
        literal=json.dumps(directory.name, ensure_ascii=False),
        class_name=architecture.class_name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        context=config.context_length,
        ids=tokenizer.size,
    )
    target = fill_directory(directory, "config.json") if directory.exists() else atomic_directory(directory)
    with translate_write_errors(directory, (OSError, SafetensorError)), target as temporary:
        # transformers 4 requires the metadata.
        save_safetensors(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_tokenizer_json(temporary / "tokenizer.json")
        (temporary / "README.md").write_text(f"{card}\n{details.strip()}\n" if details else card, encoding="utf-8")
        for name, content in contents.items():
            (temporary / name).write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def find_rotary(model: TransformerLM) -> dict[str, bool]:
    """Return for each parameter whether its rows are in the order of the rotary pairs."""
    roles = model.parameter_roles()
    others = ("q_norm.weight", "k_norm.weight", "q_proj.bias", "k_proj.bias")
    return {name: role == "query_key" or name.endswith(others) for name, role in roles.items()}
