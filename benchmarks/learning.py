"""Measure how many fewer tokens the fast recipes need than AdamW with a cosine schedule, on children's stories.

``python -m benchmarks.train --learning [--tokens N] [--seeds 3] [--directory DIR]``. AdamW trains the model of the
preset ``stories-cpu``; the fast recipes are presets. The text is the children's stories in ``../shared/data``, or
generated stories if that folder does not exist. Each recipe runs with three learning rates: AdamW on ``tokens``, a fast
recipe on a part of them. The best rate of each then runs on four times as many tokens, and with each other seed on both
numbers of tokens. The loss is of the whole validation text. ``--directory`` keeps the runs and their curves; a second
call resumes them.
"""

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.texts import story_file
from flows.config import PipelineConfig
from lm.common.execution import Execution
from lm.data.token_shards import TokenShards
from lm.model.config import ModelConfig
from lm.model.flops import parameter_count
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.bpe import train_bpe
from lm.tokenizer.stream import encode_files
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig
from lm.train.pretraining import TrainData, make_trainer

FAST_PRESETS = {"stories-fast": 0.6}
"""Presets of the fast recipes, and the tokens of their trainings over those of AdamW's."""


@dataclass(frozen=True)
class Recipe:
    """A model, its training config, and three learning rates."""

    name: str
    model: ModelConfig
    train: TrainConfig
    rates: tuple[float, float, float]
    token_share: float = 1.0
    """Tokens of its trainings over those of AdamW's."""


def recipes(vocab_size: int) -> list[Recipe]:
    """Return AdamW with a cosine schedule, and the fast recipes."""
    plain = PipelineConfig.load_preset("stories-cpu")
    adamw = replace(plain.train, optimizer="adamw", schedule="cosine", min_lr=0.0)
    found = [Recipe("adamw", replace(plain.model, vocab_size=vocab_size), adamw, (1.5e-3, 3e-3, 6e-3))]
    for name, share in FAST_PRESETS.items():
        fast = PipelineConfig.load_preset(name)
        rates = fast.train.max_lr / 2, fast.train.max_lr, 2 * fast.train.max_lr
        found.append(Recipe(name, replace(fast.model, vocab_size=vocab_size), fast.train, rates, share))
    return found


def read_data(directory: Path) -> TrainData:
    """Return the tokens of the stories. The first call makes and saves them."""
    saved_tokenizer = directory / "tokenizer"
    if not saved_tokenizer.exists():
        vocab_size = PipelineConfig.load_preset("stories-fast").tokenizer.vocab_size
        text = story_file("train", directory)
        Tokenizer(*train_bpe(text, vocab_size, [END_OF_TEXT]), [END_OF_TEXT]).save(saved_tokenizer)
    tokenizer = Tokenizer.load(saved_tokenizer)
    shards = []
    for split in ("train", "valid"):
        folder, part = directory / split, directory / f"{split}.part"
        if not folder.exists():
            encode_files([story_file(split, directory)], tokenizer, part)
            part.rename(folder)
        shards.append(TokenShards(sorted(folder.glob("*.bin")), tokenizer.size))
    return TrainData(shards[0], shards[1], tokenizer, 1.0)


def train_for_loss(
    recipe: Recipe, lr: float, tokens: int, data: TrainData, directory: Path, device: str, seed: int = 0
) -> float:
    """Train, or resume an earlier run, and return the validation loss."""
    steps = round(tokens / (recipe.train.batch_size * recipe.model.context_length))
    config = replace(
        recipe.train,
        steps=steps,
        max_lr=lr,
        min_lr=min(recipe.train.min_lr, lr),
        warmup_steps=max(1, round(0.05 * steps)),
        eval_interval=max(1, steps // 8),
        checkpoint_interval=max(1, steps // 8),
        sample_tokens=0,
        seed=seed,
    )
    out = directory / f"{recipe.name}-{lr:g}-{tokens}{f'-seed{seed}' if seed else ''}"
    if not (out / "training.json").exists():
        torch._dynamo.reset()  # else the earlier recipes count toward the recompilation limit
        trainer = make_trainer(config, recipe.model, data, Execution(device=device), out)
        trainer.resume(out)
        trainer.run()
    loss = float(json.loads((out / "training.json").read_text())["valid_loss"])
    print(f"{recipe.name} lr {lr:g} seed {seed} {tokens:,} tokens: loss {loss:.4f}", file=sys.stderr, flush=True)
    return loss


def compare(tokens: int, data: TrainData, directory: Path, device: str, seeds: int = 1) -> dict[str, Any]:
    """Train all recipes. Return their losses, and for each fast recipe the part of AdamW's tokens that it needs for the
    mean loss of AdamW's longest trainings: the mean over the seeds, and its standard error."""
    result: dict[str, Any] = {}
    target = math.nan
    for recipe in recipes(data.tokenizer.size):
        budget = round(recipe.token_share * tokens)
        losses = {lr: train_for_loss(recipe, lr, budget, data, directory, device) for lr in recipe.rates}
        best = min(recipe.rates, key=losses.__getitem__)
        short, long = (
            [train_for_loss(recipe, best, count, data, directory, device, seed) for seed in range(seeds)]
            for count in (budget, 4 * budget)
        )
        result[recipe.name] = {
            "parameters": parameter_count(recipe.model)["total"],
            "rates": {f"{lr:g}": round(loss, 4) for lr, loss in losses.items()},
            f"{budget:,} tokens": [round(loss, 4) for loss in short],
            f"{4 * budget:,} tokens": [round(loss, 4) for loss in long],
        }
        if recipe.name == "adamw":
            target = fmean(long)
            continue
        parts = [tokens_for(target, budget, *pair) / (4 * tokens) for pair in zip(short, long, strict=True)]
        error = stdev(parts) / math.sqrt(seeds) if seeds > 1 else None
        result[recipe.name] |= {"token_part": round(fmean(parts), 4), "token_part_error": error and round(error, 4)}
    return result


def tokens_for(target: float, tokens: int, loss: float, later: float) -> float:
    """Return the number of tokens for the loss ``target``.

    It is interpolated linearly over the logarithm of the tokens, from ``loss`` at ``tokens`` and ``later`` at four
    times as many.
    """
    if later >= loss:
        return math.inf
    return tokens * 4 ** ((loss - target) / (loss - later))
