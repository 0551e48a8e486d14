"""The training loop: batches, optimizer steps, evaluation, checkpoints, samples.

Source: CS336 assignment 1 (section 5). Every batch is a function of (seed, step) alone, so a run that is resumed draws
the batches that it would have drawn.
"""

import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._functorch.config
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from lm.checkpoint import load_training, newest_checkpoint, read_description, save_training, step_name
from lm.completion import complete
from lm.data import Batch, Tokens, batch_starts, check_length, prefetched, windows
from lm.device import choose_device, peak_flops
from lm.distributed import DDP, mean_over_processes, told_by_first
from lm.errors import UserError
from lm.execution import Execution
from lm.metrics import bits_per_byte, flops_per_token, plot_metrics, read_metrics
from lm.model import ModelConfig, TransformerLM
from lm.optim import clip_grad_norm
from lm.recipe import TrainConfig, make_optimizers
from lm.resume import take_over
from lm.sampling import SampleConfig
from lm.tokenizer import Tokenizer
from lm.tracking import Tracker

log = logging.getLogger(__name__)

_COMPILE_FLOPS = 1e14  # compiling takes half a minute; a shorter run would lose more than it gains
_KEPT = 0.95  # of the activations: a compiled step computes what is cheap again, on processors in no more time
_SKIPPED = 5  # steps in a row whose gradients are not finite, after which a run is given up
_SMOOTHING = 0.1  # weight of the newest loss in the smoothed one


class Interrupted(Exception):
    """A training was asked to stop; it has saved a checkpoint, from which it goes on."""


@dataclass
class TrainData:
    """What a run learns from: token sequences, their tokenizer, bytes a token on the validation text, and digests of
    what it reads by name, for checkpoints to be of the same."""

    train: Tokens
    valid: Tokens | None
    tokenizer: Tokenizer
    bytes_per_token: float
    digests: dict[str, str] = field(default_factory=dict)


class Trainer:
    """One training run that writes to a directory: ``metrics.jsonl``, ``samples.jsonl``, ``loss.png``,
    ``step-NNNNNNN/`` checkpoints and at the end ``training.json``, which names the best and the last of them."""

    def __init__(
        self,
        config: TrainConfig,
        model_config: ModelConfig,
        data: TrainData,
        execution: Execution,
        out: Path,
        device: torch.device | None = None,
    ) -> None:
        if model_config.vocab_size != data.tokenizer.size:
            raise UserError(
                f"model.vocab_size is {model_config.vocab_size}, but the tokenizer has {data.tokenizer.size:,} ids; "
                "leave it out to follow the tokenizer."
            )
        self.rank, self.processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if config.batch_size % (config.micro_batches * self.processes):
            raise UserError(
                f"train.batch_size {config.batch_size} must be a multiple of train.micro_batches "
                f"{config.micro_batches} times the {self.processes} processes."
            )
        check_length(data.train, model_config.context_length, "training text")
        if data.valid is not None:
            check_length(data.valid, model_config.context_length, "validation text")
        torch.set_num_threads(max(1, execution.workers // self.processes))
        torch.manual_seed(config.seed)
        self.config, self.data, self.execution, self.out = config, data, execution, out
        self.device = device or choose_device(execution.device)
        self.share = config.batch_size // self.processes  # sequences of a batch that are this process's
        self.model = TransformerLM(model_config, device=self.device)
        self.model.recomputes = execution.recompute
        self.ddp = DDP(self.model) if self.processes > 1 else None
        self.optimizers = make_optimizers(self.model, config)
        self.loss = self._compiled_loss()
        self.step = 0
        self.best: dict[str, Any] = {"step": 0, "valid_loss": math.inf}
        self.stale = 0  # validations since the best
        self.skipped = 0  # steps whose gradients were not finite
        self.skipped_in_a_row = 0
        self.extra: Path | None = None  # the checkpoint, of a step that saves none else, that an interruption left
        self.smoothed: Tensor | None = None
        out.mkdir(parents=True, exist_ok=True)
        self.tracker: Tracker | None = None  # of the first process, while it runs

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _plain_loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self._autocast():
            return self.model.loss(x, y)

    def _compiled_loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        config, model = self.config, self.model.config
        flops = config.steps * config.batch_size * model.context_length * flops_per_token(model)
        if not self.execution.compile or flops < _COMPILE_FLOPS:
            return self._plain_loss
        compiled = torch.compile(self._plain_loss)
        try:  # it compiles at its first call
            x, y = (part.chunk(config.micro_batches)[0] for part in self._batch(0))
            budget = _KEPT if self.device.type == "cpu" else 1.0
            with torch._functorch.config.patch(activation_memory_budget=budget):
                compiled(x, y).backward()
        except Exception as error:  # no compiler, or a device that is not supported: slower, and no reason to stop
            log.warning("torch.compile does not work here, training runs without: %s", str(error).partition("\n")[0])
            return self._plain_loss
        finally:
            self.model.zero_grad(set_to_none=True)
        return compiled

    def _batch(self, step: int) -> Batch:
        config, context = self.config, self.model.config.context_length
        tokens = self.data.train
        starts = batch_starts(len(tokens), config.batch_size, context, config.data_order, config.seed, step)
        return windows(tokens, starts[self.rank * self.share :][: self.share], context, self.device)

    def resume(self, previous: Path) -> bool:
        """Go on from the newest intact checkpoint of an unfinished run in ``previous``, which may be this run's own
        directory; False when there is none. Raises UserError where it is of another model, tokenizer or data."""
        ours = {"model": asdict(self.model.config), "data": self.data.digests, "train": asdict(self.config)}
        name = told_by_first(take_over(previous, self.out, ours) if self.rank == 0 else None)
        if name is None:
            return False
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        self.step = load_training(self.out / name, self.model, self.optimizers)
        for optimizer in self.optimizers:  # their options are this run's, not those of the checkpoint
            for group in optimizer.param_groups:
                group.update(options.pop(0))
        description = read_description(self.out / name) or {}
        if self._directory(description["best"]["step"]).exists():  # else a later one will be the best
            self.best = description["best"]
        self.stale, self.skipped = description["stale"], description["skipped"]
        self.skipped_in_a_row = description["skipped_in_a_row"]
        if description["smoothed_loss"] is not None:
            self.smoothed = torch.tensor(description["smoothed_loss"], device=self.device)
        if self.step % self.config.checkpoint_interval and description["best"]["step"] != self.step:
            self.extra = self.out / name
        log.info("Training resumes at step %s from %s.", f"{self.step:,}", previous / name)
        return True

    def run(
        self, progress: Callable[[int], None] = lambda step: None, stopping: threading.Event | None = None
    ) -> dict[str, Any]:
        """Train to the last step and return what ``training.json`` holds; ``progress`` is told each finished step.

        Once ``stopping`` is set, the step is finished and saved and Interrupted raised.
        """
        config = self.config
        peak = peak_flops(self.device, torch.bfloat16 if config.precision == "bfloat16" else torch.float32)
        first_step, last_logged = self.step, self.step
        started = last_time = time.perf_counter()
        with self._tracked(), prefetched(self._batch, self.step) as batch:
            while not self._is_over():
                lr = config.lr(self.step + 1)
                is_asked = stopping is not None and stopping.is_set()
                loss, grad_norm, is_stopping = self._train_step(*batch(self.step), lr, is_asked)
                self.step += 1
                last = self.step == config.steps
                is_good = self.skipped_in_a_row == 0
                logs = is_good and (last or self.step == 1 or self.step % self.execution.log_interval == 0)
                validates = last or (is_good and self.step % config.eval_interval == 0)
                row: dict[str, Any] = {}
                if logs:
                    now = time.perf_counter()
                    seconds = (now - last_time) / (self.step - last_logged)
                    last_logged, last_time = self.step, now
                    mean_seconds = (now - started) / (self.step - first_step)
                    row = self._row(float(loss), float(grad_norm), lr, seconds, mean_seconds, peak)
                paused = time.perf_counter()
                if validates:
                    row = {"step": self.step, **({"loss": float(loss)} if is_good else {}), "lr": lr, **row}
                    row |= self._validate()
                if row and self.tracker:
                    self.tracker.add(row)
                # After the row, which a run that resumes here finds in metrics.jsonl.
                saves = self._is_over() or is_stopping or (is_good and self.step % config.checkpoint_interval == 0)
                if saves or self.step == self.best["step"]:
                    self._save()
                last_time += time.perf_counter() - paused
                progress(self.step)
                if is_stopping and not self._is_over():
                    raise Interrupted(
                        f"The training was stopped after step {self.step:,} and saved in "
                        f"{self._directory(self.step)}; it goes on from there."
                    )
            return self._finish()

    def _is_over(self) -> bool:
        patience = self.config.patience
        return self.step >= self.config.steps or (patience is not None and self.stale >= patience)

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        """Within it, the first process has a tracker."""
        if self.rank > 0:
            yield
            return
        if self.step == 0:  # what an attempt without a checkpoint left
            for name in ("metrics.jsonl", "samples.jsonl"):
                (self.out / name).unlink(missing_ok=True)
        about = {"train": asdict(self.config), "model": asdict(self.model.config)}
        self.tracker = Tracker(self.out, self.execution.trackers, about, self.step)
        try:
            yield
        finally:
            self.tracker.close()

    def _train_step(self, x: Tensor, y: Tensor, lr: float, is_asked: bool) -> tuple[Tensor, Tensor, bool]:
        """Update the weights once; returns the mean loss, the norm of the gradients before they are clipped, and
        whether any process is asked to stop. Where loss or norm is not finite, the weights stay as they are."""
        parts = self.config.micro_batches
        losses = []
        for number, (part_x, part_y) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True), start=1):
            if self.ddp:
                self.ddp.is_last = number == parts
            loss = self.loss(part_x, part_y) / parts
            loss.backward()
            losses.append(loss.detach())
        loss = torch.stack(losses).sum()
        if self.ddp:
            self.ddp.finish()
            loss, asked = mean_over_processes(torch.stack([loss, loss.new_tensor(is_asked)])).unbind()
            is_asked = bool(asked > 0)
        grad_norm = clip_grad_norm(self.model.parameters(), self.config.max_grad_norm)
        if torch.isfinite(loss + grad_norm):
            self.skipped_in_a_row = 0
            self.smoothed = loss if self.smoothed is None else self.smoothed.lerp(loss, _SMOOTHING)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * group.get("lr_scale", 1.0)
                optimizer.step()
        else:
            self._skip(float(loss), float(grad_norm))
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return loss, grad_norm, is_asked

    def _skip(self, loss: float, grad_norm: float) -> None:
        self.skipped += 1
        self.skipped_in_a_row += 1
        what = f"The loss is {loss} and the gradient norm {grad_norm} at step {self.step + 1:,}"
        if self.skipped_in_a_row < _SKIPPED:
            log.warning("%s: the step is skipped.", what)
            return
        saved = newest_checkpoint(self.out)
        raise UserError(
            f"{what}, the {_SKIPPED}th in a row: the training has diverged. Lower train.max_lr; "
            f"{f'the last good checkpoint is {saved}' if saved else 'no checkpoint was saved'}."
        )

    def _row(
        self, loss: float, grad_norm: float, lr: float, seconds: float, mean_seconds: float, peak: float
    ) -> dict[str, Any]:
        config, model = self.config, self.model.config
        smoothed = loss if self.smoothed is None else float(self.smoothed)
        tokens = config.batch_size * model.context_length
        log.info(
            "step %s/%s (%d %%)  loss %.3f  lr %.1e  grad norm %.2f  %.0f ms  %s tokens/s  MFU %.0f %%  %.1f min left",
            f"{self.step:,}",
            f"{config.steps:,}",
            100 * self.step // config.steps,
            smoothed,
            lr,
            grad_norm,
            1000 * seconds,
            f"{tokens / seconds:,.0f}",
            100 * tokens * flops_per_token(model) / seconds / peak,
            (config.steps - self.step) * mean_seconds / 60,
        )
        figures = {"step": self.step, "loss": loss, "smoothed_loss": smoothed, "lr": lr, "grad_norm": grad_norm}
        return {**figures, "tokens_per_second": round(tokens / seconds)}

    def _validate(self) -> dict[str, Any]:
        row: dict[str, Any] = {}
        if self.data.valid is not None:
            loss = self.evaluate(self.config.eval_sequences)
            row = {"valid_loss": loss, "valid_bits_per_byte": bits_per_byte(loss, self.data.bytes_per_token)}
            log.info("step %s  validation loss %.4f, %.4f bits per byte", f"{self.step:,}", *row.values())
            self.stale += 1
            if loss < self.best["valid_loss"]:
                self.best, self.stale = {"step": self.step, **row}, 0
        if self.tracker:
            config = SampleConfig(prompts=self.config.sample_prompts, max_new_tokens=self.config.sample_tokens)
            for sample in complete(self.model, self.data.tokenizer, config):
                self.tracker.add_sample(self.step, sample.prompt, sample.text)
        return row

    @torch.no_grad()
    def evaluate(self, sequences: int | None = None) -> float:
        """Mean loss (nats a token) over the validation text: all its whole windows, or ``sequences`` of them, evenly
        spread. A window starts without context."""
        valid, context = self.data.valid, self.model.config.context_length
        if valid is None:
            raise UserError("There is no validation text to evaluate on.")
        count = (len(valid) - 1) // context
        chosen = np.unique(np.linspace(0, count - 1, min(sequences or count, count)).round().astype(int)) * context
        total = 0.0
        ours = chosen[self.rank :: self.processes]
        at_once = self.share // self.config.micro_batches
        for first in range(0, len(ours), at_once):
            starts = ours[first : first + at_once].tolist()
            total += float(self._plain_loss(*windows(valid, starts, context, self.device))) * len(starts)
        if self.ddp:
            total = self.processes * float(mean_over_processes(torch.tensor(total, device=self.device)))
        return total / len(chosen)

    def _directory(self, step: int) -> Path:
        return self.out / step_name(step)

    def _save(self) -> None:
        if self.rank > 0:
            return
        about = {
            "data": self.data.digests,
            "train": asdict(self.config),
            "best": self.best,
            "stale": self.stale,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "smoothed_loss": None if self.smoothed is None else float(self.smoothed),
        }
        try:
            save_training(self._directory(self.step), self.model, self.optimizers, self.step, about)
        except (OSError, RuntimeError, SafetensorError) as error:  # the latter two from the writers' own machine code
            saved = newest_checkpoint(self.out)
            raise UserError(
                f"The checkpoint of step {self.step:,} cannot be saved in {self.out}: {error}. Free some space there; "
                f"{f'the training goes on from {saved}' if saved else 'no checkpoint was saved'}."
            ) from error
        # Those that stay are the same, interrupted or not: they are part of the output.
        kept = [path for path in sorted(self.out.glob("step-*")) if path != self.extra][-self.config.keep_checkpoints :]
        for old in self.out.glob("step-*"):
            if old not in kept and old != self._directory(self.best["step"]):
                shutil.rmtree(old)

    def _finish(self) -> dict[str, Any]:
        last = self._directory(self.step).name
        has_best = self._directory(self.best["step"]).exists()
        figures: dict[str, float | None] = {"valid_loss": None, "valid_bits_per_byte": None}
        if self.data.valid is not None:
            loss = self.evaluate()
            figures = {"valid_loss": loss, "valid_bits_per_byte": bits_per_byte(loss, self.data.bytes_per_token)}
            log.info("whole validation text: loss %.4f, %.4f bits per byte", *figures.values())
        result = {
            "last": last,
            "best": self._directory(self.best["step"]).name if has_best else last,
            "steps": self.step,
            "skipped_steps": self.skipped,
            "tokens": self.step * self.config.batch_size * self.model.config.context_length,
            **figures,  # of the last checkpoint, on the whole validation text
        }
        if self.tracker:
            plot_metrics(read_metrics(self.out / "metrics.jsonl"), self.out / "loss.png")
            (self.out / "training.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
        return result
