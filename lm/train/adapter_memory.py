"""Memory of a training that learns an adapter, predicted from its configuration.

As in :mod:`lm.train.training_memory`, tensors count, uncompiled. Sources: Hu et al. 2021; Dettmers et al. 2023 (QLoRA).
"""

import math
from typing import NamedTuple

from lm.common.execution import Execution, ParallelKind
from lm.distributed.sharding import gradient_bucket_bytes
from lm.model.config import AdapterConfig, ModelConfig
from lm.model.flops import parameter_count
from lm.model.ops.cross_entropy import logit_chunk_bytes
from lm.train.block_memory import block_bytes_per_token, gradient_bytes_per_token, hidden_matrices, score_bytes
from lm.train.config import TrainConfig

_NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # of a number: its index, and its parts of the scales


class AdapterMemory(NamedTuple):
    """Bytes of a process."""

    base: int
    """The frozen weights, between steps."""
    adapter: int
    """Weights of the adapter, between steps. Its gradients need as much."""
    optimizer_state: int
    activations: int
    """Saved for the backward pass, at the end of the forward pass."""
    peak: int
    """The most that lives at one time in a step."""


def predict_adapter_memory(
    sequences: int,
    execution: Execution,
    config: TrainConfig,
    model_config: ModelConfig,
    adapter: AdapterConfig,
    kind: ParallelKind,
    world_size: int,
    device_type: str,
) -> AdapterMemory:
    """Predict the memory of a process that trains ``adapter`` with micro-batches of ``sequences`` full contexts.

    ``kind`` is what ``world_size`` processes shard; matrices in 4 bits are whole in each of them. Raises UserError if
    the vocabulary size is not set.
    """
    layers, tokens = range(model_config.num_layers), sequences * model_config.context_length
    linear = [_linear_layers(model_config, layer) for layer in layers]
    numbers = [sum(o * i for o, i in shapes.values()) for shapes in linear]
    total = parameter_count(model_config)["total"]
    has_autocast, is_narrow = config.precision == "bfloat16", adapter.dtype == "bfloat16"
    is_nf4, base_element = adapter.dtype == "nf4", 2 if is_narrow else 4
    packed = int(_NF4_BYTES * sum(numbers)) if is_nf4 else 0
    divisible = base_element * (total - (sum(numbers) if is_nf4 else 0))
    trained = [shape for shapes in linear for name, shape in shapes.items() if _is_target(adapter, name)]
    weights = 4 * adapter.rank * sum(o + i for o, i in trained)
    state = weights * (1 if config.optimizer in ("muon", "normuon") else 2)
    if config.average_steps:
        state += weights * (world_size if kind == "zero1" else 1)  # with zero1 each process has all of the average
    # Autocast makes a copy of each float32 matrix, which the backward pass needs; of those in 4 bits none stays.
    copies = [2 * number if has_autocast and adapter.dtype == "float32" else 0 for number in numbers]
    blocks = [
        tokens * _block_bytes_per_token(model_config, layer, adapter, linear[layer], has_autocast)
        + score_bytes(model_config, layer, sequences, has_autocast)
        + copies[layer]
        for layer in layers
    ]
    element, residual = 2 if has_autocast or is_narrow else 4, 2 if is_narrow else 4
    width, vocab_size = model_config.d_model, model_config.vocab_size or 1
    has_checkpointing = execution.activation_checkpointing
    stored = len(layers) * tokens * residual * width if has_checkpointing else sum(blocks)
    activations = stored + tokens * (residual + element) * width  # with the input of the loss, and the gradient of it
    logits = logit_chunk_bytes(device_type, tokens, vocab_size)
    if element == 2:
        logits += logits // 2 + (2 * vocab_size * width if residual == 4 else 0)  # the gradient; a copy of the head
    # The memory of a layer's numbers is kept for the next product.
    dequantized = element * max(o * i for shapes in linear for o, i in shapes.values()) if is_nf4 else 0
    recomputed = blocks[-1] if has_checkpointing else 0
    gradients = tokens * gradient_bytes_per_token(model_config, len(layers) - 1, element)
    experts = [
        sum(math.prod(shape) for shape in hidden_matrices(model_config, layer) if len(shape) == 3) for layer in layers
    ]
    gradients += 4 * experts[-1]  # computed, though they are frozen
    divisible_by_block = [n if is_nf4 else n + m for n, m in zip(experts, numbers, strict=True)]
    share = world_size if kind in ("zero2", "fsdp") else 1
    state_share = 1 if kind in ("none", "ddp") else world_size
    base, local_weights, local_state = packed + divisible // share, weights // share, state // state_share
    head, block = base_element * vocab_size * width, base_element * max(divisible_by_block)
    added = _added_bytes(kind, divisible, weights, local_weights, head, block, weights // len(layers))
    held = base + local_weights + local_state + dequantized
    peak = held + max(
        added.at_loss + activations + max(logits, added.head_buffers),
        added.at_last_block + stored + recomputed + gradients,
        added.at_first_block + stored // len(layers) + recomputed + gradients,
        added.at_update,
    )
    return AdapterMemory(base, local_weights, local_state, activations, peak)


class _Added(NamedTuple):
    """Bytes of gradients, gathered weights and communication buffers at moments of a step."""

    at_loss: int
    head_buffers: int
    """In which the head arrives, while there are no logits."""
    at_last_block: int
    """While the backward pass of the last block runs. It runs first."""
    at_first_block: int
    at_update: int


def _added_bytes(
    kind: ParallelKind, divisible: int, weights: int, local_weights: int, head: int, block: int, learned: int
) -> _Added:
    """``divisible``: bytes of the base that processes may divide; ``weights``: those of the adapter; ``block`` and
    ``learned``: those of both in a block."""
    if kind == "none":
        return _Added(0, 0, 0, weights, weights)
    if kind in ("ddp", "zero1"):  # buckets hold the gradients
        sent = weights + min(weights, gradient_bucket_bytes(weights))
        return _Added(weights, 0, sent, sent, weights if kind == "ddp" else 3 * weights)  # gloo has a copy of a buffer
    sent = 3 * learned  # gradients, those of the unit before in the buffer that is sent, and gloo's copy
    if kind == "zero2":
        last = divisible - head + weights + sent  # the head has no more to do
        first = local_weights + head + block + learned + sent  # the embedding has the size of the head
        return _Added(divisible + weights, head, last, first, local_weights)
    gathered = 2 * (block + learned) + sent
    return _Added(head, head, gathered, local_weights + gathered, local_weights)


def _is_target(adapter: AdapterConfig, name: str) -> bool:
    return not adapter.targets or name in adapter.targets


def _linear_layers(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return the shapes (out_features, in_features) of the linear layers of the block of index ``layer``, by name."""
    d, q, kv = config.d_model, config.num_heads * config.resolved_head_dim, config.kv_heads * config.resolved_head_dim
    inner = config.d_ff
    if config.moe and config.is_moe_layer(layer):
        inner = config.moe.num_shared_experts * config.moe.expert_width(config.d_ff)
    shapes = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "output_proj": (d, q)}
    if inner:
        shapes |= {"w1": (inner, d), "w2": (d, inner)}
    return {**shapes, "w3": (inner, d)} if inner and config.feed_forward_matrices == 3 else shapes


def _block_bytes_per_token(
    config: ModelConfig, layer: int, adapter: AdapterConfig, linear: dict[str, tuple[int, int]], has_autocast: bool
) -> int:
    """Return the bytes that a block saves for its backward pass, per token: those of a training of all weights, but the
    inputs of layers only where there is an adapter."""
    is_narrow = adapter.dtype == "bfloat16"
    has_copies = has_autocast or is_narrow  # of the input of each matrix; in float32 those of the same input share it
    trained = {name: shape for name, shape in linear.items() if _is_target(adapter, name)}
    saved = block_bytes_per_token(config, layer, has_copies)
    saved += (2 if has_autocast else 4) * adapter.rank * len(trained)
    if has_copies:
        saved -= sum(2 * i for name, (_, i) in linear.items() if name not in trained and name != "output_proj")
        saved += 2 * trained["output_proj"][1] if "output_proj" in trained else 0
    else:
        for names in (("q_proj", "k_proj", "v_proj"), ("w1", "w3"), ("w2",)):
            is_saved = trained.keys() & set(names) and not adapter.dropout
            saved -= 4 * linear[names[0]][1] if names[0] in linear and not is_saved else 0
    inputs = sum(i for _, i in trained.values())
    if is_narrow:
        saved -= 4 * config.d_model  # the residual stream
        saved += 0 if has_autocast else 2 * inputs  # float32 copies for the adapter
    if adapter.dropout:
        saved += 4 * inputs if has_copies else 8 * inputs  # what drops, and in float32 what is left
    return saved
