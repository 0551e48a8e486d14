"""The ``config.json`` of Hugging Face's Llama and its relatives, as a model's configuration and back.

The relatives: Mistral, a Llama with a sliding window; Qwen2, a Llama with biases; Qwen3, a Llama with QK-norm; and
mixtures of experts: Mixtral, Qwen3-MoE (with QK-norm) and GLM-4-MoE (sigmoid affinities).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lm.checkpoint.external_weights import (
    FieldTable,
    check_fixed_fields,
    check_is_expressible,
    read_field,
    read_model_config,
)
from lm.common.errors import UserError
from lm.files.json import read_json
from lm.model.config import ModelConfig, MoEConfig, RopeScaling

BIAS_NAME = "e_score_correction_bias"
"""Name of the bias of a router whose affinities are sigmoids."""


class Experts(NamedTuple):
    """A mixture of experts in the files of an architecture."""

    affinity: Literal["softmax", "sigmoid"]
    block: str
    """Name of the module of the experts."""
    matrix_names: dict[str, str]
    """Matrix of an expert, ours → theirs."""
    fields: dict[str, str]
    """Field of ``config.json`` → field of MoEConfig, a whole number."""
    fixed_fields: dict[str, Any]

    @property
    def module_names(self) -> dict[str, str]:
        """Names of modules and buffers, ours → theirs."""
        return {
            "ffn.router": f"{self.block}.gate",
            "ffn.expert_bias": f"{self.block}.gate.{BIAS_NAME}",
            "ffn.experts": f"{self.block}.experts",
            "ffn.shared.w1": f"{self.block}.shared_experts.gate_proj",
            "ffn.shared.w2": f"{self.block}.shared_experts.down_proj",
            "ffn.shared.w3": f"{self.block}.shared_experts.up_proj",
        }


class Architecture(NamedTuple):
    """What differs from a Llama in the files of an architecture."""

    class_name: str
    fixed_fields: dict[str, Any]
    """Fields of which only this value is supported. Qwen2 has no such field for its biases."""
    defaults: dict[str, float]
    """Of transformers, where they differ from those of the table of fields."""
    experts: Experts | None = None


_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", {"mlp_bias": False}, {}),
    "mistral": Architecture("MistralForCausalLM", {}, {"num_key_value_heads": 8, "max_position_embeddings": 131072}),
    "qwen2": Architecture(
        "Qwen2ForCausalLM",
        {"use_sliding_window": False},
        {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        {"use_sliding_window": False},
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        {},
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        Experts(
            "softmax",
            "block_sparse_moe",
            {"w1": "w1", "w2": "w2", "w3": "w3"},
            {"num_local_experts": "num_experts", "num_experts_per_tok": "top_k", "intermediate_size": "d_expert"},
            {"sliding_window": None},
        ),
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        {},
        {"num_key_value_heads": 4, "max_position_embeddings": 32768},
        Experts(
            "softmax",
            "mlp",
            _PROJECTIONS,
            {"num_experts": "num_experts", "num_experts_per_tok": "top_k", "moe_intermediate_size": "d_expert"},
            {"use_sliding_window": False, "decoder_sparse_step": 1},
        ),
    ),
    "glm4_moe": Architecture(
        "Glm4MoeForCausalLM",
        {},
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        Experts(
            "sigmoid",
            "mlp",
            _PROJECTIONS,
            {
                "n_routed_experts": "num_experts",
                "num_experts_per_tok": "top_k",
                "moe_intermediate_size": "d_expert",
                "n_shared_experts": "num_shared_experts",
            },
            {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
        ),
    ),
}
"""By ``model_type``."""

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
EXPRESSIBLE_OPTIONS = {
    *(ours for ours, _ in _FIELDS.values()),
    *("head_dim", "qk_norm", "qkv_bias", "moe", "rope_scaling"),
    "zero_init_residual",  # decides the initial weights only
}
_ROPE_FIELDS = {  # Hugging Face's → ours, by kind
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_context_length",
    },
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
    for name in ("rope_parameters", "rope_scaling"):  # of transformers 5 and 4; their fields move beside the others
        rope = content.get(name, {})
        if not isinstance(rope, dict):
            raise UserError(f"{path}: {name} is {rope!r}; it must be an object or null.")
        content = content | rope
    fixed_fields = _FIXED_FIELDS | architecture.fixed_fields | {"partial_rotary_factor": 1}
    if model_type == "glm4_moe":
        del fixed_fields["attention_bias"]
    check_fixed_fields(path, content, fixed_fields)
    options: dict[str, Any] = {} if max_seq_len is None else {"context_length": max_seq_len}
    options["rope_scaling"] = _read_rope_scaling(path, content)
    has_biases = model_type == "glm4_moe" and read_field(path, content, "attention_bias", False)
    options["qkv_bias"] = model_type == "qwen2" or has_biases
    options["qk_norm"] = model_type in ("qwen3", "qwen3_moe") or content.get("use_qk_norm", False)
    if architecture.experts:
        options["moe"] = _read_moe_config(path, content, model_type, architecture.experts)
    # Llama has as many key-value heads as heads.
    content = {"num_key_value_heads": content.get("num_attention_heads")} | architecture.defaults | content
    if content.get("head_dim") is not None:
        options["head_dim"] = read_field(path, content, "head_dim", 1)
    config = read_model_config(path, content, _FIELDS, **options)
    if config.head_dim == config.d_model / config.num_heads:
        config = replace(config, head_dim=None)
    if model_type == "mistral":
        _check_window(path, config.context_length)
    return config, model_type


def _check_window(path: Path, context_length: int) -> None:
    """Raise UserError if a Mistral attends to fewer tokens than its context has: the model attends to all."""
    content = {"sliding_window": 4096} | read_json(path)  # transformers' default; null means no window
    if content["sliding_window"] is not None and read_field(path, content, "sliding_window", None) < context_length:
        raise UserError(
            f"{path}: sliding_window {content['sliding_window']:,} is below the context of {context_length:,} tokens, "
            "and such attention is not supported; lower max_position_embeddings to the window."
        )


def _read_rope_scaling(path: Path, content: dict[str, Any]) -> RopeScaling | None:
    """Return the scaling of rotary positions, None if there is none. Raises UserError for another kind, and for a
    missing or a bad field."""
    name = "rope_type" if "rope_type" in content else "type"  # its older name
    kind = content.get(name, "default")
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        kinds = " or ".join(("default", *_ROPE_FIELDS))
        raise UserError(f"{path}: {name} {kind!r} is not supported; use a model whose {name} is {kinds}.")
    if missing := [theirs for theirs in _ROPE_FIELDS[kind] if theirs not in content]:
        raise UserError(f"{path}: {missing[0]} is missing; {name} {kind!r} needs it.")
    try:
        return RopeScaling(kind, **{ours: content[theirs] for theirs, ours in _ROPE_FIELDS[kind].items()})
    except UserError as error:
        raise UserError(f"{path}: {name} {kind!r} has an unsupported field: {error}") from None


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
        if content.get("partial_rotary_factor", 0.5) != 1:
            raise UserError(f"{path}: partial_rotary_factor must be 1; partly rotated heads are not supported.")
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


def choose_architecture(config: ModelConfig) -> str:
    """Return the ``model_type`` that expresses ``config``. Raises UserError if none has its options together."""
    check_is_expressible(config, EXPRESSIBLE_OPTIONS, "Hugging Face's Llama")
    if config.moe is not None:
        model_type = _choose_experts(config.moe, config.qk_norm)
    else:
        model_type = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    if config.qkv_bias and model_type not in ("qwen2", "glm4_moe"):
        other = "qk_norm" if config.qk_norm else "moe"
        raise UserError(
            f"model.qkv_bias cannot be exported with model.{other}: of Hugging Face's architectures, only Qwen2 and "
            "GLM-4-MoE have biases of queries, keys and values alone; train a model without one of the two options."
        )
    return model_type


def _choose_experts(moe: MoEConfig, qk_norm: bool) -> str:
    """Return the ``model_type`` that expresses a mixture of experts.

    Raises UserError with the name of the first option that the closest architecture lacks.
    """
    if moe.affinity == "sigmoid":
        model_type, label = "glm4_moe", "GLM-4-MoE"
        lacks = {"num_shared_experts": (moe.num_shared_experts == 0, "at least 1")}
    else:
        model_type, label = ("qwen3_moe", "Qwen3-MoE") if qk_norm else ("mixtral", "Mixtral")
        lacks = {
            "num_shared_experts": (moe.num_shared_experts > 0, "0"),
            "bias_update_rate": (moe.bias_update_rate > 0, "0, no bias"),
        }
        if not qk_norm:
            lacks["normalized_gates"] = (not moe.normalized_gates, "True, or with model.qk_norm any")
            lacks["num_dense_layers"] = (moe.num_dense_layers > 0, "0, or with model.qk_norm any")
    for name, (is_lacking, supported) in lacks.items():
        if is_lacking:
            raise UserError(
                f"model.moe.{name} {getattr(moe, name)!r} cannot be exported: Hugging Face's {label}, for "
                f"{moe.affinity} affinities, supports only {supported}; train such a model."
            )
    return model_type


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
        **_rope_fields(config, model_type),
    }


def _moe_fields(config: ModelConfig, moe: MoEConfig, model_type: str, experts: Experts) -> dict[str, Any]:
    values = replace(moe, d_expert=moe.expert_width(config.d_ff))
    content: dict[str, Any] = {name: getattr(values, ours) for name, ours in experts.fields.items()}
    if model_type != "glm4_moe":
        content["router_aux_loss_coef"] = moe.aux_loss_weight / _aux_loss_scale(config.num_layers, moe)
    if model_type == "qwen3_moe":
        content["mlp_only_layers"] = [*range(moe.num_dense_layers)]
    if model_type == "glm4_moe":
        content |= {"first_k_dense_replace": moe.num_dense_layers, "use_qk_norm": config.qk_norm}
        content |= {"num_nextn_predict_layers": 0, "partial_rotary_factor": 1.0, "attention_bias": config.qkv_bias}
    if model_type != "mixtral":
        content["norm_topk_prob"] = moe.normalized_gates
    return experts.fixed_fields | content


def _rope_fields(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """Return the rotary positions for transformers 5, ``rope_parameters``, and for 4, ``rope_scaling``."""
    fields: dict[str, Any] = {"rope_type": "default"}
    if scaling := config.rope_scaling:
        names = _ROPE_FIELDS[scaling.kind]
        fields = {"rope_type": scaling.kind} | {theirs: getattr(scaling, ours) for theirs, ours in names.items()}
    parameters = fields | {"rope_theta": config.rope_theta}
    if model_type == "glm4_moe":
        parameters["partial_rotary_factor"] = 1.0
    return {"rope_parameters": parameters} | ({"rope_scaling": fields} if scaling else {})
