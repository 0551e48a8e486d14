"""How many tokens the fast recipe needs: AdamW with a cosine against it, on children's stories.

``python -m benchmarks.train --learning [--tokens N] [--directory DIR]``. Data, batch and size of the model are those of
the presets ``stories-cpu``, whose model AdamW trains, and ``stories-fast``. Three learning rates of each recipe, of
AdamW over ``tokens`` and of the fast recipe over 60 % of them; then the best of each over four times as many. Losses
are of the whole validation text. ``--directory`` keeps the runs, with their curves: called again, it goes on.
"""

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.texts import DATA
from flows.config import load_preset
from lm.bpe import train_bpe
from lm.execution import Execution
from lm.metrics import parameter_count
from lm.model import ModelConfig
from lm.pretokens import END_OF_TEXT
from lm.recipe import TrainConfig
from lm.shards import TokenShards, encode_files
from lm.tokenizer import Tokenizer
from lm.trainer import TrainData, Trainer

SHARE = 0.6  # of AdamW's tokens, for the fast recipe


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained, at each of three learning rates."""

    name: str
    model: ModelConfig
    train: TrainConfig
    rates: tuple[float, float, float]


def recipes(vocab_size: int) -> tuple[Recipe, Recipe]:
    """AdamW with a cosine, and the fast one."""
    plain, fast = load_preset("stories-cpu"), load_preset("stories-fast")
    adamw = replace(plain.train, optimizer="adamw", schedule="cosine", min_lr=0.0)
    best = fast.train.max_lr
    return (
        Recipe("adamw", replace(plain.model, vocab_size=vocab_size), adamw, (1.5e-3, 3e-3, 6e-3)),
        Recipe("fast", replace(fast.model, vocab_size=vocab_size), fast.train, (best / 2, best, 2 * best)),
    )


def read_data(directory: Path) -> TrainData:
    """The stories as tokens; made once."""
    found = directory / "tokenizer"
    if not found.exists():
        vocab_size = load_preset("stories-fast").tokenizer.vocab_size
        Tokenizer(*train_bpe(DATA / "stories_train.txt.xz", vocab_size, [END_OF_TEXT]), [END_OF_TEXT]).save(found)
    tokenizer = Tokenizer.load(found)
    shards = []
    for split in ("train", "valid"):
        folder, part = directory / split, directory / f"{split}.part"
        if not folder.exists():
            encode_files([DATA / f"stories_{split}.txt.xz"], tokenizer, part)
            part.rename(folder)
        shards.append(TokenShards(sorted(folder.glob("*.bin")), tokenizer.size))
    return TrainData(shards[0], shards[1], tokenizer, 1.0)


def loss_of(recipe: Recipe, lr: float, tokens: int, data: TrainData, directory: Path, device: str) -> float:
    """The validation loss after a run, which goes on where an earlier one ended."""
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
    )
    out = directory / f"{recipe.name}-{lr:g}-{tokens}"
    if not (out / "training.json").exists():
        torch._dynamo.reset()  # or it would count the recipes before as versions of this one
        trainer = Trainer(config, recipe.model, data, Execution(device=device), out)
        trainer.resume(out)
        trainer.run()
    loss = float(json.loads((out / "training.json").read_text())["valid_loss"])
    print(f"{recipe.name:6} lr {lr:<8g} {tokens:>12,} tokens: loss {loss:.4f}", file=sys.stderr, flush=True)
    return loss


def compare(tokens: int, data: TrainData, directory: Path, device: str) -> dict[str, Any]:
    """Run what the module's docstring says; the losses, and how many times fewer tokens the fast recipe needs."""
    adamw, fast = recipes(data.tokenizer.size)
    found: dict[str, Any] = {
        "parameters": {recipe.name: parameter_count(recipe.model)["total"] for recipe in (adamw, fast)}
    }
    budgets = {recipe.name: round(share * tokens) for recipe, share in ((adamw, 1.0), (fast, SHARE))}
    ends: dict[str, tuple[float, float]] = {}  # losses at the two budgets
    for recipe in (adamw, fast):
        budget = budgets[recipe.name]
        losses = {lr: loss_of(recipe, lr, budget, data, directory, device) for lr in recipe.rates}
        best = min(recipe.rates, key=losses.__getitem__)
        ends[recipe.name] = losses[best], loss_of(recipe, best, 4 * budget, data, directory, device)
        found[recipe.name] = {
            f"{budget:,} tokens": {f"{lr:g}": round(loss, 4) for lr, loss in losses.items()},
            f"{4 * budget:,} tokens": {f"{best:g}": round(ends[recipe.name][1], 4)},
        }
    target = ends["adamw"][1]
    return found | {"tokens_to_loss": 4 * tokens / tokens_for(target, budgets["fast"], *ends["fast"])}


def tokens_for(target: float, tokens: int, loss: float, later: float) -> float:
    """The tokens that ``target`` wants, on the line through a loss at ``tokens`` and a ``later`` one at four times as
    many, over the logarithm of the tokens."""
    if later >= loss:
        return math.inf
    return tokens * 4 ** ((loss - target) / (loss - later))
