"""Memory of a training before it starts: the choice of what the processes shard, and a check that it fits."""

import logging
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from lm.common.errors import UserError
from lm.common.execution import Execution, ParallelKind
from lm.distributed.process_group import (
    all_gather,
    broadcast_from_rank0,
    get_local_world_size,
    get_rank,
    get_world_size,
)
from lm.hardware.device import has_bfloat16
from lm.hardware.memory import machine_memory
from lm.model.config import ModelConfig
from lm.model.flops import parameter_count
from lm.model.training_memory import TrainingMemory, predict_training_memory
from lm.train.config import TrainConfig

log = logging.getLogger(__name__)

_KINDS: tuple[ParallelKind, ...] = ("ddp", "zero1", "zero2", "fsdp")


def choose_parallel(
    execution: Execution, config: TrainConfig, model_config: ModelConfig, device: torch.device
) -> ParallelKind:
    """Return what the processes shard: ``execution.parallel``, or the first kind whose predicted memory fits.

    One process shards nothing. Raises UserError for "none" with several processes.
    """
    world_size = get_world_size()
    if world_size == 1:
        return "none"
    if execution.parallel == "none":
        raise UserError(
            f"execution.parallel is none, but {world_size} processes train; set it to auto, or start one process."
        )
    if execution.parallel != "auto":
        return execution.parallel
    available = min(all_gather(available_memory(device)))  # all ranks choose the same
    sequences = config.batch_size // (config.gradient_accumulation_steps * world_size)
    for kind in _KINDS:
        memory = predict_memory(sequences, execution, config, model_config, kind, world_size, device)
        if memory.peak <= available:
            break
    log.info(
        "execution.parallel is %s: a process needs about %.1f GiB of the %.1f GiB that it may use.",
        kind,
        memory.peak / (1 << 30),
        available / (1 << 30),
    )
    return kind


def predict_memory(
    sequences: int,
    execution: Execution,
    config: TrainConfig,
    model_config: ModelConfig,
    kind: ParallelKind,
    world_size: int,
    device: torch.device,
) -> TrainingMemory:
    """Predict the memory of each of ``world_size`` processes with micro-batches of ``sequences`` full contexts, sharded
    as ``kind`` says; see :func:`lm.model.training_memory.predict_training_memory`."""
    return predict_training_memory(
        model_config,
        sequences,
        config.optimizer,
        config.precision == "bfloat16",
        execution.activation_checkpointing,
        config.gradient_accumulation_steps,
        kind,
        world_size,
        device.type,
    )


def need_memory(
    execution: Execution, config: TrainConfig, model_config: ModelConfig, device: torch.device, processes: int
) -> int:
    """Predict the bytes that each of the processes of a training needs, at least. Each first builds the whole model."""
    if config.precision == "auto" and has_bfloat16(device):
        config = replace(config, precision="bfloat16")
    kinds: tuple[ParallelKind, ...] = _KINDS
    if execution.parallel != "auto" and execution.parallel != "none":
        kinds = (execution.parallel,)
    sequences = max(1, config.batch_size // (config.gradient_accumulation_steps * processes))
    peaks = [
        predict_memory(sequences, execution, config, model_config, kind, processes, device).peak
        for kind in (kinds if processes > 1 else ("none",))
    ]
    return max(min(peaks), 4 * parameter_count(model_config)["total"])


def check_memory(
    execution: Execution, config: TrainConfig, model_config: ModelConfig, device: torch.device, processes: int = 0
) -> None:
    """Raise UserError if a training on CPUs needs more memory than this machine has, by prediction.

    A system that runs out of memory stands still for minutes and then kills the training without a message; on a GPU,
    an allocation fails with one. ``processes`` are those of this machine that will train; 0: this one has joined them.
    ``execution.check_memory`` turns the check off.
    """
    if device.type != "cpu" or not execution.check_memory:
        return
    available = available_memory(device) // max(1, processes)
    processes = processes or get_world_size()
    if (need := need_memory(execution, config, model_config, device, processes)) <= available:
        return
    smallest = replace(config, gradient_accumulation_steps=max(1, config.batch_size // processes))
    if need_memory(execution, smallest, model_config, device, processes) <= available:
        advice = (
            f"Raise train.gradient_accumulation_steps (now {config.gradient_accumulation_steps}), lower "
            f"train.batch_size (now {config.batch_size}) or model.context_length (now {model_config.context_length:,}),"
            " or set execution.activation_checkpointing to true."
        )
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
            "see that directory of process 0. Use a directory on a shared file system, or execution.parallel ddp."
        )
