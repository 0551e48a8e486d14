"""Bytes of the activations of a block, and the shapes of its matrices, for predictions of memory."""

from lm.model.config import ModelConfig
from lm.model.ops.windowed_attention import AttentionRule, count_scores


def hidden_matrices(config: ModelConfig, layer: int) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices of the block of index ``layer``."""
    d, q, kv = config.d_model, config.num_heads * config.resolved_head_dim, config.kv_heads * config.resolved_head_dim
    shapes: list[tuple[int, ...]] = [(q, d), (d, q), (kv, d), (kv, d)]
    dense_width, inputs = config.d_ff, config.feed_forward_matrices - 1
    if config.moe and config.is_moe_layer(layer):
        width, experts = config.moe.expert_width(config.d_ff), config.moe.num_experts
        dense_width = config.moe.num_shared_experts * width
        shapes += [(experts, d, width), *[(experts, width, d)] * inputs]
    return [*shapes, (d, dense_width), *[(dense_width, d)] * inputs]


def block_bytes_per_token(config: ModelConfig, layer: int, is_bfloat16: bool) -> int:
    """Return the bytes that the block of index ``layer`` saves for its backward pass, per token."""
    d, q, kv = config.d_model, config.num_heads * config.resolved_head_dim, config.kv_heads * config.resolved_head_dim
    element, inputs = 2 if is_bfloat16 else 4, config.feed_forward_matrices - 1
    heads = q + 2 * kv  # queries, keys, values
    dense_width, routing, routed = config.d_ff, 0, 0
    if config.moe and config.is_moe_layer(layer):
        width = config.moe.expert_width(config.d_ff)
        dense_width = config.moe.num_shared_experts * width
        routed = config.moe.top_k * width * inputs
        # Affinities; of each choice its expert, token, place and order, and gates before and after they are sorted.
        routing = 4 * config.moe.num_experts + (4 * 8 + 3 * 4) * config.moe.top_k
        if is_bfloat16:
            routing += 4 * d  # the router's input
    inner = config.feed_forward_matrices * dense_width + routed
    normalized = (q + kv) if config.qk_norm else 0
    if is_bfloat16:
        # Autocast copies the input of each matrix; experts share a copy.
        copies = 3 + inputs * (dense_width > 0) + (routed > 0)
        residual = {"none": 0, "sandwich": 12}.get(config.norm_placement, 8) * d
        return residual + element * (copies * d + q + heads + normalized + inner) + routing
    residual_inputs = {"none": 2, "sandwich": 6}.get(config.norm_placement, 4) * d
    return element * (residual_inputs + heads + q + normalized + inner) + routing


def score_bytes(config: ModelConfig, layer: int, sequences: int, is_bfloat16: bool) -> int:
    """Return the bytes that attention with a window or a soft-cap saves in the block of index ``layer``: a mask and its
    form in float32, and with a soft-cap the capped scores and the weights."""
    rule = AttentionRule(config.window(layer), config.attention_softcap)
    scores = count_scores(config.context_length, rule)
    if not rule.softcap:
        return 5 * scores
    return scores * (1 + sequences * config.num_heads * (10 if is_bfloat16 else 8))


def gradient_bytes_per_token(config: ModelConfig, layer: int, element: int) -> int:
    """Return the bytes of gradients of activations in the backward pass of the feed-forward network, per token."""
    d = config.d_model
    if config.moe and config.is_moe_layer(layer):
        # Of the experts' inputs, and the tensors of the expert that computes, which all tokens may have chosen.
        expert = 3 * d + (2 * config.feed_forward_matrices - 1) * config.moe.expert_width(config.d_ff)
        return element * (config.moe.top_k * d + expert) + 4 * 2 * d
    return element * 3 * config.d_ff + 4 * 2 * d
