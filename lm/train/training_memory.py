"""Memory that a training needs, predicted from its configuration: the choice of what processes shard, and a check that
it fits. Source: CS336 assignment 1 (section 4.3) counts parameters, gradients, optimizer state and activations.

Counts tensors, uncompiled: an allocator's fragments and libraries' workspaces come on top. torch.compile fuses
operations and stores less.
"""

import logging
import math
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from lm.common.errors import UserError
from lm.common.execution import Execution, ParallelKind
from lm.distributed.process_group import (
    all_gather,
    broadcast_from_rank0,
    check_world_size,
    get_local_world_size,
    get_rank,
    get_world_size,
)
from lm.distributed.sharding import MAX_BUCKET_BYTES, gradient_bucket_bytes
from lm.hardware.device import has_bfloat16
from lm.hardware.memory import machine_memory
from lm.model.config import AdapterConfig, ModelConfig
from lm.model.flops import parameter_count
from lm.model.ops.cross_entropy import logit_chunk_bytes
from lm.train.adapter_memory import predict_adapter_memory
from lm.train.block_memory import block_bytes_per_token, gradient_bytes_per_token, hidden_matrices, score_bytes
from lm.train.config import TrainConfig

log = logging.getLogger(__name__)

_KINDS: tuple[ParallelKind, ...] = ("ddp", "zero1", "zero2", "fsdp")
_NO_ADAPTER = AdapterConfig()


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
    sequences: int,
    execution: Execution,
    config: TrainConfig,
    model_config: ModelConfig,
    kind: ParallelKind,
    world_size: int,
    device_type: str,
) -> TrainingMemory:
    """Predict the memory of a process that trains with micro-batches of ``sequences`` full contexts.

    Weights, gradients, state and averages are float32: AdamW has two moments, Muon one. Matmuls in bfloat16 run under
    autocast, which keeps a copy of the matrices unless they are gathered in bfloat16. ``kind`` is what ``world_size``
    processes shard; with tensor parallelism, which divides the model before, these are the parts of the batch. Raises
    UserError if the vocabulary size is not set, or if tensor parallelism cannot divide the model.
    """
    whole_config = model_config
    if execution.tensor_parallel > 1:
        from lm.distributed.tensor_parallel import config_of_rank  # slow to import

        model_config = config_of_rank(model_config, execution.tensor_parallel)
    is_bfloat16, has_checkpointing = config.precision == "bfloat16", execution.activation_checkpointing
    counts = parameter_count(model_config)
    hidden = counts["attention"] + counts["feed_forward"]
    weights = 4 * counts["total"]
    state = 2 * weights - (4 * hidden if config.optimizer in ("muon", "normuon") else 0)
    layers = range(model_config.num_layers)
    by_block = [hidden_matrices(model_config, layer) for layer in layers]
    if config.optimizer == "soap_muon":  # and two square matrices of each
        state += sum(8 * math.prod(shape[:-2]) * min(shape[-2:]) ** 2 for shapes in by_block for shape in shapes)
    if config.average_steps:
        state += weights * (world_size if kind == "zero1" else 1)  # with zero1 each process has all of the average
    element = 2 if is_bfloat16 else 4
    tokens = sequences * model_config.context_length
    blocks = [
        tokens * block_bytes_per_token(model_config, layer, is_bfloat16)
        + score_bytes(model_config, layer, sequences, is_bfloat16)
        for layer in layers
    ]
    all_stored = model_config.num_layers * tokens * 4 * model_config.d_model if has_checkpointing else sum(blocks)
    is_cast = is_bfloat16 and kind in ("zero2", "fsdp")  # before it is gathered
    copies = 2 * hidden if is_bfloat16 and not is_cast else 0
    head = 4 * (model_config.vocab_size or 0) * model_config.d_model  # a gradient of the head
    loss_input = tokens * (element + 4) * model_config.d_model  # and the gradient of it
    activations = all_stored + loss_input + copies + head
    logits = logit_chunk_bytes(device_type, tokens, model_config.vocab_size or 1)
    if is_bfloat16:
        logits += logits + head // 2  # the chunk and its gradient in bfloat16, and a copy of the head
    # The gradients of a block's activations need most memory in its feed-forward network.
    first_gradients, last_gradients = (
        tokens * gradient_bytes_per_token(model_config, layer, element) for layer in (0, model_config.num_layers - 1)
    )
    recomputed = blocks[-1] if has_checkpointing else 0
    last_copies = copies // model_config.num_layers if has_checkpointing else copies
    sizes = [sum(math.prod(shape) for shape in shapes) for shapes in by_block]
    largest_block = hidden * max(sizes) // sum(sizes)
    # Whole ones: the processes of tensor parallelism all update them.
    whole_matrices = (hidden_matrices(whole_config, layer) for layer in layers)
    matrices = Counter(shape for shapes in whole_matrices for shape in shapes)
    bucket = max(MAX_BUCKET_BYTES, head, *(4 * math.prod(shape) for shape in matrices))
    gathered = weights - (2 * hidden if is_cast else 0)
    block = _BlockBytes((2 if is_cast else 4) * largest_block, 4 * largest_block)
    held = _held_bytes(kind, world_size, weights, state, gathered, block, head, bucket)
    earlier = weights if config.gradient_accumulation_steps > 1 and kind not in ("ddp", "zero1") else 0
    share = world_size if kind in ("zero2", "fsdp") else 1
    state_share = 1 if kind in ("none", "ddp") else world_size
    # Muon updates all matrices of a shape together: a float32 copy, two in the dtype of the matmuls and some smaller
    # matmuls; at the end the float32 result.
    largest_shape = max(number * math.prod(shape) for shape, number in matrices.items())
    update = (4 + 3 * element) * largest_shape // state_share if config.optimizer != "adamw" else 0
    if device_type == "cuda":
        update = max(update, weights // state_share)  # AdamW's denominators
    peak = max(
        held.at_update + update,
        held.at_loss + activations + head + logits + earlier,
        held.at_last_block + all_stored + recomputed + last_gradients + last_copies + head + earlier,
        held.at_first_block + blocks[0] + first_gradients + copies // model_config.num_layers + earlier,
    )
    return TrainingMemory(weights // share, weights // share, state // state_share, activations, peak)


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


class _BlockBytes(NamedTuple):
    """Bytes of the largest block's matrices."""

    gathered: int
    """In the dtype in which they are gathered, as are their gradients."""
    sent: int
    """In that in which gradients travel."""


def _held_bytes(
    parallel: ParallelKind,
    world_size: int,
    weights: int,
    state: int,
    gathered: int,
    block: _BlockBytes,
    head: int,
    bucket: int,
) -> _Held:
    """``gathered``: bytes of all weights as FSDP gathers them. ``bucket``: bytes of weights that ShardedOptimizer
    gathers together, at least those of one tensor."""
    if parallel == "none":
        return _Held(weights + state, weights + state, 2 * weights + state, 2 * weights + state)
    if parallel in ("ddp", "zero1"):
        base = 2 * weights + (state if parallel == "ddp" else state // world_size)  # buckets hold the gradients
        gathered = 0 if parallel == "ddp" else 2 * min(weights, 2 * bucket)  # gloo has a copy of a buffer
        # The gradients of the bucket that is not sent yet, see lm.distributed.ddp.
        unsent = min(weights, gradient_bucket_bytes(weights))
        return _Held(base, base, base + unsent, base + gathered)
    base, shard = (weights + state) // world_size, weights // world_size
    # A block's gradients, and those of the unit before in the buffer that is sent.
    last = block.gathered + head + head // world_size
    first = shard + 2 * block.gathered + block.sent + head
    if parallel == "zero2":
        return _Held(base + gathered, base + gathered + last, base + first, base + shard)
    return _Held(base + head, base + 2 * block.gathered + last, base + first + block.gathered, base + shard)


def choose_parallel(
    execution: Execution,
    config: TrainConfig,
    model_config: ModelConfig,
    device: torch.device,
    adapter: AdapterConfig | None = None,
) -> ParallelKind:
    """Return what the processes shard: ``execution.parallel``, or the first kind whose predicted memory fits. With an
    ``adapter``, that alone is trained.

    One process shards nothing, nor do those of one part of the batch, which tensor parallelism divides. Raises
    UserError for "none" with several processes, and as :func:`check_tensor_parallel`.
    """
    check_tensor_parallel(execution, model_config, get_world_size())
    world_size = get_world_size() // execution.tensor_parallel
    if world_size == 1:
        return "none"
    if execution.parallel == "none":
        raise UserError(
            f"execution.parallel none trains in one process, and {get_world_size()} processes are started; set "
            "execution.parallel to auto, or start one process."
        )
    if execution.parallel != "auto":
        return execution.parallel
    if execution.tensor_parallel > 1:
        return "ddp"
    available = min(all_gather(available_memory(device)))  # all ranks choose the same
    sequences = config.batch_size // (config.gradient_accumulation_steps * world_size)
    for kind in _KINDS:
        peak = _predict_peak(sequences, execution, config, model_config, adapter, kind, world_size, device.type)
        if peak <= available:
            break
    log.info(
        "execution.parallel is %s: a process needs about %.1f GiB of the %.1f GiB that it may use.",
        kind,
        peak / (1 << 30),
        available / (1 << 30),
    )
    return kind


def _predict_peak(
    sequences: int,
    execution: Execution,
    config: TrainConfig,
    model_config: ModelConfig,
    adapter: AdapterConfig | None,
    kind: ParallelKind,
    world_size: int,
    device_type: str,
) -> int:
    """Return the peak of :func:`predict_training_memory`, or with an adapter of its own prediction."""
    division = kind, world_size, device_type
    if adapter and adapter.is_on:
        return predict_adapter_memory(sequences, execution, config, model_config, adapter, *division).peak
    return predict_training_memory(sequences, execution, config, model_config, *division).peak


def check_tensor_parallel(execution: Execution, model_config: ModelConfig, processes: int) -> None:
    """Raise UserError if a training cannot have the tensor parallelism that ``execution`` states."""
    if execution.tensor_parallel == 1:
        return
    from lm.distributed.tensor_parallel import config_of_rank  # slow to import

    check_world_size(processes, execution.tensor_parallel)
    if execution.parallel not in ("auto", "none", "ddp"):
        raise UserError(
            f"execution.parallel is {execution.parallel}: it cannot divide further what execution.tensor_parallel "
            f"{execution.tensor_parallel} divides; set it to auto or ddp."
        )
    config_of_rank(model_config, execution.tensor_parallel)


def need_memory(
    execution: Execution,
    config: TrainConfig,
    model_config: ModelConfig,
    device: torch.device,
    processes: int,
    adapter: AdapterConfig = _NO_ADAPTER,
) -> int:
    """Predict the bytes that each of the processes of a training needs, at least. Each first builds the whole model."""
    if config.precision == "auto" and has_bfloat16(device):
        config = replace(config, precision="bfloat16")
    kinds: tuple[ParallelKind, ...] = _KINDS if execution.tensor_parallel == 1 else ("ddp",)
    if execution.parallel != "auto" and execution.parallel != "none":
        kinds = (execution.parallel,)
    parts = max(1, processes // execution.tensor_parallel)  # of the batch
    sequences = max(1, config.batch_size // (config.gradient_accumulation_steps * parts))
    peaks = [
        _predict_peak(sequences, execution, config, model_config, adapter, kind, processes, device.type)
        for kind in (kinds if parts > 1 else ("none",))
    ]
    if adapter.is_on:  # stored in its dtype tensor by tensor
        one = predict_adapter_memory(sequences, execution, config, model_config, adapter, "none", 1, device.type)
        return max(min(peaks), one.base)
    return max(min(peaks), 4 * parameter_count(model_config)["total"])


def check_memory(
    execution: Execution,
    config: TrainConfig,
    model_config: ModelConfig,
    device: torch.device,
    processes: int = 0,
    adapter: AdapterConfig = _NO_ADAPTER,
) -> None:
    """Raise UserError if a training on CPUs needs more memory than this machine has, by prediction, and as
    :func:`check_tensor_parallel`.

    A system that runs out of memory stands still for minutes and then kills the training without a message; on a GPU,
    an allocation fails with one. ``processes`` are those of this machine that will train; 0: this one has joined them.
    ``execution.check_memory`` turns the check off.
    """
    check_tensor_parallel(execution, model_config, processes or get_world_size())
    if device.type != "cpu" or not execution.check_memory:
        return
    available = available_memory(device) // max(1, processes)
    processes = processes or get_world_size()
    if (need := need_memory(execution, config, model_config, device, processes, adapter)) <= available:
        return
    parts = max(1, processes // execution.tensor_parallel)
    smallest = replace(config, gradient_accumulation_steps=max(1, config.batch_size // parts))
    if need_memory(execution, smallest, model_config, device, processes, adapter) <= available:
        advice = (
            f"Raise train.gradient_accumulation_steps (now {config.gradient_accumulation_steps}), lower "
            f"train.batch_size (now {config.batch_size}) or model.context_length (now {model_config.context_length:,}),"
            " or set execution.activation_checkpointing to true."
        )
    elif adapter.is_on:
        advice = "Set adapter.dtype to nf4 and execution.activation_checkpointing to true, or use a smaller model."
    else:
        advice = (
            f"Use a smaller model: lower model.d_model (now {model_config.d_model:,}), model.num_layers (now "
            f"{model_config.num_layers}), model.d_ff (now {model_config.d_ff:,}) or tokenizer.vocab_size (now "
            f"{model_config.vocab_size or 0:,})."
        )
    raise UserError(
        f"The training needs about {need / (1 << 30):,.1f} GiB of memory per process, and {available / (1 << 30):,.1f} "
        f"GiB are available (85 % of this machine's or container's memory, divided among its processes). {advice} To "
        "start it anyway, set execution.check_memory to false."
    )


def available_memory(device: torch.device) -> int:
    """Return the bytes that the tensors of this process may take, of the memory of a GPU, or of this process's share of
    the machine's or container's."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = machine_memory() // get_local_world_size()
    return int(0.85 * memory)  # the rest is for the allocator and for libraries


def check_directory_is_shared(out: Path) -> None:
    """Raise UserError if a rank does not see the directory ``out`` of rank 0, in which all ranks save their parts."""
    with tempfile.NamedTemporaryFile(dir=out, prefix=".shared-") if get_rank() == 0 else nullcontext() as file:
        name = broadcast_from_rank0(Path(file.name).name if file else "")
        are_seen = all_gather((out / name).exists())
    if not all(are_seen):
        raise UserError(
            f"Each process saves its part of the checkpoints in {out}, but process {are_seen.index(False)} does not "
            "see that directory of process 0. Use a directory on a shared file system, or execution.parallel ddp and "
            "execution.tensor_parallel 1."
        )
