"""The speed of training steps on this machine, measured in seconds."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from lm.common.execution import Execution, ParallelKind
from lm.hardware.cpu import available_cpus
from lm.hardware.device import choose_device, choose_precision
from lm.hardware.peak_flops import peak_flops, time_matmuls
from lm.model.config import ModelConfig
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig
from lm.train.pretraining import TrainData, make_trainer
from lm.train.training_memory import (
    TrainingMemory,
    available_memory,
    largest_micro_batch,
    predict_training_memory,
)

_WARM_UP_STEPS = 2
_MIN_STEPS = 5


@dataclass(frozen=True)
class Speed:
    """Measured times of a training on this machine."""

    start_seconds: float
    """Time that a start takes before its steps: with torch.compile, mostly compilation. A later start takes less."""
    step_seconds: float
    """Median time of a step."""
    timed_seconds: float
    """Time that all steps of the measurement took."""
    flops_per_step: float

    @property
    def seconds(self) -> float:
        """Time that the measurement took."""
        return self.start_seconds + self.timed_seconds


def guess_flops_per_second(execution: Execution) -> float:
    """Return about the operations per second of a training, from the time of a matmul."""
    device = choose_device(execution.device)
    dtype = torch.bfloat16 if choose_precision("auto", device) == "bfloat16" else torch.float32
    peak = peak_flops(device, dtype) or max(flops for flops, _ in time_matmuls(device, dtype))
    return 0.3 * peak * (execution.processes if device.type == "cuda" else 1)  # a usual MFU is 30 %


def measure_speed(model: ModelConfig, config: TrainConfig, seconds: float, execution: Execution) -> Speed:
    """Train for some ``seconds`` on random tokens, in this process. ``model.vocab_size`` must be set.

    The steps are compiled if those of a training with this configuration would be. With several processes, this one
    trains on its share of each batch; the time of communication is left out. Raises UserError if memory is too small.
    """
    processes, threads = execution.processes, max(1, (execution.threads or available_cpus()) // execution.processes)
    # More steps of smaller batches: the FLOPs decide about compilation.
    config = replace(config, batch_size=config.batch_size // processes, steps=config.steps * processes)
    size = model.vocab_size or 0
    tokens = np.random.default_rng(0).integers(size, size=config.batch_size * (model.context_length + 1) + 1)
    vocab = {token_id: bytes([token_id]) for token_id in range(256)}
    tokenizer = Tokenizer(vocab | {token_id: b"token %d" % token_id for token_id in range(256, size)}, [])
    data = TrainData(tokens.astype(np.uint32), None, tokenizer, 1.0)
    device = choose_device(execution.device)
    with TemporaryDirectory() as directory:
        started = time.perf_counter()
        trainer = make_trainer(
            config, model, data, replace(execution, processes=1, threads=threads), Path(directory), device
        )

        def timed_step() -> float:
            step_started = time.perf_counter()
            trainer.train_step(trainer.objective.micro_batches(trainer.step), config.lr(trainer.step + 1))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            trainer.step += 1
            return time.perf_counter() - step_started

        with trainer.explain_out_of_memory():
            for _ in range(_WARM_UP_STEPS):
                timed_step()
            warm_up_seconds = time.perf_counter() - started
            times = [timed_step()]
            end = started + warm_up_seconds + seconds
            # At least _MIN_STEPS, unless they take too long.
            while time.perf_counter() < end or len(times) < min(_MIN_STEPS, 3 * seconds / times[0]):
                times.append(timed_step())
            all_seconds = time.perf_counter() - started
    step_seconds = median(times)
    start_seconds = max(0.0, warm_up_seconds - _WARM_UP_STEPS * step_seconds)
    return Speed(start_seconds, step_seconds, all_seconds - start_seconds, processes * trainer.flops_per_step)


def find_largest_batch(model: ModelConfig, config: TrainConfig, execution: Execution) -> int:
    """Return how many sequences of a batch the memory of the training processes holds, by formula; 0 if not one each.

    If not even one fits a process that holds the whole model, the processes may shard it.
    """
    device, processes = choose_device(execution.device), execution.processes
    config = replace(config, precision=choose_precision(config.precision, device))
    available = available_memory(device) // (1 if device.type == "cuda" else processes)  # each has a GPU

    def largest(kind: ParallelKind) -> int:
        def predict(sequences: int) -> TrainingMemory:
            return predict_training_memory(sequences, execution, config, model, kind, processes, device.type)

        return processes * largest_micro_batch(available, predict)

    sharded: ParallelKind = "fsdp" if execution.parallel == "auto" else execution.parallel
    return largest("none") or (largest(sharded) if processes > 1 else 0)
