"""The architectures of Hugging Face's files: what differs from a Llama, and which of them expresses a model."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from lm.common.errors import UserError
from lm.model.config import ModelConfig, MoEConfig

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
    shared: str = "shared_experts"
    """Name of the module of the shared experts."""

    @property
    def module_names(self) -> dict[str, str]:
        """Names of modules and buffers, ours → theirs."""
        return {
            "ffn.router": f"{self.block}.gate",
            "ffn.expert_bias": f"{self.block}.gate.{BIAS_NAME}",
            "ffn.experts": f"{self.block}.experts",
            "ffn.shared_gate": f"{self.block}.{self.shared}_gate",
            "ffn.shared.w1": f"{self.block}.{self.shared}.gate_proj",
            "ffn.shared.w2": f"{self.block}.{self.shared}.down_proj",
            "ffn.shared.w3": f"{self.block}.{self.shared}.up_proj",
        }


@dataclass(frozen=True)
class Architecture:
    """What differs from a Llama in the files of an architecture."""

    class_name: str
    fixed_fields: dict[str, Any] = field(default_factory=dict)
    """Fields of which only this value is supported. Qwen2 has no such field for its biases."""
    defaults: dict[str, float] = field(default_factory=dict)
    """Of transformers, where they differ from those of the table of fields."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the model that all models of the architecture have."""
    stated: frozenset[str] = frozenset()
    """Further options that its files state."""
    names: dict[str, str] = field(default_factory=dict)
    """Names of modules, ours → theirs."""
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules that hold the rows of several, theirs → the names of these in a Llama's files."""
    experts: Experts | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Fields that are only written: transformers' default does not fit all models."""
    global_interval: int | None = None
    """Of Gemmas: transformers' default of the interval of global blocks."""
    rope_kinds: tuple[str, ...] = ("linear", "llama3", "yarn", "longrope")
    """Kinds of scaled rotary positions that its files can have."""

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"Hugging Face's {self.class_name.removesuffix('ForCausalLM')}"

    @property
    def module_names(self) -> dict[str, str]:
        """Names of modules, ours → theirs; the first match counts."""
        return self.names | (self.experts.module_names if self.experts else {}) | _MODULE_NAMES | self.names


_MODULE_NAMES = {  # of a Llama, ours → Hugging Face's
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
_NO_PADDING = {"pad_token_id": None}
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_QWEN_EXPERTS = Experts(
    "softmax",
    "mlp",
    _PROJECTIONS,
    {"num_experts": "num_experts", "num_experts_per_tok": "top_k", "moe_intermediate_size": "d_expert"},
    {"use_sliding_window": False, "decoder_sparse_step": 1},
)
_GELU = "gelu_pytorch_tanh"
_GEMMA_FIELDS = {"hidden_act": _GELU, "hidden_activation": _GELU, "use_bidirectional_attention": False}
_GEMMA_DEFAULTS: dict[str, float] = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
_GEMMA_DEFAULTS |= {"tie_word_embeddings": True, "query_pre_attn_scalar": 256}
_GEMMA_OPTIONS = {"norm_placement": "sandwich", "feed_forward": "geglu", "zero_centered_norm": True}
_GEMMA_NAMES = {
    "ln1_out": "post_attention_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "ln2_out": "post_feedforward_layernorm",
}
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", {"mlp_bias": False}),
    "mistral": Architecture(
        "MistralForCausalLM",
        {},
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        stated=frozenset(["sliding_window"]),
    ),
    "qwen2": Architecture(
        "Qwen2ForCausalLM",
        {"use_sliding_window": False},
        {"num_key_value_heads": 32, "max_position_embeddings": 32768},
        {"qkv_bias": True},
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        {"use_sliding_window": False},
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
        {"qk_norm": True},
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM",
        {"mlp_bias": False, "use_sliding_window": False},
        {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True},
        stated=frozenset(["global_interval", "global_rope"]),
        extra_fields=_NO_PADDING,
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        {},
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        stated=frozenset(["rotary_fraction", "sliding_window"]),
        fused={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        },
        extra_fields=_NO_PADDING,
        rope_kinds=("longrope",),
    ),
    "granite": Architecture(
        "GraniteForCausalLM", {"mlp_bias": False}, stated=frozenset(["multipliers"]), extra_fields=_NO_PADDING
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        {},
        {"rms_norm_eps": 1e-5},
        {"norm_placement": "output", "qk_norm": True, "qk_norm_per_head": False},
        names={"ln1": "post_attention_layernorm", "ln2": "post_feedforward_layernorm"},
        extra_fields=_NO_PADDING,
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        _GEMMA_FIELDS,
        _GEMMA_DEFAULTS
        | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _GEMMA_OPTIONS,
        frozenset(["multipliers", "sliding_window", "global_interval", "attention_softcap", "logit_softcap"]),
        _GEMMA_NAMES,
        extra_fields=_NO_PADDING,
        global_interval=2,
    ),
    "gemma3_text": Architecture(
        "Gemma3ForCausalLM",
        _GEMMA_FIELDS | {"attn_logit_softcapping": None},
        _GEMMA_DEFAULTS | {"max_position_embeddings": 131072, "rope_theta": 1e6},
        _GEMMA_OPTIONS | {"qk_norm": True},
        frozenset(["multipliers", "sliding_window", "global_interval", "local_rope_theta", "logit_softcap"]),
        _GEMMA_NAMES,
        extra_fields=_NO_PADDING,
        global_interval=6,
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        {},
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        experts=Experts(
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
        {"qk_norm": True},
        experts=_QWEN_EXPERTS,
    ),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        {},
        {"num_key_value_heads": 16, "max_position_embeddings": 32768},
        {"qkv_bias": True},
        experts=_QWEN_EXPERTS._replace(shared="shared_expert"),
    ),
    "glm4_moe": Architecture(
        "Glm4MoeForCausalLM",
        {},
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        stated=frozenset(["qk_norm", "qkv_bias", "rotary_fraction"]),
        experts=Experts(
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
"""By ``model_type``. Of those that express a model, the first is written."""

_COMMON_OPTIONS = {
    *("d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff", "vocab_size", "context_length"),
    *("norm_eps", "rope_theta", "rope_scaling", "tied_embeddings"),
    "zero_init_residual",  # decides the initial weights only
}


def choose_architecture(config: ModelConfig) -> str:
    """Return the ``model_type`` that expresses ``config``. Raises UserError if none has its options together."""
    if config.moe is not None:
        candidates = [_choose_experts(config.moe, config)]
    else:
        candidates = [name for name, architecture in ARCHITECTURES.items() if architecture.experts is None]
    lacking = {name: _lacking_options(config, ARCHITECTURES[name]) for name in candidates}
    closest = min(candidates, key=lambda name: len(lacking[name]))
    if not lacking[closest]:
        return closest
    if config.qkv_bias and (config.qk_norm or config.moe):
        other = "qk_norm" if config.qk_norm else "moe"
        raise UserError(
            f"model.qkv_bias cannot be exported with model.{other}: of Hugging Face's architectures, only Qwen2 and "
            "GLM-4-MoE have biases of queries, keys and values alone; train a model without one of the two options."
        )
    option, supported = next(iter(lacking[closest].items()))
    raise UserError(
        f"model.{option} {getattr(config, option)!r} cannot be exported: {ARCHITECTURES[closest].label} supports only "
        f"{supported}; train a model with that."
    )


def _lacking_options(config: ModelConfig, architecture: Architecture) -> dict[str, str]:
    """Return the options of ``config`` that ``architecture`` cannot express, and what it supports in their place."""
    defaults = type(config)()
    lacking = {}
    for option in (option.name for option in fields(config)):
        if option in _COMMON_OPTIONS | architecture.stated | {"moe"}:
            continue
        supported = architecture.options.get(option, getattr(defaults, option))
        if getattr(config, option) != supported:
            lacking[option] = repr(supported)
    if config.rope_scaling and config.rope_scaling.kind not in architecture.rope_kinds:
        lacking["rope_scaling"] = f"the kind {' or '.join(architecture.rope_kinds)}"
    if architecture.global_interval:
        lacking |= _lacking_of_gemma(config)
    return lacking


def _lacking_of_gemma(config: ModelConfig) -> dict[str, str]:
    """Return the options of ``config`` that Gemma's files do not state, because they are the same in all models."""
    factors, lacking = config.factors, {}
    if (factors.embedding, factors.residual, factors.logits_divisor) != (config.d_model**0.5, 1, 1):
        lacking["multipliers"] = f"embedding {config.d_model**0.5}, and 1 as residual and logits_divisor"
    elif factors.attention is None or factors.attention != round(factors.attention**-2) ** -0.5:
        lacking["multipliers"] = "an attention of 1 / sqrt(a whole number)"
    if config.sliding_window is None:
        lacking["sliding_window"] = "a number of tokens"
    if config.rope_scaling and config.qk_norm and config.local_rope_theta is None:  # Gemma 3 scales global blocks alone
        lacking["local_rope_theta"] = "a number, with model.rope_scaling"
    return lacking


def _choose_experts(moe: MoEConfig, config: ModelConfig) -> str:
    """Return the ``model_type`` that expresses a mixture of experts.

    Raises UserError with the name of the first option that the closest architecture lacks.
    """
    qk_norm = config.qk_norm
    if moe.affinity == "sigmoid":
        model_type, label = "glm4_moe", "GLM-4-MoE"
        lacks = {
            "num_shared_experts": (moe.num_shared_experts == 0, "at least 1"),
            "shared_gate": (moe.shared_gate, "False"),
        }
    elif moe.shared_gate:
        model_type, label = "qwen2_moe", "Qwen2-MoE"
        lacks = {"bias_update_rate": (moe.bias_update_rate > 0, "0, no bias")}
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
