"""Compare four normalisations of policy gradients on additions with a scratchpad of free length.

``python -m benchmarks.posttrain.addition DIRECTORY [--seeds N] [--figure PATH]``. For each seed, a small model is
trained from scratch on 2,000 solved additions of two- and three-digit numbers. A third of the solutions has no
scratchpad, a third adds column by column, a third adds each column twice. Then the model learns from rewards of its own
responses, once for each normalisation. Prints the accuracies and two comparisons as JSON: how the advantage is divided
among easy and hard groups, and how the length of wrong responses changes. ``DIRECTORY`` keeps all trainings; a second
call resumes or reuses them. CS336 assignment 5 (section 7) states the two claims that this experiment checks.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.posttrain.trainings import answer, make_dialog, metrics, responses, train
from lm.checkpoint.training_checkpoint import save_training
from lm.data.chat_template import add_chat_tokens
from lm.eval.problems import Problem, make_addition_task
from lm.eval.rewards import gsm8k_reward
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig

EXAMPLES = 2_000
TEST_PROBLEMS = 400
MAX_NEW_TOKENS = 72
GROUP_SIZE = 8
EDGE_STEPS = 20  # the first and the last steps, whose responses are compared
VARIANTS: dict[str, dict[str, str]] = {
    "std, sequence (GRPO)": {"advantage_normalizer": "std", "loss_normalization": "sequence"},
    "std, constant": {"advantage_normalizer": "std", "loss_normalization": "constant"},
    "none, sequence": {"advantage_normalizer": "none", "loss_normalization": "sequence"},
    "none, constant (Dr. GRPO)": {"advantage_normalizer": "none", "loss_normalization": "constant"},
}
SFT = TrainConfig(
    steps=220,
    batch_size=16,
    optimizer="muon",
    max_lr=0.01,
    min_lr=0.001,
    warmup_steps=20,
    eval_interval=110,
    checkpoint_interval=110,
    sample_tokens=0,
)
REINFORCE = TrainConfig(
    steps=80,
    batch_size=256,
    max_lr=3e-4,
    min_lr=3e-4,
    warmup_steps=10,
    beta2=0.99,
    weight_decay=0,
    eval_interval=40,
    checkpoint_interval=40,
    sample_tokens=0,
)


def write_solution(a: int, b: int, rounds: int) -> str:
    """Add the numbers column by column, each column ``rounds`` times, and give the sum after ``####``."""
    columns, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        terms = f"{x}+{y}+1" if carry else f"{x}+{y}"
        total = x + y + carry
        columns += [f"{terms}={total}"] * rounds
        carry = total // 10
    return " ".join([*columns, "####", str(a + b)])


def make_problems(count: int, seed: int, is_test: bool = False) -> list[Problem]:
    """Make additions, each with one of the three forms of a solution."""
    generator = random.Random(seed)
    problems = []
    for problem in make_addition_task(count, seed, (2, 3), "test" if is_test else "train").problems:
        a, b = (int(number) for number in problem.prompt.removesuffix(" =").split(" + "))
        problems.append(Problem(problem.prompt, f"#### {a + b}", write_solution(a, b, generator.randrange(3))))
    return problems


def make_base(directory: Path, seed: int) -> tuple[Path, Tokenizer]:
    """Save a random model and a tokenizer of single bytes with the chat template."""
    tokenizer = add_chat_tokens(Tokenizer({value: bytes([value]) for value in range(256)}, []))
    tokenizer.save(directory / "tokenizer")
    torch.manual_seed(seed)
    config = ModelConfig(
        tokenizer.size, context_length=128, d_model=128, num_layers=3, num_heads=4, d_ff=352, qk_norm=True
    )
    save_training(directory / "base", TransformerLM(config), [], 0, {})
    return directory / "base", tokenizer


def accuracy(checkpoint: Path, tokenizer: Tokenizer, problems: Sequence[Problem]) -> float:
    """Return the share of right greedy answers."""
    rollouts = answer(checkpoint, tokenizer, [problem.prompt for problem in problems], MAX_NEW_TOKENS)
    pairs = zip(rollouts, problems, strict=True)
    return mean(gsm8k_reward(rollout.text, problem.ground_truth)["reward"] for rollout, problem in pairs)


def run_seed(directory: Path, seed: int) -> dict[str, Any]:
    """Train the model and its four variants; return the checkpoints and the accuracies."""
    model, tokenizer = make_base(directory, seed)
    test = make_problems(TEST_PROBLEMS, seed, is_test=True)
    data = make_problems(EXAMPLES, seed), test
    dialogs = [[make_dialog(problem.prompt, problem.solution or "") for problem in part] for part in data]
    sft = train(directory / "sft", "sft", model, directory / "tokenizer", (dialogs[0], dialogs[1]), SFT)
    result: dict[str, Any] = {"sft": accuracy(sft, tokenizer, test), "variants": {}, "checkpoints": {}}
    for number, (name, options) in enumerate(VARIANTS.items()):
        settings = {"group_size": GROUP_SIZE, "max_new_tokens": MAX_NEW_TOKENS, "valid_problems": 64, **options}
        problems = make_problems(REINFORCE.steps * REINFORCE.batch_size // GROUP_SIZE, seed + 1000), test
        checkpoint = train(
            directory / f"reinforce-{number}",
            "reinforce",
            sft,
            directory / "tokenizer",
            problems,
            REINFORCE,
            settings,
            {"gsm8k": 1.0},
        )
        result["variants"][name] = accuracy(checkpoint, tokenizer, test)
        result["checkpoints"][name] = checkpoint
    return result


def advantage_shares(rows: Sequence[dict[str, Any]], divides_by_std: bool) -> dict[str, float]:
    """Return each kind of group's share of the sum of absolute advantages; groups without signal have none.

    Hard groups have one right response of eight, easy ones one wrong. A share of 1 / (number of kinds) has no meaning
    of its own: compare the two normalisations on the same responses.
    """
    sums: dict[str, float] = defaultdict(float)
    for group in groups(rows):
        rewards = torch.tensor([row["rewards"]["reward"] for row in group])
        right = int(rewards.sum())
        difference = rewards - rewards.mean()
        size = float((difference / (rewards.std() + 1e-6) if divides_by_std else difference).abs().sum())
        sums["hard" if right == 1 else "easy" if right == len(group) - 1 else "middle"] += size
    total = sum(sums.values()) or 1.0
    return {kind: sums[kind] / total for kind in ("hard", "middle", "easy")}


def groups(rows: Sequence[dict[str, Any]]) -> list[Sequence[dict[str, Any]]]:
    """Divide responses into the groups of their prompts."""
    return [rows[start : start + GROUP_SIZE] for start in range(0, len(rows), GROUP_SIZE)]


def wrong_lengths(rows: Sequence[dict[str, Any]], steps: int) -> dict[str, float]:
    """Return the mean number of tokens of wrong and right responses in the first and the last steps."""
    result = {}
    for label, is_in in (("first", lambda step: step <= EDGE_STEPS), ("last", lambda step: step > steps - EDGE_STEPS)):
        for kind, reward in (("wrong", 0.0), ("right", 1.0)):
            lengths = [len(row["ids"]) for row in rows if is_in(row["step"]) and row["rewards"]["reward"] == reward]
            result[f"{kind}, {label} steps"] = mean(lengths) if lengths else float("nan")
    return result


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw reward, response length and entropy over the steps: the mean over the seeds, and their range."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    kinds = (("reward", "reward"), ("response_tokens", "tokens of a response"), ("entropy", "entropy, nats per token"))
    for axes, (key, title) in zip(figure.subplots(1, 3), kinds, strict=True):
        for name in VARIANTS:
            curves = torch.tensor([_smooth([row[key] for row in metrics(r["checkpoints"][name])]) for r in results])
            steps = range(1, curves.shape[1] + 1)
            axes.plot(steps, curves.mean(0), label=name)
            axes.fill_between(steps, curves.amin(0), curves.amax(0), alpha=0.15)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    return [mean(values[max(0, place - width + 1) : place + 1]) for place in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.posttrain.addition", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--figure", type=Path, help="file for the curves")
    options = parser.parse_args()
    results = [run_seed(options.directory.absolute() / f"seed-{seed}", seed) for seed in range(options.seeds)]
    if options.figure:
        draw(results, options.figure)
    summary: dict[str, Any] = {"accuracy after sft": [result["sft"] for result in results]}
    for name, settings in VARIANTS.items():
        rows = [responses(result["checkpoints"][name]) for result in results]
        lengths = [wrong_lengths(part, REINFORCE.steps) for part in rows]
        summary[name] = {
            "accuracy": [result["variants"][name] for result in results],
            "tokens": {key: [round(part[key], 1) for part in lengths] for key in lengths[0]},
            "share of the advantages": advantage_shares(
                [row for part in rows for row in part], settings["advantage_normalizer"] == "std"
            ),
        }
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
