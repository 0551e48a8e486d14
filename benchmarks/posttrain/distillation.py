"""Compare distillation on policy with GRPO on lists of required words: the compute for the same reward.

``python -m benchmarks.posttrain.distillation DIRECTORY [--seeds 0 1 2]``. A small model is trained from scratch to
write lists of the words in a request, and stopped early. GRPO then learns from the share of required words in its own
lists. Another training from the same start learns from the probabilities of that GRPO model, again on its own lists.
Prints for each seed the share of required words in lists for held-out requests, sampled at temperature 1, and the
compute of the two trainings: CPU seconds, and FLOPs of sampling, forward and backward passes and the teacher's forward
passes, without padding. The training of the teacher does not count. ``DIRECTORY`` keeps the figures of each seed.
"""

import argparse
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch

from benchmarks.posttrain.addition import GROUP_SIZE, groups
from benchmarks.posttrain.trainings import answer, make_dialog, responses, train
from benchmarks.posttrain.words import read_problems
from lm.checkpoint.training_checkpoint import load_model, save_training
from lm.data.chat_template import add_chat_tokens
from lm.eval.problems import Problem
from lm.eval.rewards import get_reward
from lm.model.config import ModelConfig
from lm.model.flops import flops_per_token
from lm.model.transformer import TransformerLM
from lm.tokenizer.bpe import train_bpe
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig

WORDS = 200  # the most frequent ones of the requests for stories
LIST_WORDS = (3, 6)
EXAMPLES = 4_000
HELD_OUT = 1_000
MAX_NEW_TOKENS = 24
REWARD = "required_words"
SFT = TrainConfig(
    steps=100,
    batch_size=16,
    optimizer="muon",
    max_lr=0.01,
    min_lr=0.001,
    warmup_steps=20,
    eval_interval=100,
    checkpoint_interval=100,
    sample_tokens=0,
)
REINFORCE = TrainConfig(
    steps=80,
    batch_size=128,
    max_lr=1e-3,
    min_lr=1e-4,
    warmup_steps=5,
    beta2=0.99,
    weight_decay=0,
    eval_interval=80,
    checkpoint_interval=80,
    sample_tokens=0,
)
DISTILL = replace(REINFORCE, batch_size=16, max_lr=2e-3)


def make_problems(count: int, seed: int) -> list[Problem]:
    """Make requests for lists of words, each with a right one as the solution."""
    counts = Counter(chain.from_iterable(problem.ground_truth for problem in read_problems("train")))
    words = sorted(word for word, _ in counts.most_common(WORDS))
    generator = random.Random(seed)
    problems = []
    for _ in range(count):
        chosen = generator.sample(words, generator.randint(*LIST_WORDS))
        text = f"{', '.join(chosen)}."
        problems.append(Problem(f"Write a list with these words: {text}", chosen, text))
    return problems


def make_base(directory: Path, problems: Sequence[Problem], seed: int) -> tuple[Path, Path]:
    """Save a random model, and a tokenizer that has most of the words; return their paths."""
    directory.mkdir(parents=True)
    text, model, tokenizer_path = directory / "lists.txt", directory / "base", directory / "tokenizer"
    text.write_text("\n".join(problem.prompt for problem in problems), encoding="utf-8")
    tokenizer = add_chat_tokens(Tokenizer(*train_bpe(text, 700, [])))
    tokenizer.save(tokenizer_path)
    torch.manual_seed(seed)
    config = ModelConfig(
        tokenizer.size, context_length=128, d_model=128, num_layers=3, num_heads=4, d_ff=352, qk_norm=True
    )
    save_training(model, TransformerLM(config), [], 0, {})
    return model, tokenizer_path


def words_used(checkpoint: Path, tokenizer: Tokenizer, problems: Sequence[Problem]) -> float:
    """Return the mean share of required words in sampled lists."""
    rollouts = answer(checkpoint, tokenizer, [p.prompt for p in problems], MAX_NEW_TOKENS, range(len(problems)))
    reward = get_reward(REWARD)
    pairs = zip(rollouts, problems, strict=True)
    return mean(reward(rollout.text, problem.ground_truth)["reward"] for rollout, problem in pairs)


def count_flops(config: ModelConfig, rows: Sequence[dict[str, Any]], has_teacher: bool) -> int:
    """Return the FLOPs of a training with these responses. GRPO does not learn from groups of equal rewards.

    A token costs a forward pass when it is sampled, and three when it is learned, with the backward pass; a teacher of
    the same size costs one more.
    """
    if has_teacher:
        learned, passes = [*rows], 4
    else:
        mixed = (group for group in groups(rows) if len({row["rewards"]["reward"] for row in group}) > 1)
        learned, passes = [*chain.from_iterable(mixed)], 3
    sampled_tokens, tokens = (sum(len(row["prompt_ids"]) + len(row["ids"]) for row in part) for part in (rows, learned))
    return flops_per_token(config, training=False) * (sampled_tokens + passes * tokens)


def run_seed(directory: Path, seed: int) -> dict[str, Any]:
    """Train and measure with a seed."""
    shutil.rmtree(directory, ignore_errors=True)  # a resumed training would have other seconds
    problems, held_out = make_problems(EXAMPLES, 2 * seed), make_problems(HELD_OUT, 2 * seed + 1)
    base, tokenizer = make_base(directory, problems, seed)
    loaded_tokenizer = Tokenizer.load(tokenizer)
    dialogs, valid = (
        [make_dialog(problem.prompt, problem.solution or "") for problem in part] for part in (problems, held_out)
    )
    start = train(directory / "sft", "sft", base, tokenizer, (dialogs, valid[:100]), replace(SFT, seed=seed), threads=1)
    config, examples = load_model(start).config, (problems, held_out[:16])
    figures: dict[str, Any] = {"start": {"reward": words_used(start, loaded_tokenizer, held_out)}}

    def compare(name: str, method: Literal["distill", "reinforce"], training: TrainConfig, **options: Any) -> Path:
        clock, place = time.process_time(), directory / name
        settings = {"max_new_tokens": MAX_NEW_TOKENS, "valid_problems": 0, **options.pop("settings", {})}
        training = replace(training, seed=seed)
        checkpoint = train(
            place, method, start, tokenizer, examples, training, settings, {REWARD: 1.0}, threads=1, **options
        )
        figures[name] = {
            "seconds": round(time.process_time() - clock, 1),
            "reward": words_used(checkpoint, loaded_tokenizer, held_out),
            "flops": count_flops(config, responses(checkpoint), has_teacher=method == "distill"),
        }
        return checkpoint

    teacher = compare("grpo", "reinforce", REINFORCE, settings={"group_size": GROUP_SIZE})
    compare("distillation", "distill", DISTILL, teacher=teacher)
    for quantity in ("flops", "seconds"):
        ratio = figures["grpo"][quantity] / figures["distillation"][quantity]
        figures[f"{quantity} of GRPO to distillation"] = round(ratio, 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.posttrain.distillation", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    for seed in options.seeds:
        path = options.directory.absolute() / f"seed-{seed}.json"
        if not path.exists():
            figures = run_seed(path.with_suffix(""), seed)
            path.write_text(json.dumps(figures, indent=1), encoding="utf-8")
        print(f"seed {seed}: {json.dumps(json.loads(path.read_text(encoding='utf-8')))}", flush=True)


if __name__ == "__main__":
    main()
