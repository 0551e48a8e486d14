"""Number of parameters and FLOPs of a model."""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM

_PART_OF_ROLE = {
    "embedding": "embedding",
    "query_key": "attention",
    "value_output": "attention",
    "feed_forward": "feed_forward",
    "router": "router",
    "norm": "norms",
    "bias": "biases",
    "head": "head",
}


def parameter_count(config: ModelConfig) -> dict[str, int]:
    """Return the number of parameters by part (embedding, attention, feed_forward, norms, head) and in ``total``.

    With tied embeddings the head has 0. A model with ``qkv_bias`` also has ``biases``. A mixture of experts also has a
    ``router``, and in ``active`` the total without the experts that do not compute a token. Raises UserError if the
    vocabulary size is not set.
    """
    parts = dict(_count_by_part(config))
    total = sum(parts.values())
    if not config.qkv_bias:
        del parts["biases"]
    if config.moe is None:
        del parts["router"]
        return {**parts, "total": total}
    return {**parts, "total": total, "active": total - _inactive_parameters(config)}


def flops_per_token(config: ModelConfig, training: bool = True) -> int:
    """Return the floating-point operations per token of a full context, matmuls only.

    The forward pass costs 2 per matrix parameter, of a mixture of experts per active one. The embedding is a look-up
    and costs nothing; the head costs its matmul, tied or not. Attention adds 2 · heads · width · context in each layer
    for the scores and their weighted sum, without the masked half and what a sliding window leaves out. Training costs
    three times as much: the backward pass has one matmul for weights and one for inputs. Raises UserError if the
    vocabulary size is not set.
    Sources: Kaplan et al. 2020; CS336 assignment 1, section 3.6, which counts the masked half too.
    """
    parts = _count_by_part(config)
    head = parts["embedding" if config.tied_embeddings else "head"]
    matrices = parts["attention"] + parts["feed_forward"] + parts["router"] + head - _inactive_parameters(config)
    heads = config.num_heads * config.resolved_head_dim
    context = config.context_length
    windows = [config.window(layer) or context for layer in range(config.num_layers)]
    keys = sum(2 * window - window**2 // context for window in windows)  # twice their mean number
    forward = 2 * matrices + 2 * heads * keys
    return (3 if training else 1) * forward


@lru_cache
def _count_by_part(config: ModelConfig) -> Mapping[str, int]:
    model = TransformerLM(config, device="meta")  # shapes without memory
    roles, counts = model.parameter_roles(), Counter(dict.fromkeys(_PART_OF_ROLE.values(), 0))
    for name, parameter in model.named_parameters():
        counts[_PART_OF_ROLE[roles[name]]] += parameter.numel()
    return counts


def _inactive_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the experts that do not compute a token."""
    if config.moe is None:
        return 0
    expert = config.feed_forward_matrices * config.d_model * config.moe.expert_width(config.d_ff)
    return (config.num_layers - config.moe.num_dense_layers) * (config.moe.num_experts - config.moe.top_k) * expert
