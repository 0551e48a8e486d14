"""Execution settings of this machine: how training runs.

No field here enters a cache key, so that every machine can use the results of every other. Text, counts and tokens do
not depend on these fields. Trained weights may differ, because device, compile, threads, processes, parallel,
tensor_parallel, attention and activation_checkpointing change the order of floating-point additions, and so the
rounding.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from lm.common.config import Config, bounded_field

ParallelKind = Literal["none", "ddp", "zero1", "zero2", "fsdp"]
AttentionForm = Literal["auto", "sdpa", "flash", "reference"]
# More fields of a run's job files: how its tasks run.
_TASK_FIELDS = {
    *("runner", "address", "shared_root", "threads_per_task", "tasks_in_flight", "train_deployment", "max_trainings"),
    *("count_memory", "verify"),
}


@dataclass(frozen=True)
class Execution(Config, section="execution"):
    """How this machine trains. A change reruns no stage, but new trainings may round in another way."""

    threads: int | None = bounded_field(None, ge=1)
    """Threads for parallel stages and for torch. Default: one per CPU core."""
    device: str = "auto"
    """Torch device for training: cpu, cuda, mps, or auto for the best one present."""
    compile: bool = True
    """Speed up training with torch.compile. Skipped if it fails, or if the run is too short to repay compilation."""
    processes: int = bounded_field(1, ge=1)
    """Training processes on this machine, one per GPU. They share the batch: train.batch_size stays the total."""
    parallel: Literal["auto"] | ParallelKind = "auto"
    """What the training processes divide. ddp: the batch. zero1: also the optimizer's state. zero2: also gradients, and
    weights between steps. fsdp: also weights between the layers' passes. Each needs less memory and more traffic than
    the one before. auto: the first whose predicted memory fits. The loss curve differs by rounding only."""
    tensor_parallel: int = bounded_field(1, ge=1)
    """Training processes that divide each matrix of the model, and compute the same part of the batch together. Each
    needs less memory and more traffic. processes must be a multiple of it, and so must be model.num_heads, num_kv_heads
    and d_ff. With parallel auto, ddp or none. Not compiled. The loss curve differs by rounding only."""
    attention: AttentionForm = "auto"
    """Form of causal attention in training. auto: the form measured fastest on the device. sdpa: torch's
    scaled_dot_product_attention. flash: FlashAttention-2, on GPUs in Triton (needs the extra triton). reference: plain;
    memory grows with the square of the sequence."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them: less memory, about a third more compute."""
    check_memory: bool = True
    """Refuse a training on CPUs whose predicted memory is more than 85 % of what its processes may use. false: start it
    anyway."""
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = field(default_factory=list)
    """Experiment trackers that receive training metrics, in addition to metrics.jsonl. Each must be installed."""
    download_cache: int = bounded_field(20, ge=0)
    """Disk for local copies of the files of a remote root, in GiB. They are kept between runs; the least recently used
    are deleted. Copies that were used in the last 24 hours stay, even if they need more."""
    log_interval: int = bounded_field(20, ge=1)
    """Training steps between log lines."""
    min_validations: int = bounded_field(10, ge=1)
    """Measure the validation loss of a pretraining or of sft at least so often, for the curve. The measurements between
    those of train.eval_interval sample nothing and choose no best checkpoint. 1: no measurements in between."""

    @staticmethod
    def from_job(**content: Any) -> "Execution":
        """Return the settings of a job file. Raises TypeError for an unknown field, and UserError for a wrong value."""
        return Execution(**{name: value for name, value in content.items() if name not in _TASK_FIELDS})
