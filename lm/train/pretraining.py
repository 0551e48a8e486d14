"""Pretraining, which is next-token prediction on long texts, and its job. Source: CS336 assignment 1 (section 5)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lm.checkpoint.safe_load import load_weights_later
from lm.checkpoint.training_checkpoint import load_model
from lm.common.errors import UserError
from lm.common.execution import Execution
from lm.data.batches import Batch, TokenSequence, batch_starts, check_length, evenly_spaced_starts, gather_batch
from lm.data.mixed_batches import MixedBatches, MixedSource
from lm.data.token_shards import TokenShards
from lm.distributed.process_group import all_reduce_mean, get_data_rank, get_data_world_size, get_world_size
from lm.eval.loss import bits_per_byte
from lm.files.remote_copies import fetch_directory, fetch_files
from lm.hardware.device import choose_device, explain_out_of_memory
from lm.inference.completion import Completion, complete
from lm.inference.config import SampleConfig
from lm.model.config import AdapterConfig, ModelConfig
from lm.model.functional import IGNORE_INDEX
from lm.model.initialization import draw_later
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig
from lm.train.frozen_base import FrozenBase, load_start, refuse_tensor_parallel
from lm.train.objective import Objective
from lm.train.trainer import Trainer
from lm.train.training_job import NO_MEMORY_FOR_MODEL, TrainingJob
from lm.train.training_memory import check_memory


@dataclass
class TrainData:
    """The tokens of a pretraining."""

    train: TokenSequence
    valid: TokenSequence | None
    tokenizer: Tokenizer
    bytes_per_token: float
    """Bytes of text per token of the validation text."""
    digests: dict[str, str] = field(default_factory=dict)
    """Checksums of the input by name. A checkpoint with other checksums is refused."""
    mix: Sequence[MixedSource] = ()
    """The sources of both texts, in their order. Empty: one text without a name."""


class Pretraining(Objective):
    """The objective that predicts each token from the tokens before it.

    Shapes: B sequences of T tokens.

    Raises UserError if the vocabularies of model and tokenizer differ, or if a text is shorter than the context.
    """

    metric_names: Sequence[str] = ("valid_loss", "valid_bits_per_byte")
    is_higher_better = False
    is_evaluation_cheap = True
    is_prefetchable = True
    is_compilable = True

    def __init__(self, config: TrainConfig, model_config: ModelConfig, data: TrainData, device: torch.device) -> None:
        if model_config.vocab_size != data.tokenizer.size:
            raise UserError(
                f"model.vocab_size is {model_config.vocab_size}, but the tokenizer has {data.tokenizer.size:,} ids; "
                "leave it out to use the tokenizer's size."
            )
        self.config, self.data, self.digests, self.device = config, data, data.digests, device
        self.context_length = model_config.context_length
        check_length(data.train, self.context_length, "training text")
        self.mixed: MixedBatches | None = None
        if data.mix:
            sizes = config.batch_size, self.context_length
            self.mixed = MixedBatches(data.mix, *sizes, config.data_order, config.seed, config.steps)
        if data.valid is not None:
            advice = ", or hold out a larger data.valid_fraction of the documents; 0 trains without validation"
            check_length(data.valid, self.context_length, "validation text", advice)
            for source in self._measured_sources():
                name = f"validation text of data.mix.{source.name}"
                check_length(range(source.valid_tokens), self.context_length, name, advice)
        self.tokens_per_step = config.batch_size * self.context_length
        self.rank, self.world_size = get_data_rank(), get_data_world_size()
        self.local_batch_size = config.batch_size // self.world_size

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of a step, (x_BT, y_BT) each; a function of the seed and the step alone."""
        config, tokens = self.config, self.data.train
        if self.mixed:
            starts = self.mixed.starts(step)
        else:
            sizes = len(tokens), config.batch_size, self.context_length
            starts = batch_starts(*sizes, config.data_order, config.seed, step)
        local_starts = starts[self.rank * self.local_batch_size :][: self.local_batch_size]
        x_BT, y_BT = gather_batch(tokens, local_starts, self.context_length, self.device)
        parts = config.gradient_accumulation_steps
        return list(zip(x_BT.chunk(parts), y_BT.chunk(parts), strict=True))

    def weight(self, micro_batch: Batch) -> Tensor:
        """Return the number of targets that count."""
        return (micro_batch[1] != IGNORE_INDEX).sum()

    def loss_sum(self, model: TransformerLM, micro_batch: Batch) -> Tensor:
        """Return the sum of the cross-entropies (nats) of the targets that count."""
        return model.loss(*micro_batch) * self.weight(micro_batch)

    def evaluate(self, model: TransformerLM, is_final: bool) -> dict[str, float]:
        """Return loss and bits per byte of ``eval_sequences`` windows of the validation text, at the end of all. Of
        several sources also those of each, with its name after a slash; the windows are divided among the sources."""
        if self.data.valid is None:
            return {}
        sequences = None if is_final else self.config.eval_sequences
        sources = self._measured_sources()
        if not sources:
            loss = self.validation_loss(model, sequences)
            return {"valid_loss": loss, "valid_bits_per_byte": bits_per_byte(loss, self.data.bytes_per_token)}
        share = sequences and -(-sequences // len(sources))
        starts = [evenly_spaced_starts(source.valid_tokens, self.context_length, share) for source in sources]
        offsets = accumulate((source.valid_tokens for source in sources), initial=0)
        losses = [
            self._mean_loss(model, self.data.valid, [offset + start for start in part])
            for offset, part in zip(offsets, starts, strict=False)
        ]
        # Each source counts by its length, not by the windows of this evaluation, so that the loss is that of the text.
        windows = [(source.valid_tokens - 1) // self.context_length for source in sources]
        loss = sum(map(mul, losses, windows)) / sum(windows)
        metrics = {"valid_loss": loss, "valid_bits_per_byte": bits_per_byte(loss, self.data.bytes_per_token)}
        for source, loss in zip(sources, losses, strict=True):
            metrics[f"valid_loss/{source.name}"] = loss
            metrics[f"valid_bits_per_byte/{source.name}"] = bits_per_byte(loss, source.bytes_per_token)
        return metrics

    def _measured_sources(self) -> list[MixedSource]:
        """Return the sources if each has validation text of its own; else none."""
        return list(self.data.mix) if any(source.valid_tokens for source in self.data.mix) else []

    def validation_loss(self, model: TransformerLM, sequences: int | None = None) -> float:
        """Return the mean loss (nats per token) of the validation text.

        The text is cut into windows of the context length, each without earlier context. ``sequences`` evenly spread
        windows are evaluated, or all.
        """
        valid = self.data.valid
        if valid is None:
            raise UserError("There is no validation text to evaluate on.")
        return self._mean_loss(model, valid, evenly_spaced_starts(len(valid), self.context_length, sequences))

    @torch.no_grad()
    def _mean_loss(self, model: TransformerLM, valid: TokenSequence, starts: list[int]) -> float:
        """Return the mean loss of the windows at ``starts`` in the validation text."""
        loss_sum, weight = 0.0, 0
        share = starts[self.rank :: self.world_size]
        # All ranks call the model equally often, because sharded weights are gathered together.
        padding = starts[: -(-len(starts) // self.world_size) - len(share)]
        batch_size = self.local_batch_size // self.config.gradient_accumulation_steps
        for first in range(0, len(share) + len(padding), batch_size):
            part = (share + padding)[first : first + batch_size]
            x_BT, y_BT = gather_batch(valid, part, self.context_length, self.device)
            y_BT = y_BT.clone()  # it shares memory with x_BT
            y_BT[max(0, len(share) - first) :] = IGNORE_INDEX
            loss_sum += float(self.loss_sum(model, (x_BT, y_BT)))
            weight += int(self.weight((x_BT, y_BT)))
        if get_world_size() > 1:
            sums = torch.tensor([loss_sum, weight], dtype=torch.float64, device=self.device)
            loss_sum, weight = all_reduce_mean(sums).tolist()
        return loss_sum / weight

    def sample(self, model: TransformerLM) -> list[Completion]:
        """Complete the prompts of ``sample_prompts``."""
        config = SampleConfig(prompts=self.config.sample_prompts, max_new_tokens=self.config.sample_tokens)
        return complete(model, self.data.tokenizer, config)


@explain_out_of_memory(NO_MEMORY_FOR_MODEL)
def make_trainer(
    config: TrainConfig,
    model_config: ModelConfig,
    data: TrainData,
    execution: Execution,
    out: Path,
    device: torch.device | None = None,
    start: Path | None = None,
    adapter: AdapterConfig | None = None,
) -> Trainer:
    """Make the trainer of a model with the weights of the checkpoint ``start``, or of a new one.

    With an ``adapter``, that is trained and the weights of ``start`` are not. The initial weights of a new model depend
    on ``config.seed`` alone. Raises UserError if the weights of ``start`` are
    damaged or do not fit ``model_config``, and if memory is too small by prediction or runs out.
    """
    device = device or choose_device(execution.device)
    adapter = adapter or AdapterConfig()
    if start is None and adapter.is_on:
        raise UserError("adapter.rank is set: an adapter needs a model to adapt; name one in train.init_from.")
    refuse_tensor_parallel(execution, adapter)
    check_memory(execution, config, model_config, device, adapter=adapter)
    objective = Pretraining(config, model_config, data, device)
    torch.manual_seed(config.seed)
    base, late = None, None
    if start is not None and adapter.is_on:
        model = load_start(start, device, adapter, model_config)
        base = FrozenBase.adapt(model, start, adapter, config.max_lr)
    else:
        with draw_later() as late:
            model = TransformerLM(model_config, device=device)
        if start is not None:
            load_weights_later(model, load_model(start, is_mapped=True).state_dict(), late, str(start))
    trainer = Trainer(config, model, objective, execution, out, base, late)
    if base and trainer.balance:
        trainer.balance.freeze_biases()
    return trainer


@dataclass(kw_only=True)
class Job(TrainingJob):
    """The inputs and outputs of a pretraining."""

    model: ModelConfig
    train: list[str]
    """Files of training tokens, in order."""
    valid: list[str]
    """Files of validation tokens. Empty: no validation."""
    tokenizer: str
    """Directory of the tokenizer."""
    bytes_per_token: float
    """Bytes of validation text, without separators, per token."""
    start: str = ""
    """Directory of the checkpoint whose weights are the first ones. Default: a new model."""
    checksums: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the token files that are URLs."""
    mix: list[MixedSource] = field(default_factory=list)
    """The sources whose tokens the files hold, one after the other. Default: one text without a name."""

    sections: ClassVar[dict[str, type]] = {"model": ModelConfig}

    def __post_init__(self) -> None:
        sources: list[Any] = self.mix  # of a file: mappings
        self.mix = [MixedSource(**source) if isinstance(source, dict) else source for source in sources]

    def input_files(self) -> list[str]:
        """Return the paths of the token files, the tokenizer and the checkpoint to start from."""
        return [*self.train, *self.valid, self.tokenizer, *([self.start] if self.start else [])]

    def map_paths(self, function: Callable[[str], str]) -> None:
        """Replace each path of an input by ``function`` of it."""
        self.train, self.valid = ([function(path) for path in paths] for paths in (self.train, self.valid))
        self.checksums = {function(path): checksum for path, checksum in self.checksums.items()}
        self.tokenizer = function(self.tokenizer)
        self.start = self.start and function(self.start)

    def make_trainer(self, out: Path, device: torch.device) -> Trainer:
        """Make the trainer of a new model, or of that in ``start``.

        Files at URLs are copied if the disk may hold them.
        """
        tokenizer = Tokenizer.load(fetch_directory(self.tokenizer))
        paths = fetch_files([*self.valid, *self.train], self.checksums, self.execution.download_cache << 30)
        valid, train = (
            TokenShards(part, tokenizer.size) for part in (paths[: len(self.valid)], paths[len(self.valid) :])
        )
        if self.mix and len(train) != (expected := sum(source.train_tokens for source in self.mix)):
            raise UserError(f"The training files hold {len(train):,} tokens, and the sources of the job {expected:,}.")
        valid_tokens = valid if len(valid) else None
        data = TrainData(train, valid_tokens, tokenizer, self.bytes_per_token, self.digests, self.mix)
        start = Path(fetch_directory(self.start)) if self.start else None
        return make_trainer(self.config, self.model, data, self.execution, out, device, start, self.adapter)
