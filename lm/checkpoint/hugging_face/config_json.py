"""The ``config.json`` of Hugging Face's models as a model's configuration and back."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm.checkpoint.external_weights import FieldTable, check_fixed_fields, read_field, read_model_config
from lm.checkpoint.hugging_face.architectures import ARCHITECTURES, Architecture, Experts
from lm.checkpoint.hugging_face.rope_fields import flatten_rope, read_rope, rope_fields
from lm.common.errors import UserError
from lm.files.json import read_json
from lm.model.config import ModelConfig, MoEConfig, Multipliers

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
_MULTIPLIERS = {  # ours → Granite's
    "embedding": "embedding_multiplier",
    "attention": "attention_multiplier",
    "residual": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}
_SOFTCAPS = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
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
    if "sliding_window" in architecture.defaults:  # null is no window, and no soft-cap
        stated = read_json(path)
        content = {name: value for name, value in content.items() if stated.get(name, value) is not None}
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
    if config.sliding_window and config.sliding_window >= config.context_length and not architecture.global_interval:
        config = replace(config, sliding_window=None)  # a Llama, which more formats and kernels have
    return config, model_type


def _read_stated_options(path: Path, content: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return the options of ``architecture.stated``. Raises UserError for a bad field."""
    options: dict[str, Any] = {}
    for option, (name, default) in _STATED_FIELDS.items():
        if option in architecture.stated:
            options[option] = read_field(path, content, name, default)
    if "global_rope" in architecture.stated:
        options |= _read_rope_layers(path, content)
    if "sliding_window" in architecture.stated:
        options |= _read_windows(path, content, architecture)
    if "multipliers" in architecture.stated:
        options["multipliers"] = _read_multipliers(path, content, architecture)
    for option, name in _SOFTCAPS.items():
        if option in architecture.stated:
            options[option] = read_field(path, content, name, 0.0)
    return options


def _read_windows(path: Path, content: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return the options that say which blocks attend to how many tokens."""
    if "sliding_window" not in content:
        return {}
    window = read_field(path, content, "sliding_window", None)
    num_layers, interval = read_field(path, content, "num_hidden_layers", None), architecture.global_interval
    types = content.get("layer_types")
    if interval is None:
        return {"sliding_window": window}
    if types is None:
        interval = read_field(path, content, "sliding_window_pattern", interval)
        is_global = [(layer + 1) % interval == 0 for layer in range(num_layers)]
        types = ["full_attention" if flag else "sliding_attention" for flag in is_global]
    if not isinstance(types, list) or len(types) != num_layers:
        raise UserError(f"{path}: layer_types is {types!r}; it must be a list with the type of each layer.")
    if unknown := [name for name in types if name not in ("full_attention", "sliding_attention")]:
        raise UserError(f"{path}: layer_types has {unknown[0]!r}; full_attention and sliding_attention are supported.")
    interval = _find_interval(path, "layer_types", [name == "full_attention" for name in types])
    options = {"sliding_window": window, "global_interval": interval}
    if "local_rope_theta" in architecture.stated:
        theta = read_field(path, content, "rope_local_base_freq", 10000.0)
        options |= {"local_rope_theta": theta} if interval else {"rope_theta": theta, "rope_scaling": None}
    return options


def _read_multipliers(path: Path, content: dict[str, Any], architecture: Architecture) -> Multipliers | None:
    """Return the constant factors of a Granite or a Gemma, None if all are those of a Llama."""
    if architecture.global_interval:
        scale = read_field(path, content, "query_pre_attn_scalar", None)
        return Multipliers(embedding=read_field(path, content, "hidden_size", None) ** 0.5, attention=scale**-0.5)
    values = {ours: float(read_field(path, content, theirs, 1.0)) for ours, theirs in _MULTIPLIERS.items()}
    try:
        return Multipliers(**values)
    except UserError as error:
        raise UserError(f"{path} describes an unsupported model: {error}") from None


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


def _read_moe_config(path: Path, content: dict[str, Any], model_type: str, experts: Experts) -> MoEConfig:
    """Return the experts that a ``config.json`` describes. Raises UserError for an unsupported or a bad field."""
    check_fixed_fields(path, content, experts.fixed_fields)
    names = {ours: name for name, ours in experts.fields.items()}
    if names["num_experts"] not in content:
        names["num_experts"] = "num_local_experts"  # as transformers 5 writes it
    options = {ours: read_field(path, content, name, None) for ours, name in names.items()}
    if model_type != "mixtral":
        options["normalized_gates"] = read_field(path, content, "norm_topk_prob", model_type == "glm4_moe")
    if model_type in ("qwen3_moe", "qwen2_moe"):
        dense = content.get("mlp_only_layers", [])
        if not isinstance(dense, list) or dense != [*range(len(dense))]:
            raise UserError(f"{path}: mlp_only_layers {dense!r} is not supported; only the first layers can be dense.")
        options["num_dense_layers"] = len(dense)
    if model_type == "qwen2_moe":
        width = read_field(path, content, "shared_expert_intermediate_size", 5632)
        if width % options["d_expert"]:
            raise UserError(
                f"{path}: shared_expert_intermediate_size {width} is no multiple of moe_intermediate_size "
                f"{options['d_expert']}, and a shared expert of another width is not supported."
            )
        options |= {"num_shared_experts": width // options["d_expert"], "shared_gate": True}
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
        **rope_fields(config, architecture.stated),
        **_stated_fields(config, architecture),
        **architecture.extra_fields,
    }


def _stated_fields(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """Return the fields of ``architecture.stated``: the reverse of :func:`_read_stated_options`."""
    content = {
        name: getattr(config, option) for option, (name, _) in _STATED_FIELDS.items() if option in architecture.stated
    }
    if "sliding_window" in architecture.stated:
        content["sliding_window"] = config.sliding_window
    if "global_interval" in architecture.stated and "global_rope" not in architecture.stated:
        is_global = map(config.is_global_layer, range(config.num_layers))
        content["layer_types"] = ["full_attention" if flag else "sliding_attention" for flag in is_global]
    if "multipliers" in architecture.stated:
        factors = config.factors
        attention = config.resolved_head_dim**-0.5 if factors.attention is None else factors.attention
        if architecture.global_interval:
            content["query_pre_attn_scalar"] = round(attention**-2)
        else:
            values = replace(factors, attention=attention)
            content |= {theirs: getattr(values, ours) for ours, theirs in _MULTIPLIERS.items()}
    for option, name in _SOFTCAPS.items():
        if option in architecture.stated:
            content[name] = getattr(config, option) or None
    if "global_rope" in architecture.stated:
        content["no_rope_layers"] = [int(config.has_rope(layer)) for layer in range(config.num_layers)]
    return content


def _moe_fields(config: ModelConfig, moe: MoEConfig, model_type: str, experts: Experts) -> dict[str, Any]:
    values = replace(moe, d_expert=moe.expert_width(config.d_ff))
    content: dict[str, Any] = {name: getattr(values, ours) for name, ours in experts.fields.items()}
    if model_type != "glm4_moe":
        content["router_aux_loss_coef"] = moe.aux_loss_weight / _aux_loss_scale(config.num_layers, moe)
    if model_type == "qwen2_moe":
        content["shared_expert_intermediate_size"] = moe.num_shared_experts * moe.expert_width(config.d_ff)
    if model_type in ("qwen3_moe", "qwen2_moe"):
        content["mlp_only_layers"] = [*range(moe.num_dense_layers)]
    if model_type == "glm4_moe":
        content |= {"first_k_dense_replace": moe.num_dense_layers, "num_nextn_predict_layers": 0}
    if model_type != "mixtral":
        content["norm_topk_prob"] = moe.normalized_gates
    return experts.fixed_fields | content
