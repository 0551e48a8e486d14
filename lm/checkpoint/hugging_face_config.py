"""The ``config.json`` of Hugging Face's models as a model's configuration and back."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm.checkpoint.external_weights import FieldTable, check_fixed_fields, read_field, read_model_config
from lm.checkpoint.hugging_face_architectures import ARCHITECTURES, Architecture, Experts
from lm.checkpoint.hugging_face_rope import flatten_rope, read_rope, rope_fields
from lm.common.errors import UserError
from lm.files.json import read_json
from lm.model.config import ModelConfig, MoEConfig

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
_STATED_FIELDS: dict[str, tuple[str, Any]] = {  # ours → (Hugging Face's, default), of some architectures
    "rotary_fraction": ("partial_rotary_factor", 1.0),
    "qk_norm": ("use_qk_norm", False),
    "qkv_bias": ("attention_bias", False),
}


def read_config(path: Path, content: dict[str, Any], max_seq_len: int | None) -> tuple[ModelConfig, str]:
    """Return the model's config and the ``model_type`` that the fields of a ``config.json`` describe.

    ``max_seq_len`` is the context length, by default ``max_position_embeddings``. Raises UserError for an unsupported
    or a bad field.
    """
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise UserError(f"{path}: model_type {model_type!r} is not supported; use a {' or a '.join(ARCHITECTURES)}.")
    architecture = ARCHITECTURES[model_type]
    content = flatten_rope(path, content)
    fixed_fields = _FIXED_FIELDS | architecture.fixed_fields
    if "rotary_fraction" not in architecture.stated:
        fixed_fields["partial_rotary_factor"] = 1
    if "qkv_bias" in architecture.stated:
        del fixed_fields["attention_bias"]
    check_fixed_fields(path, content, fixed_fields)
    # Llama has as many key-value heads as heads.
    content = {"num_key_value_heads": content.get("num_attention_heads")} | architecture.defaults | content
    options: dict[str, Any] = {} if max_seq_len is None else {"context_length": max_seq_len}
    options |= read_rope(path, content, max_seq_len) | architecture.options
    options |= _read_stated_options(path, content, architecture)
    if architecture.experts:
        options["moe"] = _read_moe_config(path, content, model_type, architecture.experts)
    if content.get("head_dim") is not None:
        options["head_dim"] = read_field(path, content, "head_dim", 1)
    config = read_model_config(path, content, _FIELDS, **options)
    if config.head_dim == config.d_model / config.num_heads:
        config = replace(config, head_dim=None)
    if model_type in ("mistral", "phi3"):
        _check_window(path, config.context_length, 4096 if model_type == "mistral" else None)
    return config, model_type


def _read_stated_options(path: Path, content: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return the options of ``architecture.stated``. Raises UserError for a bad field."""
    options: dict[str, Any] = {}
    for option, (name, default) in _STATED_FIELDS.items():
        if option in architecture.stated:
            options[option] = read_field(path, content, name, default)
    if "global_rope" in architecture.stated:
        options |= _read_rope_layers(path, content)
    return options


def _read_rope_layers(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return the options that say which blocks have no rotary positions."""
    interval = read_field(path, content, "no_rope_layer_interval", 4)
    num_layers = read_field(path, content, "num_hidden_layers", None)
    has_rope = content.get("no_rope_layers")  # 1 for a block that has
    if has_rope is None:
        has_rope = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(has_rope, list) or len(has_rope) < num_layers:
        raise UserError(f"{path}: no_rope_layers is {has_rope!r}; it must be a list with a number for each layer.")
    interval = _find_interval(path, "no_rope_layers", [not flag for flag in has_rope[:num_layers]])
    return {"global_interval": interval, "global_rope": interval is None}


def _find_interval(path: Path, name: str, is_global: Sequence[bool]) -> int | None:
    """Return n if every n-th block is global, None if no block is. Raises UserError for another choice of blocks."""
    if True not in is_global:
        return None
    interval = is_global.index(True) + 1
    if interval == 1 or any(flag != ((layer + 1) % interval == 0) for layer, flag in enumerate(is_global)):
        marked = [layer for layer, flag in enumerate(is_global) if flag]
        raise UserError(
            f"{path}: {name} marks the layers {marked}, counted from 0; only every n-th layer, with n at least 2, is "
            "supported."
        )
    return interval


def _check_window(path: Path, context_length: int, default: int | None) -> None:
    """Raise UserError if a model attends to fewer tokens than its context has: ours attends to all."""
    content = {"sliding_window": default} | read_json(path)  # transformers' default; null means no window
    if content["sliding_window"] is not None and read_field(path, content, "sliding_window", None) < context_length:
        raise UserError(
            f"{path}: sliding_window {content['sliding_window']:,} is below the context of {context_length:,} tokens, "
            "and such attention is not supported; lower max_position_embeddings to the window."
        )


def _read_moe_config(path: Path, content: dict[str, Any], model_type: str, experts: Experts) -> MoEConfig:
    """Return the experts that a ``config.json`` describes. Raises UserError for an unsupported or a bad field."""
    check_fixed_fields(path, content, experts.fixed_fields)
    names = {ours: name for name, ours in experts.fields.items()}
    if names["num_experts"] not in content:
        names["num_experts"] = "num_local_experts"  # as transformers 5 writes it
    options = {ours: read_field(path, content, name, None) for ours, name in names.items()}
    if model_type != "mixtral":
        options["normalized_gates"] = read_field(path, content, "norm_topk_prob", model_type == "glm4_moe")
    if model_type == "qwen3_moe":
        dense = content.get("mlp_only_layers", [])
        if not isinstance(dense, list) or dense != [*range(len(dense))]:
            raise UserError(f"{path}: mlp_only_layers {dense!r} is not supported; only the first layers can be dense.")
        options["num_dense_layers"] = len(dense)
    if model_type == "glm4_moe":
        is_all_experts = content.get("first_k_dense_replace") == 0
        options["num_dense_layers"] = 0 if is_all_experts else read_field(path, content, "first_k_dense_replace", 1)
        options |= {"aux_loss_weight": 0.0, "bias_update_rate": 1e-3}  # the usual rate: files do not state it
    else:
        options["aux_loss_weight"] = read_field(path, content, "router_aux_loss_coef", 0.001)
    try:
        moe = MoEConfig(affinity=experts.affinity, **options)
    except UserError as error:
        raise UserError(f"{path} describes an unsupported model: {error}") from None
    num_layers = read_field(path, content, "num_hidden_layers", None)
    if moe.num_dense_layers >= num_layers:
        raise UserError(f"{path}: all {num_layers} layers are dense.")
    weight = float(f"{moe.aux_loss_weight * _aux_loss_scale(num_layers, moe):.12g}")  # 0.01 after a round trip
    return replace(moe, aux_loss_weight=weight)


def _aux_loss_scale(num_layers: int, moe: MoEConfig) -> float:
    """Return the auxiliary loss of transformers over ours, for a balanced load.

    Theirs pools the blocks, and its shares sum to ``top_k``; ours is summed over the blocks, and its shares sum to 1.
    """
    return moe.top_k / (num_layers - moe.num_dense_layers)


def config_fields(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """Return the fields of ``config.json`` that describe ``config``: the reverse of :func:`read_config`."""
    architecture = ARCHITECTURES[model_type]
    moe = config.moe
    return {
        "architectures": [architecture.class_name],
        "model_type": model_type,
        **_FIXED_FIELDS,
        **architecture.fixed_fields,
        **{name: getattr(config, ours) for name, (ours, _) in _FIELDS.items()},
        **(_moe_fields(config, moe, model_type, architecture.experts) if moe and architecture.experts else {}),
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.resolved_head_dim,
        **rope_fields(config, "rotary_fraction" in architecture.stated),
        **_stated_fields(config, architecture),
        **architecture.extra_fields,
    }


def _stated_fields(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """Return the fields of ``architecture.stated``: the reverse of :func:`_read_stated_options`."""
    content = {
        name: getattr(config, option) for option, (name, _) in _STATED_FIELDS.items() if option in architecture.stated
    }
    if "global_rope" in architecture.stated:
        content["no_rope_layers"] = [int(config.has_rope(layer)) for layer in range(config.num_layers)]
    return content


def _moe_fields(config: ModelConfig, moe: MoEConfig, model_type: str, experts: Experts) -> dict[str, Any]:
    values = replace(moe, d_expert=moe.expert_width(config.d_ff))
    content: dict[str, Any] = {name: getattr(values, ours) for name, ours in experts.fields.items()}
    if model_type != "glm4_moe":
        content["router_aux_loss_coef"] = moe.aux_loss_weight / _aux_loss_scale(config.num_layers, moe)
    if model_type == "qwen3_moe":
        content["mlp_only_layers"] = [*range(moe.num_dense_layers)]
    if model_type == "glm4_moe":
        content |= {"first_k_dense_replace": moe.num_dense_layers, "num_nextn_predict_layers": 0}
    if model_type != "mixtral":
        content["norm_topk_prob"] = moe.normalized_gates
    return experts.fixed_fields | content
