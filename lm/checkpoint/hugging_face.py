"""Load and save weights in the files of Hugging Face's Llama, of Qwen2, a Llama with biases, of Qwen3, a Llama with
QK-norm, and of their relatives with experts (:mod:`lm.checkpoint.hugging_face_moe`). Load those of Mistral, a Llama
with a sliding window."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from lm.checkpoint.external_weights import (
    FieldTable,
    assemble_model,
    check_fixed_fields,
    check_is_expressible,
    read_field,
    read_json_object,
    read_model_config,
    reorder_rotary_rows,
    translate_name,
)
from lm.checkpoint.foreign_files import refuse_missing_head, refuse_other_formats, refuse_quantized, use_plain_names
from lm.checkpoint.hugging_face_moe import (
    ARCHITECTURES,
    choose_moe_architecture,
    join_experts,
    moe_config_fields,
    read_moe_config,
    split_experts,
)
from lm.checkpoint.hugging_face_rope import flatten_rope_fields, read_rope_scaling, rope_fields
from lm.checkpoint.model_card import make_model_card
from lm.checkpoint.safe_load import read_safetensors, save_safetensors
from lm.common.errors import UserError, translate_write_errors
from lm.data.chat_template import END_TOKEN, has_chat_tokens, make_jinja_template
from lm.files.atomic_dir import atomic_directory, fill_directory
from lm.files.json import read_json
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.tokenizer.text_ends import find_text_ends
from lm.tokenizer.tokenizer import Tokenizer

_MODULE_NAMES = {  # ours → Hugging Face's
    "layers": "model.layers",
    "token_embeddings": "model.embed_tokens",
    "attn.output_proj": "self_attn.o_proj",
    "attn": "self_attn",
    "ffn.w1": "mlp.gate_proj",
    "ffn.w2": "mlp.down_proj",
    "ffn.w3": "mlp.up_proj",
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "ln_final": "model.norm",
}
_FIELDS: FieldTable = {
    "hidden_size": ("d_model", None),
    "num_hidden_layers": ("num_layers", None),
    "num_attention_heads": ("num_heads", None),
    "num_key_value_heads": ("num_kv_heads", None),
    "intermediate_size": ("d_ff", None),
    "vocab_size": ("vocab_size", None),
    "max_position_embeddings": ("context_length", 2048),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "rope_theta": ("rope_theta", 10000.0),
    "tie_word_embeddings": ("tied_embeddings", False),
}
_FIXED_FIELDS = {"hidden_act": "silu", "attention_bias": False}
# By model_type. Qwen2 has no such field for its biases.
_FIXED_FIELDS_OF = {
    "llama": {"mlp_bias": False},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
}
# Of transformers, where they differ from those of _FIELDS. Llama has as many key-value heads as heads.
_DEFAULTS_OF: dict[str, dict[str, float]] = {
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
    "mixtral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen3_moe": {"num_key_value_heads": 4, "max_position_embeddings": 32768},
    "glm4_moe": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    **{model_type: architecture.class_name for model_type, architecture in ARCHITECTURES.items()},
}
_MISTRAL_WINDOW = 4096  # tokens, if the config states none; null means no window
_EXPRESSIBLE_OPTIONS = {
    *(ours for ours, _ in _FIELDS.values()),
    *("head_dim", "qk_norm", "qkv_bias", "moe", "rope_scaling"),
    "zero_init_residual",  # decides the initial weights only
}


def load_hugging_face(
    directory: Path,
    max_seq_len: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> TransformerLM:
    """Load a Llama, a Mistral, a Qwen2 or 3 or a relative with experts from ``config.json`` and safetensors.

    The model is in evaluation mode.

    ``max_seq_len`` is the context length, by default ``max_position_embeddings``. ``dtype`` defaults to that of the
    embedding. Prefixes that training code puts before the names of tensors are removed. Raises UserError if a file, a
    field or a tensor is missing, unknown, damaged or does not fit the others, and for unsupported features: biases
    other than those of Qwen2 and GLM-4-MoE, scalings of rotary positions other than linear and llama3, windows shorter
    than the context, quantized weights, adapters, reward models.
    """
    path = directory / "config.json"
    content = read_json_object(path)
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in _CLASSES:
        raise UserError(f"{path}: model_type {model_type!r} is not supported; use a {' or a '.join(_CLASSES)}.")
    content = flatten_rope_fields(path, content)
    fixed_fields = _FIXED_FIELDS | _FIXED_FIELDS_OF.get(model_type, {}) | {"partial_rotary_factor": 1}
    if model_type == "glm4_moe":
        del fixed_fields["attention_bias"]
    check_fixed_fields(path, content, fixed_fields)
    options: dict[str, Any] = {} if max_seq_len is None else {"context_length": max_seq_len}
    options["rope_scaling"] = read_rope_scaling(path, content)
    has_biases = model_type == "glm4_moe" and read_field(path, content, "attention_bias", False)
    options["qkv_bias"] = model_type == "qwen2" or has_biases
    options["qk_norm"] = model_type in ("qwen3", "qwen3_moe") or content.get("use_qk_norm", False)
    if model_type in ARCHITECTURES:
        options["moe"] = read_moe_config(path, content, model_type)
    content = {"num_key_value_heads": content.get("num_attention_heads")} | _DEFAULTS_OF.get(model_type, {}) | content
    if content.get("head_dim") is not None:
        options["head_dim"] = read_field(path, content, "head_dim", 1)
    config = read_model_config(path, content, _FIELDS, **options)
    if config.head_dim == config.d_model / config.num_heads:
        config = replace(config, head_dim=None)
    if model_type == "mistral":
        _check_window(path, config.context_length)
    tensors = use_plain_names(_read_all_safetensors(directory), directory)
    refuse_quantized(tensors, content, directory)
    refuse_missing_head(tensors, config.tied_embeddings, directory)
    if config.tied_embeddings and "lm_head.weight" in tensors:  # some files store the tied matrix twice
        head = tensors.pop("lm_head.weight")
        if not head.equal(tensors.setdefault("model.embed_tokens.weight", head)):
            raise UserError(f"{path} ties the embeddings, but the weights have two; set tie_word_embeddings to false.")
    if model_type in ARCHITECTURES:
        tensors = join_experts(tensors, model_type, directory)
    model = assemble_model(config, [tensors], _module_names(model_type), directory, device, dtype)
    is_rotary = _find_rotary(model)
    for name, parameter in model.named_parameters():
        if is_rotary[name]:
            parameter.data = reorder_rotary_rows(parameter.data, 2, config.head_width // 2)
    return model


def save_hugging_face(model: TransformerLM, tokenizer: Tokenizer, directory: Path, details: str = "") -> None:
    """Write a directory for transformers' ``AutoModelForCausalLM`` and ``AutoTokenizer``, atomically; into one that
    exists and is empty, ``config.json`` last.

    A model with QK-norm becomes a Qwen3, one with biases a Qwen2, others a Llama; with experts, a Qwen3-MoE, a Mixtral
    or, with sigmoid affinities, a GLM-4-MoE. The weights keep the model's dtype. Generation stops at any special token.
    If the tokenizer has the tokens of the chat template, ``apply_chat_template`` works. The model card, ``README.md``,
    ends with ``details``, sections of Markdown. Raises UserError if ``directory`` is not new or empty, if that
    architecture lacks an option of the model, if the tokenizer has more ids than the model, or if it cannot be written.
    """
    directory = directory.resolve()
    with translate_write_errors(directory):
        if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            raise UserError(f"{directory} already exists; name a new or an empty directory.")
    config = model.config
    check_is_expressible(config, _EXPRESSIBLE_OPTIONS, "Hugging Face's Llama")
    model_type = _choose_architecture(config)
    if tokenizer.size > (config.vocab_size or 0):
        raise UserError(
            f"The tokenizer has {tokenizer.size:,} ids, the model {config.vocab_size:,}; they do not belong together."
        )
    is_rotary, weights = _find_rotary(model), {}
    for name, weight in model.state_dict().items():
        if is_rotary.get(name):
            weight = reorder_rotary_rows(weight, config.head_width // 2, 2)
        weights[translate_name(name, _module_names(model_type))] = weight.cpu().contiguous()
    moe_fields: dict[str, Any] = {}
    if config.moe is not None:
        weights, moe_fields = split_experts(weights, model_type, config), moe_config_fields(model_type, config)
    rope = rope_fields(config.rope_theta, config.rope_scaling)
    if "partial_rotary_factor" in moe_fields:
        rope["rope_parameters"]["partial_rotary_factor"] = 1.0
    begin_token, end_token = find_text_ends(tokenizer)
    template = {}
    if has_chat_tokens(tokenizer):
        end_token, template = END_TOKEN, {"chat_template": make_jinja_template(tokenizer)}
    # Written even if null: the defaults of transformers are ids 1 and 2.
    special_ids = {
        "bos_token_id": tokenizer.special_ids.get(begin_token or ""),
        "eos_token_id": [*tokenizer.special_ids.values()] or None,
    }
    contents = {
        "config.json": {
            "architectures": [_CLASSES[model_type]],
            "model_type": model_type,
            **_FIXED_FIELDS,
            **_FIXED_FIELDS_OF.get(model_type, {}),
            **{name: getattr(config, ours) for name, (ours, _) in _FIELDS.items()},
            **moe_fields,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_width,
            # For transformers 5; transformers 4 reads the field rope_theta.
            **rope,
            "torch_dtype": str(model.head_weight.dtype).removeprefix("torch."),
            **special_ids,
        },
        "generation_config.json": special_ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": begin_token,
            "eos_token": end_token,
            "model_max_length": config.context_length,
            "clean_up_tokenization_spaces": False,
            **template,
        },
    }
    target = fill_directory(directory, "config.json") if directory.exists() else atomic_directory(directory)
    with translate_write_errors(directory, (OSError, SafetensorError)), target as temporary:
        # transformers 4 requires the metadata.
        save_safetensors(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_tokenizer_json(temporary / "tokenizer.json")
        card = make_model_card(directory.name, _CLASSES[model_type], model, tokenizer, details)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        for name, content in contents.items():
            (temporary / name).write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def _check_window(path: Path, context_length: int) -> None:
    """Raise UserError if a Mistral attends to fewer tokens than its context has: the model attends to all."""
    content = {"sliding_window": _MISTRAL_WINDOW} | read_json(path)
    if content["sliding_window"] is not None and read_field(path, content, "sliding_window", None) < context_length:
        raise UserError(
            f"{path}: sliding_window {content['sliding_window']:,} is below the context of {context_length:,} tokens, "
            "and such attention is not supported; lower max_position_embeddings to the window."
        )


def _module_names(model_type: str) -> dict[str, str]:
    experts = ARCHITECTURES[model_type].module_names if model_type in ARCHITECTURES else {}
    return experts | _MODULE_NAMES


def _find_rotary(model: TransformerLM) -> dict[str, bool]:
    """Return for each parameter whether its rows are in the order of the rotary pairs."""
    roles = model.parameter_roles()
    others = ("q_norm.weight", "k_norm.weight", "q_proj.bias", "k_proj.bias")
    return {name: role == "query_key" or name.endswith(others) for name, role in roles.items()}


def _choose_architecture(config: ModelConfig) -> str:
    """Return the model type that has the options of ``config``. Raises UserError if none has them together."""
    if config.moe is not None:
        model_type = choose_moe_architecture(config)
    else:
        model_type = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    if config.qkv_bias and model_type not in ("qwen2", "glm4_moe"):
        other = "qk_norm" if config.qk_norm else "moe"
        raise UserError(
            f"model.qkv_bias cannot be exported with model.{other}: of Hugging Face's architectures, only Qwen2 and "
            "GLM-4-MoE have biases of queries, keys and values alone; train a model without one of the two options."
        )
    return model_type


def _read_all_safetensors(directory: Path) -> dict[str, Tensor]:
    """Return the memory-mapped tensors of ``model.safetensors``, or of the files that its index names."""
    paths = [directory / "model.safetensors"]
    index = directory / "model.safetensors.index.json"
    if not paths[0].exists() and index.exists():
        files = read_json_object(index).get("weight_map")
        if not isinstance(files, dict):
            raise UserError(f"{index} has no weight_map, the file of each tensor.")
        if outside := [name for name in files.values() if not isinstance(name, str) or Path(name).name != name]:
            raise UserError(f"{index} names {outside[0]!r}; each file must lie in {directory} itself.")
        paths = sorted({directory / name for name in files.values()})
    elif not paths[0].exists():
        refuse_other_formats(directory)
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= read_safetensors(path)
    return tensors
