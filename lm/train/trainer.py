"""The training loop: optimizer steps, evaluations and checkpoints. Source: CS336 assignment 1 (section 5)."""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.checkpoint.training_checkpoint import ROW_FILES, load_training, step_name
from lm.common.errors import Stopped, UserError
from lm.common.execution import Execution
from lm.common.phases import phase
from lm.data.batches import prefetch_batches
from lm.distributed.plan import parallelize, repays_compilation
from lm.distributed.process_group import (
    all_reduce_mean,
    barrier,
    broadcast_from_rank0,
    call_on_rank0,
    get_data_world_size,
    get_local_world_size,
    get_rank,
    get_world_size,
    is_true_on_any_rank,
)
from lm.files.atomic_dir import remove_abandoned_directories
from lm.hardware.cpu import available_cpus
from lm.hardware.device import choose_precision, explain_out_of_memory
from lm.hardware.memory import keep_freed_memory, return_freed_memory
from lm.hardware.peak_flops import peak_flops
from lm.model.flops import flops_per_token
from lm.model.initialization import LateWeights
from lm.model.transformer import TransformerLM
from lm.optim.weight_average import WeightAverage
from lm.train.checkpoint_writer import CheckpointWriter
from lm.train.checkpoints import AVERAGE_NAME, adopt_checkpoints, find_resumable, prune_checkpoints, save_checkpoint
from lm.train.config import TrainConfig
from lm.train.expert_balance import ExpertBalance
from lm.train.frozen_base import FrozenBase
from lm.train.objective import MicroBatch, Objective
from lm.train.optimizers import (
    copy_options,
    make_average,
    make_optimizers,
    replace_options,
    set_rates,
    whole_parameters,
)
from lm.train.schedule_progress import ScheduleProgress
from lm.train.skipped_steps import SkippedSteps
from lm.train.throughput import StepTimer, Throughput
from lm.train.tracking import Tracker, log_step, write_result
from lm.train.training_memory import check_directory_is_shared, choose_parallel

log = logging.getLogger(__name__)


class Trainer:
    """One training of ``model``, which may be resumed.

    The directory ``out`` receives ``metrics.jsonl``, ``samples.jsonl``, ``loss.png``, ``step-NNNNNNN/`` checkpoints
    and, at the end, ``training.json``, which names the best and the last checkpoint. ``base`` is what an adapter of
    ``model`` adapts; ``late`` are its undrawn matrices. Raises UserError if the batch cannot be divided evenly.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: TransformerLM,
        objective: Objective,
        execution: Execution,
        out: Path,
        base: FrozenBase | None = None,
        late: LateWeights | None = None,
    ) -> None:
        self.rank, self.world_size, self.data_world_size = get_rank(), get_world_size(), get_data_world_size()
        if config.batch_size % (config.gradient_accumulation_steps * self.data_world_size):
            raise UserError(
                f"train.batch_size {config.batch_size} must be a multiple of train.gradient_accumulation_steps "
                f"{config.gradient_accumulation_steps} times the {self.data_world_size} processes that divide it."
            )
        torch.set_num_threads(max(1, (execution.threads or available_cpus()) // get_local_world_size()))
        self.device = next(model.parameters()).device
        precision = choose_precision(config.precision, self.device)
        self.config = config = replace(config, precision=broadcast_from_rank0(precision))
        self.model, self.objective, self.execution, self.out, self.base = model, objective, execution, out, base
        kind = choose_parallel(execution, config, model.config, self.device, base.adapter if base else None)
        if self.device.type == "cpu":
            saves_memory = kind in ("zero2", "fsdp") or (base is not None and base.adapter.dtype != "float32")
            (return_freed_memory if saves_memory else keep_freed_memory)()
        autocast_dtype = None if base or config.precision != "bfloat16" else torch.bfloat16  # an adapter has its own
        self.parallel = parallelize(model, execution, kind, whole_parameters(model, config), autocast_dtype, late)
        self.optimizers = make_optimizers(model, config, self.parallel)
        self.average = make_average(model, config)
        self.saved_optimizers = [*self.optimizers, *([self.average] if self.average else [])]
        self.saves = self.rank == 0 or self.parallel.shards_state
        self.writer = CheckpointWriter(model, self.saved_optimizers, self.parallel)
        self.balance = ExpertBalance(model, model.config.moe) if model.config.moe else None
        self.loss_sum: Callable[[MicroBatch], Tensor] = self._loss_sum
        self.flops_per_step = objective.tokens_per_step * flops_per_token(model.config)
        is_long = repays_compilation(config.steps * self.flops_per_step)
        if execution.compile and objective.is_compilable and is_long and execution.tensor_parallel == 1:
            with self.explain_out_of_memory():
                micro_batch = objective.micro_batches(0)[0]
                if self.balance:
                    self.balance.start_micro_batch(objective.padding(micro_batch))
                self.loss_sum = self.parallel.compile_loss(self._loss_sum, micro_batch)
        self.step = 0
        self.best: dict[str, Any] = {"step": 0, objective.metric_names[0]: None}
        self.evaluations_without_improvement = 0
        self.skipping = SkippedSteps(self.device)
        curve_points = execution.min_validations if objective.is_evaluation_cheap else 1
        self.progress = ScheduleProgress(config, execution, curve_points)
        # On a GPU the host would wait; the optimizers skip a step on the device instead.
        self.reads_each_step = self.device.type != "cuda"
        self.off_schedule_checkpoint: Path | None = None  # saved on interrupt; the next save deletes it
        self.tracker: Tracker | None = None  # of rank 0, during run()
        self.is_contention_logged = False
        out.mkdir(parents=True, exist_ok=True)
        if base:
            base.write(out)
        if self.parallel.shards_state:
            check_directory_is_shared(out)
        if self.rank == 0:
            remove_abandoned_directories(out)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16")

    def _loss_sum(self, micro_batch: MicroBatch) -> Tensor:
        with self._autocast():
            return self.objective.loss_sum(self.model, micro_batch)

    def explain_out_of_memory(self) -> AbstractContextManager[None]:
        """Convert out-of-memory errors inside the ``with`` block to UserError."""
        config = self.config
        sequences = config.batch_size // (config.gradient_accumulation_steps * self.data_world_size)
        return explain_out_of_memory(
            f"{self.device} is out of memory with micro-batches of {sequences} sequences of "
            f"{self.model.config.context_length:,} tokens. Raise train.gradient_accumulation_steps (now "
            f"{config.gradient_accumulation_steps}), set execution.activation_checkpointing to true, lower "
            f"train.batch_size (now {config.batch_size}), or use a smaller model."
        )

    def resume(self, previous: Path) -> bool:
        """Continue from the newest intact checkpoint of an unfinished training; return False if there is none.

        ``previous`` is the directory of that training and may be ``out``. Raises UserError if the checkpoint was made
        with another model, tokenizer or data.
        """
        settings = self._settings() | {"data": self.objective.digests}
        resumable = call_on_rank0(lambda: find_resumable(previous, settings))
        with self._autocast():
            self.objective.restore(previous, resumable.step)
        barrier()  # all ranks have read the rows that the adoption drops
        call_on_rank0(lambda: adopt_checkpoints(previous, self.out, resumable))
        if not (name := resumable.name):
            return False
        options = copy_options(self.optimizers)
        description = resumable.description
        self.step = load_training(self.out / name, self.model, self.saved_optimizers, self.parallel, description)
        replace_options(self.optimizers, options)  # from the config, not from the checkpoint
        best_step = description["best"]["step"]
        if step_name(best_step) in {path.name for path in resumable.paths}:  # else a later one becomes the best
            self.best = description["best"]
        self.evaluations_without_improvement = description["evaluations_without_improvement"]
        self.progress.seconds = description.get("seconds", 0.0)
        self.skipping = SkippedSteps.from_description(self.device, description)
        if not self.config.max_seconds and self.step % self.config.checkpoint_interval and best_step != self.step:
            self.off_schedule_checkpoint = self.out / name
        log.info("Training resumes at step %s from %s/%s.", f"{self.step:,}", previous.resolve().name, name)
        return True

    def run(
        self, progress: Callable[[int], None] = lambda step: None, stop_event: threading.Event | None = None
    ) -> dict[str, Any]:
        """Train to the last step; return the content of ``training.json``. ``progress`` is called after each step.

        After ``stop_event`` is set in any process, the trainer finishes the step, saves it and raises Stopped.
        """
        peak = peak_flops(self.device, torch.bfloat16 if self.config.precision == "bfloat16" else torch.float32)
        if self.rank == 0:
            for name in ROW_FILES if self.step == 0 else ():  # an attempt without a checkpoint may have left rows
                (self.out / name).unlink(missing_ok=True)
            self.tracker = Tracker(self.out, self.execution.trackers, self._settings(), self.step)
        rates = self.objective.tokens_per_step, self.flops_per_step, peak and peak * self.world_size
        timer = StepTimer(self.step, *rates)
        tracking = closing(self.tracker) if self.tracker else nullcontext()
        with tracking, self.explain_out_of_memory(), self.writer, self.loading() as load_micro_batches:
            while not self._is_finished():
                earlier = self.progress.position(self.step)
                lr = self.config.lr(1 + int(earlier))
                micro_batches = load_micro_batches(self.step)
                # From the first batch on: before it, some objectives compute what a reference model says.
                self.progress.start_clock()
                loss, grad_norm, is_stopping = self.train_step(micro_batches, lr, stop_event)
                self.step += 1
                self.progress.read_clock()
                if self.average and self.progress.is_in_average(self.step):
                    self.average.step()
                due = self.progress.find_due(self.step, earlier)
                if self.reads_each_step or due or is_stopping:
                    self.skipping.read(self.step, self.out, self.writer.wait)  # waits for the device
                row: dict[str, Any] = {"step": self.step, "lr": lr}
                if self.skipping.consecutive:  # a skipped step has no figures
                    due = due & {"evaluate"} if self.progress.is_over(self.step) else set()
                elif due - {"save"}:
                    row["loss"] = float(loss)
                row |= (step_metrics := self.objective.step_metrics())
                if "log" in due:
                    self._log(row, grad_norm, step_metrics, timer.measure(self.step))
                with timer.paused():
                    if due & {"evaluate", "validate"}:
                        row |= self._evaluate() if "evaluate" in due else self._compute_metrics(is_logged=False)
                        self.progress.read_clock()  # before the save: a resumed training knows this time too
                    if self.tracker and (due - {"save"} or step_metrics):
                        self.tracker.add(row)
                    # Saved after the row, so that a resumed training has the metrics of all earlier steps.
                    is_saved = "save" in due or is_stopping or self._is_finished() or self.step == self.best["step"]
                    if is_saved:
                        self.save()
                    if is_saved or "evaluate" in due:
                        barrier()  # rank 0 saves and samples alone; the next collective of tensors has a short timeout
                progress(self.step)
                if is_stopping and not self._is_finished():
                    self.writer.wait()
                    raise Stopped(
                        f"The training was stopped after step {self.step:,} and saved in "
                        f"{self.out / step_name(self.step)}; start it again to resume."
                    )
            return self._finish()

    def loading(self) -> AbstractContextManager[Callable[[int], Sequence[MicroBatch]]]:
        """Return a context manager that yields a function: it returns the micro-batches of a step, loaded ahead if
        possible. Call it for each step from the current one."""

        def load(step: int) -> Sequence[MicroBatch]:
            with self._autocast():  # the reference model must run under the same autocast as the model
                return self.objective.micro_batches(step)

        return prefetch_batches(load, self.step, self.device) if self.objective.is_prefetchable else nullcontext(load)

    def _log(
        self, row: dict[str, Any], grad_norm: Tensor, step_metrics: dict[str, float], throughput: Throughput
    ) -> None:
        """Add the figures of a logged step to ``row``, and log them."""
        row["smoothed_loss"] = self.skipping.smoothed_loss
        row["grad_norm"] = float(grad_norm)
        row["tokens_per_second"] = round(throughput.tokens_per_second)
        if self.balance:
            row |= self.balance.metrics()
            step_metrics = step_metrics | {"expert_load_max": row["expert_load_max"]}
        total = max(self.step, round(self.step * self.config.steps / self.progress.position(self.step)))
        log_step(row, total, throughput, step_metrics)
        if self.device.type == "cpu" and throughput.waiting > 0.3 and not self.is_contention_logged:
            self.is_contention_logged = True
            waiting = throughput.waiting, torch.get_num_threads()
            log.info("Steps take longer: other programs use the CPU (%.1f of %s threads wait).", *waiting)

    def _is_finished(self) -> bool:
        patience = self.config.patience
        is_impatient = patience is not None and self.evaluations_without_improvement >= patience
        return is_impatient or self.progress.is_over(self.step)

    def _settings(self) -> dict[str, dict[str, Any]]:
        description = self.base.description if self.base else {}
        return {"train": asdict(self.config), "model": asdict(self.model.config), **description}

    def train_step(
        self, micro_batches: Sequence[MicroBatch], lr: float, stop_event: threading.Event | None = None
    ) -> tuple[Tensor, Tensor, bool]:
        """Update the weights once from this rank's micro-batches.

        Return the mean loss (without the losses that balance experts), the norm of the gradients before clipping, and
        whether ``stop_event`` is set in any rank. If loss or norm is not finite, the weights do not change. On a GPU,
        the host does not wait for the step.
        """
        # All targets weigh the same, in any micro-batch and rank. Gradients and losses are averaged over the ranks, so
        # the sums are divided by the mean weight per rank.
        with phase("forward"):
            weights = torch.stack([self.objective.weight(micro_batch) for micro_batch in micro_batches])
            mean_weight = all_reduce_mean(weights.sum().float())
            mean_weight = mean_weight.masked_fill(mean_weight == 0, 1.0)  # without any target the loss is 0
        if self.balance:
            self.balance.start_step()
        losses = []
        for number, micro_batch in enumerate(micro_batches, start=1):
            with self.parallel.no_sync() if number < len(micro_batches) else nullcontext():
                with phase("forward"):
                    if self.balance:
                        self.balance.start_micro_batch(self.objective.padding(micro_batch))
                    loss = self.loss_sum(micro_batch) / mean_weight
                    penalty = self.balance.loss(len(micro_batches)) if self.balance else 0.0
                with phase("backward"):
                    (loss + penalty).backward()
            losses.append(loss.detach())
        loss = torch.stack(losses).sum()
        self.parallel.finish_gradient_synchronization()
        loss = all_reduce_mean(loss)
        is_stopping = is_true_on_any_rank(stop_event is not None and stop_event.is_set())
        with phase("optimizer"):
            grad_norm = self.parallel.clip_grad_norm(self.config.max_grad_norm)
            found_inf = self.skipping.check(loss, grad_norm)
            set_rates(self.optimizers, lr, self.config.max_lr)
            for optimizer in self.optimizers:
                if not self.reads_each_step:
                    optimizer.step(None, found_inf)  # type: ignore[call-overload]
                elif not found_inf:
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if self.balance:
                self.balance.update_biases(found_inf)
        return loss, grad_norm, is_stopping

    def _compute_metrics(self, is_final: bool = False, is_logged: bool = True) -> dict[str, float]:
        with torch.no_grad(), self._autocast():
            metrics = self.objective.evaluate(self.model, is_final)
        if metrics and is_logged:
            whole = [(name, value) for name, value in metrics.items() if "/" not in name]  # not those of sources
            figures = (f"{name.replace('_', ' ')} {value:.4f}" for name, value in whole)
            log.info("%s  %s", "end of training" if is_final else f"step {self.step:,}", "  ".join(figures))
        return metrics

    def _evaluate(self) -> dict[str, float]:
        metrics = self._compute_metrics()
        if metrics:
            self.evaluations_without_improvement += 1
            if self._is_best(metrics):
                self.best, self.evaluations_without_improvement = {"step": self.step, **metrics}, 0
        if not self.config.sample_tokens or not self.config.sample_prompts:  # no rank needs a whole model
            return metrics
        model = self.parallel.full_model()
        if self.tracker:
            for sample in self.objective.sample(model):
                self.tracker.add_sample(self.step, sample.prompt, sample.text)
        return metrics

    def _is_best(self, metrics: dict[str, float]) -> bool:
        name = self.objective.metric_names[0]
        value, best = metrics[name], self.best[name]
        is_better = best is None or (value > best if self.objective.is_higher_better else value < best)
        return math.isfinite(value) and is_better

    def save(self) -> None:
        """Save a checkpoint of the current step and delete old checkpoints, while the training goes on if there is
        memory for it. All ranks call this together."""
        if self.saves:
            kept = self.config.keep_checkpoints, self.best["step"], self.off_schedule_checkpoint
            prune = partial(prune_checkpoints, self.out, *kept) if self.rank == 0 else lambda: None
            self.writer.save(self.out / step_name(self.step), self.step, self._description(), prune)

    def _description(self) -> dict[str, Any]:
        return {
            "data": self.objective.digests,
            "train": asdict(self.config),
            "best": self.best,
            "evaluations_without_improvement": self.evaluations_without_improvement,
            **self.skipping.description,
            "seconds": self.progress.seconds,
            **(self.base.description if self.base else {}),
        }

    def _save_average(self, average: WeightAverage) -> bool:
        """Save the average of the weights. Return whether it is better than the best checkpoint."""
        with average.swapped():
            if self.saves:
                directory, description = self.out / AVERAGE_NAME, self._description()
                save_checkpoint(directory, self.model, [], self.step, description, self.parallel)
            metrics = self._compute_metrics(is_logged=False)
        return not metrics or self._is_best(metrics)

    def _finish(self) -> dict[str, Any]:
        self.writer.wait()
        last, best = step_name(self.step), step_name(self.best["step"])
        if not (self.out / best).exists():
            best = last
        swapped: AbstractContextManager[None] = nullcontext()
        if self.average and self.average.has_started and self._save_average(self.average):
            best, swapped = AVERAGE_NAME, self.average.swapped()
        with swapped:
            metrics = self._compute_metrics(is_final=True)
        result = {
            "last": last,
            "best": best,
            "steps": self.step,
            "skipped_steps": self.skipping.skipped,
            "tokens": self.step * self.objective.tokens_per_step,
            **dict.fromkeys(self.objective.metric_names),
            **metrics,
        }
        if self.rank == 0:
            write_result(self.out, result)
        return result
