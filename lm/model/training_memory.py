"""Memory that a training needs, predicted from its configuration. Source: CS336 assignment 1 (section 4.3) counts
parameters, gradients, optimizer state and activations.

Counts tensors, uncompiled: an allocator's fragments and libraries' workspaces come on top. torch.compile fuses
operations and stores less.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lm.common.execution import ParallelKind
from lm.model.config import ModelConfig
from lm.model.flops import parameter_count
from lm.model.ops.cross_entropy import logit_chunk_bytes

MAX_BUCKET_BYTES = 25 << 20  # of a bucket, the tensors that ranks send together, see lm.distributed
_MIN_BUCKET_BYTES = 1 << 20
_MIN_BUCKETS = 4  # so that most gradients are sent during the backward pass, also those of a small model


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a process."""

    weights: int
    """Between steps."""
    gradients: int
    """Between the backward pass and the optimizer."""
    optimizer_state: int
    activations: int
    """Saved for the backward pass, at the end of the forward pass."""
    peak: int
    """The most that lives at one time in a step. Not the sum: gradients arise while activations are freed."""


def predict_training_memory(
    config: ModelConfig,
    sequences: int,
    optimizer: Literal["adamw", "muon"] = "adamw",
    is_bfloat16: bool = False,
    has_checkpointing: bool = False,
    gradient_accumulation_steps: int = 1,
    parallel: ParallelKind = "none",
    world_size: int = 1,
    device_type: str = "cpu",
) -> TrainingMemory:
    """Predict the memory of a process that trains with micro-batches of ``sequences`` full contexts.

    Weights, gradients and state are float32: AdamW has two moments, Muon one. ``is_bfloat16``: matmuls run in
    bfloat16 under autocast, which keeps a copy of the matrices. ``parallel`` is what ``world_size`` processes shard.
    Raises UserError if the vocabulary size is not set.
    """
    counts = parameter_count(config)
    hidden = counts["attention"] + counts["feed_forward"]
    weights = 4 * counts["total"]
    state = 2 * weights - (4 * hidden if optimizer == "muon" else 0)
    element = 2 if is_bfloat16 else 4
    tokens = sequences * config.context_length
    blocks = [tokens * _block_bytes_per_token(config, layer, is_bfloat16) for layer in range(config.num_layers)]
    all_stored = config.num_layers * tokens * 4 * config.d_model if has_checkpointing else sum(blocks)
    copies = 2 * hidden if is_bfloat16 else 0
    head = 4 * (config.vocab_size or 0) * config.d_model  # a gradient of the head
    loss_input = tokens * (element + 4) * config.d_model  # and the gradient of it
    activations = all_stored + loss_input + copies + head
    logits = min(logit_chunk_bytes(device_type), 4 * tokens * (config.vocab_size or 0))
    if is_bfloat16:
        logits += logits + head // 2  # the chunk and its gradient in bfloat16, and a copy of the head
    # The gradients of a block's activations need most memory in its feed-forward network.
    first_gradients, last_gradients = (
        tokens * _gradient_bytes_per_token(config, layer, element) for layer in (0, config.num_layers - 1)
    )
    recomputed = blocks[-1] if has_checkpointing else 0
    last_copies = copies // config.num_layers if has_checkpointing else copies
    by_block = [_hidden_matrices(config, layer) for layer in range(config.num_layers)]
    sizes = [sum(math.prod(shape) for shape in shapes) for shapes in by_block]
    largest_block = hidden * max(sizes) // sum(sizes)
    matrices = Counter(shape for shapes in by_block for shape in shapes)
    bucket = max(MAX_BUCKET_BYTES, head, *(4 * math.prod(shape) for shape in matrices))
    held = _held_bytes(parallel, world_size, weights, state, 4 * largest_block, head, bucket)
    earlier = weights if gradient_accumulation_steps > 1 and parallel not in ("ddp", "zero1") else 0
    share = world_size if parallel in ("zero2", "fsdp") else 1
    state_share = 1 if parallel in ("none", "ddp") else world_size
    # Muon updates all matrices of a shape together: a float32 copy, two in the dtype of the matmuls and some smaller
    # matmuls; at the end the float32 result.
    largest_shape = max(number * math.prod(shape) for shape, number in matrices.items())
    update = (4 + 3 * element) * largest_shape // state_share if optimizer == "muon" else 0
    if device_type == "cuda":
        update = max(update, weights // state_share)  # AdamW's denominators
    peak = max(
        held.at_update + update,
        held.at_loss + activations + head + logits + earlier,
        held.at_last_block + all_stored + recomputed + last_gradients + last_copies + head + earlier,
        held.at_first_block + blocks[0] + first_gradients + copies // config.num_layers + earlier,
    )
    return TrainingMemory(weights // share, weights // share, state // state_share, activations, peak)


def gradient_bucket_bytes(total_bytes: int) -> int:
    """Return the size of a full bucket, for gradients of ``total_bytes`` in total."""
    return min(MAX_BUCKET_BYTES, max(_MIN_BUCKET_BYTES, total_bytes // _MIN_BUCKETS))


def largest_micro_batch(available_bytes: int, predict: Callable[[int], TrainingMemory]) -> int:
    """Return the most sequences per micro-batch whose predicted peak is at most ``available_bytes``; 0 if none fits.

    ``predict`` returns the memory for a number of sequences, as :func:`predict_training_memory` does. Its peak must not
    fall as the number rises.
    """
    end = 1
    while predict(end).peak <= available_bytes:
        end *= 2
    return bisect_right(range(1, end), available_bytes, key=lambda sequences: predict(sequences).peak)


class _Held(NamedTuple):
    """Bytes of weights, gradients, state and communication buffers at four moments of a step."""

    at_loss: int
    at_last_block: int
    """While the backward pass of the last block runs. It runs first."""
    at_first_block: int
    at_update: int


def _held_bytes(
    parallel: ParallelKind, world_size: int, weights: int, state: int, block: int, head: int, bucket: int
) -> _Held:
    """``bucket``: bytes of weights that ShardedOptimizer gathers together, at least those of one tensor."""
    if parallel == "none":
        return _Held(weights + state, weights + state, 2 * weights + state, 2 * weights + state)
    if parallel in ("ddp", "zero1"):
        base = 2 * weights + (state if parallel == "ddp" else state // world_size)  # buckets hold the gradients
        gathered = 0 if parallel == "ddp" else 2 * min(weights, 2 * bucket)  # gloo has a copy of a buffer
        # The gradients of the bucket that is not sent yet, see lm.distributed.ddp.
        unsent = min(weights, gradient_bucket_bytes(weights))
        return _Held(base, base, base + unsent, base + gathered)
    base = (weights + state) // world_size
    # A block's gradients, and those of the unit before in the buffer that is sent.
    sent = block + head + head // world_size
    gradients = weights // world_size
    if parallel == "zero2":
        return _Held(base + weights, base + weights + sent, base + gradients + 3 * block + head, base + gradients)
    return _Held(base + head, base + 2 * block + sent, base + gradients + 4 * block + head, base + gradients)


def _hidden_matrices(config: ModelConfig, layer: int) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices of the block of index ``layer``."""
    d, q, kv = config.d_model, config.num_heads * config.resolved_head_dim, config.kv_heads * config.resolved_head_dim
    shapes: list[tuple[int, ...]] = [(q, d), (d, q), (kv, d), (kv, d)]
    dense_width, inputs = config.d_ff, config.feed_forward_matrices - 1
    if config.moe and config.is_moe_layer(layer):
        width, experts = config.moe.expert_width(config.d_ff), config.moe.num_experts
        dense_width = config.moe.num_shared_experts * width
        shapes += [(experts, d, width), *[(experts, width, d)] * inputs]
    return [*shapes, (d, dense_width), *[(dense_width, d)] * inputs]


def _block_bytes_per_token(config: ModelConfig, layer: int, is_bfloat16: bool) -> int:
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
        residual = 8 * d if config.norm_placement != "none" else 0
        return residual + element * (copies * d + q + heads + normalized + inner) + routing
    residual_inputs = (4 if config.norm_placement != "none" else 2) * d
    return element * (residual_inputs + heads + q + normalized + inner) + routing


def _gradient_bytes_per_token(config: ModelConfig, layer: int, element: int) -> int:
    """Return the bytes of gradients of activations in the backward pass of the feed-forward network, per token."""
    d = config.d_model
    if config.moe and config.is_moe_layer(layer):
        # Of the experts' inputs, and the tensors of the expert that computes, which all tokens may have chosen.
        expert = 3 * d + (2 * config.feed_forward_matrices - 1) * config.moe.expert_width(config.d_ff)
        return element * (config.moe.top_k * d + expert) + 4 * 2 * d
    return element * 3 * config.d_ff + 4 * 2 * d
