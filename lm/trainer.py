"""The training loop: batches, optimizer steps, evaluation, checkpoints, samples.

Source: CS336 assignment 1 (section 5). Every batch is a function of (seed, step) alone, so a run that is resumed draws
the batches that it would have drawn.
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.bounds import FORM, bounded, check_bounds
from lm.checkpoint import load_training, newest_checkpoint, read_description, save_training
from lm.data import Tokens, check_length, get_batch, windows
from lm.device import choose_device
from lm.errors import UserError
from lm.execution import Execution
from lm.generate import SampleConfig, complete
from lm.metrics import bits_per_byte, flops_per_token, plot_metrics, read_metrics
from lm.model import ModelConfig, TransformerLM
from lm.optim import AdamW, Muon, clip_grad_norm, lr_cosine_schedule
from lm.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_COMPILE_FLOPS = 1e14  # compiling takes half a minute; a shorter run would lose more than it gains


@dataclass(frozen=True)
class TrainConfig:
    """How the model is trained. Tokens seen: steps · batch_size · model.context_length."""

    __pydantic_config__ = FORM

    steps: int = bounded(5_000, ge=1)
    """Optimizer steps."""
    batch_size: int = bounded(32, ge=1)
    """Sequences a step."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw for every parameter; or muon for the matrices of the blocks and adamw for the rest."""
    max_lr: float = bounded(1e-3, ge=0)
    """Learning rate after the warm-up."""
    min_lr: float = bounded(1e-4, ge=0)
    """Learning rate at the end of the cosine."""
    warmup_steps: int = bounded(200, ge=0)
    """Steps over which the learning rate rises from 0."""
    beta1: float = bounded(0.9, ge=0, lt=1)
    """Decay of AdamW's mean of gradients."""
    beta2: float = bounded(0.95, ge=0, lt=1)
    """Decay of AdamW's mean of squared gradients."""
    weight_decay: float = bounded(0.1, ge=0)
    """Decoupled weight decay of the matrices; norm gains have none."""
    max_grad_norm: float = bounded(1.0, gt=0)
    """Gradients are scaled down to this common L2 norm when theirs is greater."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 runs the matrix products in it (autocast); weights and optimizer state stay float32."""
    seed: int = bounded(0, ge=0)
    """Seed of the initial weights and of the batches."""
    eval_interval: int = bounded(500, ge=1)
    """Steps between two validations, each with a sample. The last step is validated too."""
    eval_sequences: int = bounded(64, ge=1)
    """Sequences of a validation, evenly spread over the validation text: the same ones each time, so that the best
    checkpoint can be told. The end of a run is measured on the whole text."""
    checkpoint_interval: int = bounded(500, ge=1)
    """Steps between two checkpoints."""
    keep_checkpoints: int = bounded(2, ge=1)
    """Newest checkpoints kept; the best one is kept besides."""
    sample_prompts: list[str] = field(default_factory=lambda: ["Once upon a time"])
    """Prompts of the samples drawn at each validation."""
    sample_tokens: int = bounded(60, ge=0)
    """Most tokens of such a sample."""

    def __post_init__(self) -> None:
        check_bounds(self, "train")
        if self.min_lr > self.max_lr:
            raise UserError(f"train.min_lr {self.min_lr} must not be above train.max_lr {self.max_lr}.")


@dataclass
class TrainData:
    """What a run learns from: token sequences, their tokenizer, and bytes a token on the validation text."""

    train: Tokens
    valid: Tokens | None
    tokenizer: Tokenizer
    bytes_per_token: float


def make_optimizers(model: TransformerLM, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of a run over the parameters of ``model``: matrices decayed, norm gains not."""
    hidden, matrices, gains = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            gains.append(parameter)
        elif config.optimizer == "muon" and name.startswith("layers."):
            hidden.append(parameter)
        else:
            matrices.append(parameter)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [AdamW(groups, config.max_lr, (config.beta1, config.beta2))]
    if hidden:
        optimizers.append(Muon(hidden, config.max_lr, weight_decay=config.weight_decay))
    return optimizers


class Trainer:
    """One training run that writes to a directory: ``metrics.jsonl``, ``samples.jsonl``, ``loss.png``,
    ``step-NNNNNNN/`` checkpoints and at the end ``training.json``, which names the best and the last of them."""

    def __init__(
        self, config: TrainConfig, model_config: ModelConfig, data: TrainData, execution: Execution, out: Path
    ) -> None:
        if model_config.vocab_size != data.tokenizer.size:
            raise UserError(
                f"model.vocab_size is {model_config.vocab_size}, but the tokenizer has {data.tokenizer.size:,} ids; "
                "leave it out to follow the tokenizer."
            )
        check_length(data.train, model_config.context_length, "training text")
        if data.valid is not None:
            check_length(data.valid, model_config.context_length, "validation text")
        torch.set_num_threads(execution.workers)
        torch.manual_seed(config.seed)
        self.config, self.data, self.execution, self.out = config, data, execution, out
        self.device = choose_device(execution.device)
        self.model = TransformerLM(model_config, device=self.device)
        self.optimizers = make_optimizers(self.model, config)
        self.loss = self._compiled_loss()
        self.step = 0
        out.mkdir(parents=True, exist_ok=True)
        self.best: dict[str, Any] = {"step": 0, "valid_loss": math.inf}

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _plain_loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self._autocast():
            logits = self.model(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    def _compiled_loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        config, model = self.config, self.model.config
        flops = config.steps * config.batch_size * model.context_length * flops_per_token(model)
        if not self.execution.compile or flops < _COMPILE_FLOPS:
            return self._plain_loss
        compiled = torch.compile(self._plain_loss)
        try:  # it compiles at its first call
            x, y = get_batch(self.data.train, config.batch_size, model.context_length, self.device)
            compiled(x, y).backward()
        except Exception as error:  # no compiler, or a device that is not supported: slower, and no reason to stop
            log.warning("torch.compile does not work here, training runs without: %s", str(error).partition("\n")[0])
            return self._plain_loss
        finally:
            self.model.zero_grad(set_to_none=True)
        return compiled

    def resume(self, previous: Path) -> bool:
        """Go on from the newest intact checkpoint of an unfinished run in ``previous``; False when there is none."""
        newest = newest_checkpoint(previous)
        if newest is None:
            return False
        try:
            for directory in previous.glob("step-*"):
                if read_description(directory):
                    shutil.copytree(directory, self.out / directory.name)
            self.step = load_training(self.out / newest.name, self.model, self.optimizers)
        except (OSError, shutil.Error) as error:  # another run of the same training is still writing there
            log.warning("The checkpoints in %s cannot be taken over: %s", previous, error)
            shutil.rmtree(self.out)
            self.out.mkdir()
            return False
        best = (read_description(newest) or {}).get("best", self.best)
        if self._directory(best["step"]).exists():  # else a later one will be the best
            self.best = best
        for name in ("metrics.jsonl", "samples.jsonl"):
            for row in read_metrics(previous / name):
                if row["step"] <= self.step:
                    self._append(name, row)
        log.info("Training resumes at step %s from %s.", f"{self.step:,}", newest)
        return True

    def run(self, progress: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
        """Train to the last step and return what ``training.json`` holds; ``progress`` is told each finished step."""
        config, context = self.config, self.model.config.context_length
        started, first_step = time.perf_counter(), self.step
        last_logged, last_time = self.step, started
        while self.step < config.steps:
            lr = self._set_lr()
            generator = np.random.default_rng((config.seed, self.step))
            x, y = get_batch(self.data.train, config.batch_size, context, self.device, generator)
            loss = self.loss(x, y)
            loss.backward()
            grad_norm = clip_grad_norm(self.model.parameters(), config.max_grad_norm)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.step += 1
            row: dict[str, Any] = {}
            last = self.step == config.steps
            logs = last or self.step == 1 or self.step % self.execution.log_interval == 0
            validates = last or self.step % config.eval_interval == 0
            saves = last or self.step % config.checkpoint_interval == 0
            if logs or validates or saves:
                self._check_finite(float(loss.detach()), float(grad_norm))
            if logs:
                now = time.perf_counter()
                rate = (self.step - last_logged) * config.batch_size * context / (now - last_time)
                last_logged, last_time = self.step, now
                row = self._row(
                    float(loss.detach()), float(grad_norm), lr, rate, (now - started) / (self.step - first_step)
                )
            if validates:
                row = {"step": self.step, "loss": float(loss.detach()), "lr": lr} | row | self._validate()
                last_time = time.perf_counter()
            if row:
                self._append("metrics.jsonl", row)
            # After the row, which a run that resumes here finds in metrics.jsonl.
            if saves or self.step == self.best["step"]:
                self._save()
                last_time = time.perf_counter()
            progress(self.step)
        return self._finish()

    def _set_lr(self) -> float:
        config = self.config
        lr = lr_cosine_schedule(self.step + 1, config.max_lr, config.min_lr, config.warmup_steps, config.steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        return lr

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        saved = sorted(self.out.glob("step-*"))
        raise UserError(
            f"The loss is {loss} and the gradient norm {grad_norm} at step {self.step:,}: the training has diverged. "
            f"Lower train.max_lr; {f'the last checkpoint is {saved[-1]}' if saved else 'no checkpoint was saved'}."
        )

    def _row(self, loss: float, grad_norm: float, lr: float, rate: float, seconds_a_step: float) -> dict[str, Any]:
        log.info(
            "step %s/%s (%d %%)  loss %.3f  lr %.1e  grad norm %.2f  %s tokens/s  %s left",
            f"{self.step:,}",
            f"{self.config.steps:,}",
            100 * self.step // self.config.steps,
            loss,
            lr,
            grad_norm,
            f"{rate:,.0f}",
            f"{(self.config.steps - self.step) * seconds_a_step / 60:.1f} min",
        )
        return {"step": self.step, "loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens_per_second": round(rate)}

    def _validate(self) -> dict[str, Any]:
        row: dict[str, Any] = {}
        if self.data.valid is not None:
            loss = self.evaluate(self.config.eval_sequences)
            row = {"valid_loss": loss, "valid_bits_per_byte": bits_per_byte(loss, self.data.bytes_per_token)}
            log.info("step %s  validation loss %.4f, %.4f bits per byte", f"{self.step:,}", *row.values())
            if loss < self.best["valid_loss"]:
                self.best = {"step": self.step, **row}
        sample = SampleConfig(max_new_tokens=self.config.sample_tokens)
        for number, prompt in enumerate(self.config.sample_prompts):
            text = complete(self.model, self.data.tokenizer, prompt, sample, seed=number)
            self._append("samples.jsonl", {"step": self.step, "prompt": prompt, "text": text})
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
        for first in range(0, len(chosen), self.config.batch_size):
            starts = chosen[first : first + self.config.batch_size].tolist()
            total += float(self._plain_loss(*windows(valid, starts, context, self.device))) * len(starts)
        return total / len(chosen)

    def _directory(self, step: int, parent: Path | None = None) -> Path:
        return (parent or self.out) / f"step-{step:07d}"

    def _save(self) -> None:
        about = {"best": self.best, "train": asdict(self.config)}
        save_training(self._directory(self.step), self.model, self.optimizers, self.step, about)
        kept = sorted(self.out.glob("step-*"))[-self.config.keep_checkpoints :]
        for old in self.out.glob("step-*"):
            if old not in kept and old != self._directory(self.best["step"]):
                shutil.rmtree(old)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        with (self.out / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _finish(self) -> dict[str, Any]:
        rows = read_metrics(self.out / "metrics.jsonl")
        plot_metrics(rows, self.out / "loss.png")
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
            "tokens": self.step * self.config.batch_size * self.model.config.context_length,
            **figures,  # of the last checkpoint, on the whole validation text
        }
        (self.out / "training.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
        return result
