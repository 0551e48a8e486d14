"""The choice of a configuration from its budget: what the training may cost in time, FLOPs or tokens.

The best size of a model and its learning rate follow from a scaling law. It is fitted to trainings on stories for
children with a vocabulary of 2,048: the minima at 1e12 and 3e12 FLOPs of twelve trainings (benchmarks/RESULTS.md), and
those at 3e12, 1e13 and 3e13 FLOPs of the 45 of the sweep isoflop (docs/experiments-measured.md). Above that it is
extrapolation.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product

from lm.common.errors import UserError
from lm.distributed.plan import repays_compilation
from lm.experiments.config import Budget, BudgetUnit
from lm.experiments.speed import Speed
from lm.model.config import ModelConfig
from lm.model.flops import flops_per_token, parameter_count
from lm.train.config import TrainConfig

FindLargestBatch = Callable[[ModelConfig, TrainConfig], int]

_VOCAB_SIZES = [1 << power for power in range(9, 16)]
_MAX_HEAD_SHARE = 0.35  # of the FLOPs
_MAX_EPOCHS = 4  # text that is repeated up to here teaches almost as much as new text (Muennighoff et al. 2023)
MIN_STEPS = 50  # of a useful training
_MIN_BATCH_SIZE = 4
_EVALUATIONS = 10
_PROBE_SECONDS = 3.0


@dataclass(frozen=True)
class Choice:
    """A configuration that spends a budget, and why it was chosen."""

    vocab_size: int
    model: ModelConfig
    train: TrainConfig
    reasons: list[str]
    steps_in_time: int | None = None
    """With a budget of time: about how many steps it pays for. ``train.steps`` leaves room for a faster machine."""

    @property
    def expected_steps(self) -> int:
        """About how many steps the training takes."""
        return self.train.steps if self.steps_in_time is None else min(self.steps_in_time, self.train.steps)


def choose_configuration(
    budget: Budget,
    train_bytes: int,
    valid_bytes: int,
    threads: int,
    processes: int,
    guess: Callable[[], float],
    measure: Callable[[ModelConfig, TrainConfig, float], Speed],
    largest_batch: FindLargestBatch,
) -> Choice:
    """Choose vocabulary, shape, batch, learning rate and steps for a text of ``train_bytes``.

    ``threads`` prepare the text; ``processes``, a power of two, train. The size of the model follows the scaling law of
    :func:`best_flops_per_token`. A budget of time is spent at the speed that ``measure`` returns for the chosen
    configuration after some seconds of steps; the first that is measured follows from ``guess``, in FLOP/s.
    ``largest_batch`` returns how many sequences fit the memory.

    Raises UserError if the budget is too small for this text, a text is too short for it, or no model fits the memory.
    """

    def choose(amount: float, unit: BudgetUnit = "flops") -> Choice:
        choose_shape = _choose_for_tokens if unit == "tokens" else _choose_for_flops
        return _fit_machine(partial(choose_shape, amount, train_bytes), processes, largest_batch)

    if budget.unit != "seconds":
        choice = choose(budget.amount, budget.unit)
        return _check(replace(choice, reasons=[*choice.reasons, *_describe(choice, train_bytes)]), valid_bytes)
    # Prefect, checkpoints and samples take 10 s. A thread prepares 25 MB a second, in the stages from ingest to encode.
    left = budget.amount - 10.0 - (train_bytes + valid_bytes) / (25e6 * threads)
    flops_per_second = guess()
    speeds: list[tuple[tuple[ModelConfig, int], Speed]] = []
    probing_seconds = 0.0
    # Larger models run faster, so the first speed may be too low for the model that it is to choose.
    while len(speeds) < 2 or (len(speeds) < 8 and probing_seconds < 0.04 * budget.amount):
        choice = choose(max(1e9, flops_per_second * left))
        probe = (choice.model, choice.train.batch_size)
        if known := [speed for measured, speed in speeds if measured == probe]:
            speed = known[-1]
            break
        speed = measure(choice.model, choice.train, _PROBE_SECONDS)
        speeds.append((probe, speed))
        left, probing_seconds = left - speed.seconds, probing_seconds + speed.seconds
        flops_per_second = speed.flops_per_step / speed.step_seconds
    # A shared machine is faster or slower for seconds: the choice is measured for longer, if the budget pays for it.
    if (last_probe_seconds := min(0.01 * budget.amount, 60.0)) > _PROBE_SECONDS:
        speed = measure(choice.model, choice.train, last_probe_seconds)
        left -= speed.seconds
    measured_steps = choice.train.steps
    choice, seconds = _spend(left, choice, speed, train_bytes, valid_bytes)
    if len({repays_compilation(steps * speed.flops_per_step) for steps in (measured_steps, choice.train.steps)}) == 2:
        # The steps that were measured were compiled, and those of this number are not, or the other way round.
        speed = measure(choice.model, choice.train, _PROBE_SECONDS)
        choice, seconds = _spend(left - speed.seconds, choice, speed, train_bytes, valid_bytes)
    reason = (
        f"A step takes {1e3 * speed.step_seconds:,.0f} ms on this machine "
        f"({speed.flops_per_step / speed.step_seconds:.2g} FLOP/s). "
        f"Of {budget.amount:,.0f} s, {max(0, seconds):,.0f} s are left for the training, after the other stages, the "
        "measurement of the speed and the evaluation of the whole validation text."
    )
    if (left_over := seconds - choice.expected_steps * speed.step_seconds) > 0.05 * budget.amount:
        reason += f" {left_over:,.0f} s are left over, because {_MAX_EPOCHS} epochs of the text take less time."
    else:
        reason += " It ends when they have passed, whatever the speed is then."
    return _check(replace(choice, reasons=[reason, *choice.reasons, *_describe(choice, train_bytes)]), valid_bytes)


def best_flops_per_token(flops: float) -> float:
    """Return the training FLOPs per token of the model that learns most from ``flops``. The head counts."""
    return 8.8e5 * (flops / 1e12) ** 0.468


def best_lr(d_model: int) -> float:
    """Return Muon's peak learning rate for a width. It falls with the root of the width, as in the trainings of the
    law, from the one that was tuned for the preset stories-fast (benchmarks/RESULTS.md)."""
    return float(f"{0.005 * math.sqrt(256 / d_model):.2g}")


def _spend(left: float, choice: Choice, speed: Speed, train_bytes: int, valid_bytes: int) -> tuple[Choice, float]:
    """Give a choice ``left`` seconds. Return it, and the seconds of the training.

    The clock ends the training, because the speed of a shared machine changes by the minute. Its steps leave room for a
    machine that becomes faster, but not for more epochs.
    """
    # Of an evaluation, whose forward pass takes 35 % of a step.
    sequence_seconds = 0.35 * speed.step_seconds / choice.train.batch_size
    sequences = valid_bytes / bytes_per_token(choice.vocab_size) / choice.model.context_length
    seconds = left - speed.start_seconds - sequences * sequence_seconds
    evaluation = _EVALUATIONS * choice.train.eval_sequences * sequence_seconds
    most_tokens = _most_tokens(train_bytes, choice.vocab_size)
    most_steps = int(most_tokens / choice.model.context_length / choice.train.batch_size)
    steps = int((seconds - evaluation) / speed.step_seconds)
    train = with_steps(choice.train, min(int(1.5 * steps), most_steps))
    train = replace(train, max_seconds=round(max(1.0, seconds), 1))
    return replace(choice, train=train, steps_in_time=steps), seconds


def bytes_per_token(vocab_size: int) -> float:
    """Return about how many bytes of English a token has: a fit to BPE tokenizers of 512 to 32,768 tokens."""
    return min(4.5, 0.62 * math.log(vocab_size) - 1.5)


def _check(choice: Choice, valid_bytes: int) -> Choice:
    if choice.expected_steps < MIN_STEPS:
        raise UserError(
            f"The budget is too small: it pays for fewer than {MIN_STEPS} steps of the smallest useful training. "
            "Give a larger budget, or less text."
        )
    context, valid_tokens = choice.model.context_length, valid_bytes / bytes_per_token(choice.vocab_size)
    if 0 < valid_tokens <= context:
        raise UserError(
            f"The validation text has about {valid_tokens:,.0f} tokens, and the model reads {context:,} at a time. "
            "Give more validation text."
        )
    return choice


def _fit_machine(choose: Callable[[float], Choice], processes: int, largest_batch: FindLargestBatch) -> Choice:
    """Return what ``choose`` chooses, or a smaller model if that one does not fit the memory.

    ``choose`` gets the FLOPs per token that the model must stay below. Each process gets a sequence of each batch, and
    the batch is divided into micro-batches that fit the memory.
    """
    choice = choose(math.inf)
    parameters = parameter_count(choice.model)["total"]
    while largest_batch(choice.model, choice.train) < processes:
        choice = choose(estimate_flops_per_token(choice.model))
        reason = f"A model of {parameters:,} parameters does not fit the memory, so this one is the largest that does."
        choice = replace(choice, reasons=[*choice.reasons, reason])
    train = choice.train
    if train.batch_size < processes:
        train = with_steps(replace(train, batch_size=processes), train.steps * train.batch_size // processes)
    largest, parts = max(processes, largest_batch(choice.model, train)), 1
    while train.batch_size // parts > largest:
        parts *= 2
    return replace(choice, train=replace(train, gradient_accumulation_steps=parts))


def _choose_for_tokens(tokens: float, train_bytes: int, below: float) -> Choice:
    """Choose the model whose best number of tokens is ``tokens``, or four epochs of the text if they are fewer.

    It has less than ``below`` FLOPs per token.
    """
    low, high = 1e6, 1e27
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle / best_flops_per_token(middle) < tokens else (low, middle)
    shape = _nearest_shape(best_flops_per_token(low), train_bytes, below)
    most_tokens = _most_tokens(train_bytes, shape.vocab_size or 0)
    if tokens > most_tokens:
        reason = f"The text has {most_tokens / 1e6:,.1f} million tokens in {_MAX_EPOCHS} epochs: less than the budget."
        choice = _choose_for_tokens(most_tokens, train_bytes, below)
        return replace(choice, reasons=[reason, *choice.reasons])
    choice = _choose_for_flops(low, train_bytes, below)
    return replace(choice, train=_with_tokens(choice, tokens))


def _most_tokens(train_bytes: int, vocab_size: int) -> float:
    return _MAX_EPOCHS * train_bytes / bytes_per_token(vocab_size)


def _choose_for_flops(flops: float, train_bytes: int, below: float) -> Choice:
    """Choose the model that learns most from ``flops``, with at most four epochs of the text.

    It has less than ``below`` FLOPs per token.
    """
    target = best_flops_per_token(flops)
    best = _nearest_shape(target, train_bytes, below)
    most_tokens = _most_tokens(train_bytes, best.vocab_size or 0)
    reason = f"The scaling law gives {target:.3g} FLOPs a token to a training of {flops:.3g} FLOPs."
    if flops / flops_per_token(best) > most_tokens:
        best = _nearest_shape(flops / most_tokens, train_bytes, below)
        most_tokens = _most_tokens(train_bytes, best.vocab_size or 0)
        reason += f" More than {_MAX_EPOCHS} epochs of the text would be needed, so the model is larger."
    choice = Choice(best.vocab_size or 0, best, TrainConfig(), [reason])
    return replace(choice, train=_with_tokens(choice, min(flops / flops_per_token(best), most_tokens)))


def _nearest_shape(target: float, train_bytes: int, below: float) -> ModelConfig:
    """Return the model whose FLOPs per token are nearest to ``target``, but less than ``below``, and for which the text
    has enough tokens."""

    def has_enough_tokens(shape: ModelConfig) -> bool:
        fewest = MIN_STEPS * _MIN_BATCH_SIZE * shape.context_length
        return _most_tokens(train_bytes, shape.vocab_size or 0) >= fewest

    if not (shapes := list(filter(has_enough_tokens, _shapes(train_bytes)))):
        tokens = _most_tokens(train_bytes, _VOCAB_SIZES[0])
        raise UserError(f"The text is too short to train on: {_MAX_EPOCHS} epochs have about {tokens:,.0f} tokens.")
    if not (smaller := [shape for shape in shapes if estimate_flops_per_token(shape) < below]):
        raise UserError("Not even the smallest model fits the memory. Free memory, or train in fewer processes.")
    return min(smaller, key=lambda shape: abs(math.log(estimate_flops_per_token(shape) / target)))


def estimate_flops_per_token(shape: ModelConfig) -> int:
    """Return :func:`lm.model.flops.flops_per_token` of a shape of this module, without making the model."""
    width, vocab_size = shape.d_model, shape.vocab_size or 0
    block = 4 * width**2 + 3 * width * shape.d_ff
    forward = 2 * (shape.num_layers * block + width * vocab_size) + 2 * shape.num_layers * width * shape.context_length
    return 3 * forward


@lru_cache(maxsize=16)
def _shapes(train_bytes: int) -> list[ModelConfig]:
    """Return models of all sizes, each with the largest vocabulary that suits it and the text."""
    shapes = []
    most_ids = train_bytes**0.47  # 512 for 0.6 MB, 4,096 for 50 MB, 32,768 for 4 GB
    # From 128 on with heads of 64: on a CPU, width 160 with heads of 32 takes a quarter more time per FLOP.
    widths = [32, 64, 96, *range(128, 1024, 64), *range(1024, 8192, 256)]
    for width, ratio in product(widths, (96, 64, 48)):
        shape = ModelConfig(
            _VOCAB_SIZES[0],
            context_length=256 if width < 512 else 1024,
            d_model=width,
            num_layers=max(1, round(width / ratio)),
            num_heads=width // (64 if width >= 128 else 32),
            d_ff=32 * round(width * 8 / 3 / 32),
            qk_norm=True,
            zero_init_residual=True,
        )
        for vocab_size in _VOCAB_SIZES[1:]:
            larger = replace(shape, vocab_size=vocab_size)
            is_light = 6 * width * vocab_size <= _MAX_HEAD_SHARE * estimate_flops_per_token(larger)
            if vocab_size <= 1.5 * most_ids and is_light:
                shape = larger
        shapes.append(shape)
    return shapes


def _with_tokens(choice: Choice, tokens: float) -> TrainConfig:
    """Return the training of ``tokens``. The batch grows with their square root."""
    context = choice.model.context_length
    batch_size = max(_MIN_BATCH_SIZE, 1 << max(0, round(math.log2(2 * math.sqrt(tokens) / context))))
    config = TrainConfig(
        batch_size=batch_size,
        optimizer="muon",
        max_lr=best_lr(choice.model.d_model),
        min_lr=0.0,
        embedding_lr_scale=10.0,
        schedule="wsd",
        decay_fraction=0.5,
        precision="auto",
    )
    return with_steps(config, round(tokens / batch_size / context))


def with_steps(config: TrainConfig, steps: int) -> TrainConfig:
    """Return the training with this number of steps, at least two. Warm-up and intervals are shares of them."""
    steps = max(2, steps)
    interval = max(1, steps // _EVALUATIONS)
    return replace(
        config,
        steps=steps,
        warmup_steps=max(1, min(round(steps / 20), steps // 2 - 1)),
        eval_interval=interval,
        checkpoint_interval=interval,
    )


def _describe(choice: Choice, train_bytes: int) -> Iterator[str]:
    model, train = choice.model, choice.train
    steps = choice.expected_steps
    tokens = steps * train.batch_size * model.context_length
    text_tokens = train_bytes / bytes_per_token(choice.vocab_size)
    yield (
        f"Vocabulary {choice.vocab_size:,}: suits {train_bytes / 1e6:,.1f} MB of text, and the head costs at most "
        f"{100 * _MAX_HEAD_SHARE:.0f} % of the FLOPs."
    )
    yield (
        f"Model: {model.num_layers} layers of {model.d_model}, {parameter_count(model)['total']:,} parameters, "
        f"{flops_per_token(model):.3g} FLOPs a token."
    )
    yield (
        f"Training: {tokens / 1e6:,.1f} million tokens, about {tokens / text_tokens:.1f} epochs, in "
        f"{'about ' if train.max_seconds else ''}{steps:,} steps of {train.batch_size} sequences; learning rate "
        f"{train.max_lr:.2g}."
    )
