"""Mixtures of experts in Hugging Face's files: Mixtral, Qwen3-MoE (with QK-norm) and GLM-4-MoE (sigmoid affinities).

Their files have each matrix of an expert as a tensor of its own; the model stacks them.
"""

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from lm.checkpoint.external_weights import check_fixed_fields, read_field
from lm.common.errors import UserError
from lm.model.config import ModelConfig
from lm.model.moe_config import MoEConfig

_BIAS_NAME = "e_score_correction_bias"
_USUAL_BIAS_UPDATE_RATE = 1e-3  # files do not state it


class MoEArchitecture(NamedTuple):
    """What differs from a Llama in the files of an architecture with experts."""

    label: str
    class_name: str
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
            "ffn.expert_bias": f"{self.block}.gate.{_BIAS_NAME}",
            "ffn.experts": f"{self.block}.experts",
            "ffn.shared.w1": f"{self.block}.shared_experts.gate_proj",
            "ffn.shared.w2": f"{self.block}.shared_experts.down_proj",
            "ffn.shared.w3": f"{self.block}.shared_experts.up_proj",
        }


_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
ARCHITECTURES = {
    "mixtral": MoEArchitecture(
        "Mixtral",
        "MixtralForCausalLM",
        "softmax",
        "block_sparse_moe",
        {"w1": "w1", "w2": "w2", "w3": "w3"},
        {"num_local_experts": "num_experts", "num_experts_per_tok": "top_k", "intermediate_size": "d_expert"},
        {"sliding_window": None},
    ),
    "qwen3_moe": MoEArchitecture(
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        "softmax",
        "mlp",
        _PROJECTIONS,
        {"num_experts": "num_experts", "num_experts_per_tok": "top_k", "moe_intermediate_size": "d_expert"},
        {"use_sliding_window": False, "decoder_sparse_step": 1},
    ),
    "glm4_moe": MoEArchitecture(
        "GLM-4-MoE",
        "Glm4MoeForCausalLM",
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
}
"""By ``model_type``."""


def choose_moe_architecture(config: ModelConfig) -> str:
    """Return the model type that expresses ``config``, which has experts.

    Raises UserError with the name of the first option that the closest architecture lacks.
    """
    moe = cast(MoEConfig, config.moe)
    if moe.affinity == "sigmoid":
        model_type, lacks = "glm4_moe", {"num_shared_experts": (moe.num_shared_experts == 0, "at least 1")}
    else:
        model_type = "qwen3_moe" if config.qk_norm else "mixtral"
        lacks = {
            "num_shared_experts": (moe.num_shared_experts > 0, "0"),
            "bias_update_rate": (moe.bias_update_rate > 0, "0, no bias"),
        }
        if not config.qk_norm:
            lacks["normalized_gates"] = (not moe.normalized_gates, "True, or with model.qk_norm any")
            lacks["num_dense_layers"] = (moe.num_dense_layers > 0, "0, or with model.qk_norm any")
    for name, (is_lacking, supported) in lacks.items():
        if is_lacking:
            raise UserError(
                f"model.moe.{name} {getattr(moe, name)!r} cannot be exported: Hugging Face's "
                f"{ARCHITECTURES[model_type].label}, for {moe.affinity} affinities, supports only {supported}; train "
                "such a model."
            )
    return model_type


def moe_config_fields(model_type: str, config: ModelConfig) -> dict[str, Any]:
    """Return the fields of ``config.json`` that describe the experts of ``config``."""
    architecture, moe = ARCHITECTURES[model_type], cast(MoEConfig, config.moe)
    values = replace(moe, d_expert=moe.expert_width(config.d_ff))
    content: dict[str, Any] = {name: getattr(values, ours) for name, ours in architecture.fields.items()}
    if model_type != "glm4_moe":
        content["router_aux_loss_coef"] = moe.aux_loss_weight / _aux_loss_scale(config.num_layers, moe)
    if model_type == "qwen3_moe":
        content["mlp_only_layers"] = [*range(moe.num_dense_layers)]
    if model_type == "glm4_moe":
        content |= {"first_k_dense_replace": moe.num_dense_layers, "use_qk_norm": config.qk_norm}
        content |= {"num_nextn_predict_layers": 0, "partial_rotary_factor": 1.0, "attention_bias": config.qkv_bias}
    if model_type != "mixtral":
        content["norm_topk_prob"] = moe.normalized_gates
    return architecture.fixed_fields | content


def read_moe_config(path: Path, content: dict[str, Any], model_type: str) -> MoEConfig:
    """Return the experts that a ``config.json`` describes. Raises UserError for an unsupported or a bad field."""
    architecture = ARCHITECTURES[model_type]
    check_fixed_fields(path, content, architecture.fixed_fields)
    names = {ours: name for name, ours in architecture.fields.items()}
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
        options |= {"aux_loss_weight": 0.0, "bias_update_rate": _USUAL_BIAS_UPDATE_RATE}
        if content.get("partial_rotary_factor", 0.5) != 1:
            raise UserError(f"{path}: partial_rotary_factor must be 1; partly rotated heads are not supported.")
    else:
        options["aux_loss_weight"] = read_field(path, content, "router_aux_loss_coef", 0.001)
    try:
        moe = MoEConfig(affinity=architecture.affinity, **options)
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


def split_experts(weights: dict[str, Tensor], model_type: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return ``weights``, named as in the files except for stacks of experts, with a tensor for each expert's matrix.

    Contiguous copies: safetensors stores no views. Sigmoid affinities get a bias of zeros if the model has none.
    """
    architecture, moe = ARCHITECTURES[model_type], cast(MoEConfig, config.moe)
    split: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        prefix, _, matrix = name.rpartition(".experts.")
        if prefix:
            for expert, part in enumerate(tensor):
                split[f"{prefix}.experts.{expert}.{architecture.matrix_names[matrix]}.weight"] = part.clone()
        else:
            split[name] = tensor
        if architecture.affinity == "sigmoid" and name.endswith(f"{architecture.block}.gate.weight"):
            split.setdefault(f"{name.removesuffix('weight')}{_BIAS_NAME}", torch.zeros(moe.num_experts))
    return split


def join_experts(weights: dict[str, Tensor], model_type: str, directory: Path) -> dict[str, Tensor]:
    """Stack the matrices of experts: the reverse of :func:`split_experts`. Raises UserError if one is missing."""
    ours_of = {theirs: ours for ours, theirs in ARCHITECTURES[model_type].matrix_names.items()}
    pattern = re.compile(rf"(.*\.experts)\.([0-9]{{1,6}})\.({'|'.join(ours_of)})\.weight")
    stacks: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
    joined: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if match := pattern.fullmatch(name):
            stacks[f"{match[1]}.{ours_of[match[3]]}"][int(match[2])] = tensor
        else:
            joined[name] = tensor
    for name, parts in stacks.items():
        shapes = {part.shape for part in parts.values()}
        if sorted(parts) != [*range(len(parts))] or len(shapes) > 1:
            raise UserError(f"{directory}: the experts of {name} are not complete, or their shapes differ.")
        joined[name] = torch.stack([parts[expert] for expert in range(len(parts))])
    return joined
