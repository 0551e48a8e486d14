"""Train a model of children's stories to use required words: base, fine-tuning, GRPO, and DPO beside it.

``python -m benchmarks.posttrain.words DIRECTORY [--seeds 0 1 2]``. The base is the preset ``stories-fast`` on the
stories in ``../shared/data``. It cannot copy words, so fine-tuning first teaches it to, once for all seeds; see
:mod:`benchmarks.posttrain.word_dialogs`. Then it learns ``words_train`` and a part of ``dialogs_train``. GRPO learns
from the share of required words in its own stories; a penalty keeps it near the fine-tuned model. DPO learns from pairs
of the fine-tuned model's own stories. All are measured on the held-out requests: the share of required words that is
missed, the bits per byte of the stories under the fine-tuned model, distinct trigrams, and length. ``DIRECTORY`` keeps
all trainings, and ``seed-N.json`` with the figures; a second call resumes or reuses them.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.posttrain.trainings import answer, make_dialog, metrics, train
from benchmarks.posttrain.word_dialogs import WordDialogs
from benchmarks.texts import DATA
from lm.checkpoint.training_checkpoint import load_model, save_training
from lm.common.errors import UserError
from lm.data.chat_template import add_chat_tokens
from lm.data.dialog_formats import read_dialogs
from lm.data.dialogs import Dialog, PreferencePair
from lm.eval.problems import Problem, read_task
from lm.eval.rewards import combine_rewards
from lm.inference.runners.runner import prepare_for_inference
from lm.model.transformer import TransformerLM, grow_vocabulary
from lm.posttrain.job import ObjectiveInputs
from lm.posttrain.losses.log_probs import get_response_log_probs
from lm.posttrain.objectives.generation import Rollout, generate_rollouts
from lm.posttrain.objectives.sft import SupervisedFineTuning
from lm.posttrain.tokenization import pad_responses
from lm.text.pretokenize import END_OF_TEXT
from lm.text.rows import DamagedRows
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig
from tasks.runs.models import latest_model
from tasks.runtime.store import Store

DIALOGS = 3_000  # of dialogs_train, besides all of words_train
MAX_NEW_TOKENS = 200
GROUP_SIZE = 8
PAIR_PROMPTS = 800
PAIR_SAMPLES = 4
HELD_OUT = 200
QUOTED = 3  # prompts of which the stories are kept with the figures
REWARDS = {"required_words": 1.0}
SFT = TrainConfig(
    steps=300,
    batch_size=16,
    optimizer="muon",
    max_lr=0.002,
    min_lr=0,
    embedding_lr_scale=10,
    warmup_steps=20,
    precision="auto",
    eval_interval=100,
    checkpoint_interval=100,
    sample_tokens=0,
)
LISTS = replace(SFT, steps=600, max_lr=0.008, schedule="wsd", decay_fraction=0.1)
NUM_LISTS = 60_000
COPYING = replace(LISTS, steps=700, max_lr=0.006, decay_fraction=0.4)
# Half of the tokens are stories, most others paragraphs. All dialogs are 4.4 million tokens; the steps take two thirds.
COPYING_LISTS, COPYING_PARAGRAPHS, COPYING_STORIES = 8_000, 25_000, 10_000
REINFORCE = TrainConfig(
    steps=50,
    batch_size=128,
    max_lr=1e-3,
    min_lr=1e-4,
    warmup_steps=10,
    beta2=0.99,
    weight_decay=0,
    precision="auto",
    eval_interval=25,
    checkpoint_interval=10,
    sample_tokens=0,
)
REINFORCE_SETTINGS = {
    "group_size": GROUP_SIZE,
    "max_new_tokens": MAX_NEW_TOKENS,
    "kl_weight": 0.05,
    "valid_problems": 64,
}
PREFERENCE = TrainConfig(
    steps=100,
    batch_size=16,
    max_lr=5e-5,
    min_lr=0,
    warmup_steps=10,
    weight_decay=0,
    precision="auto",
    eval_interval=50,
    checkpoint_interval=50,
    sample_tokens=0,
)


def make_base(directory: Path) -> tuple[Path, Path]:
    """Train ``stories-fast``, and add the tokens of the chat template; return the paths of model and tokenizer."""
    model_path, tokenizer_path = directory / "model", directory / "tokenizer"
    if not model_path.exists():
        root = directory / "root"
        program = "from textmill.cli.main import main; raise SystemExit(main())"
        command = [sys.executable, "-c", program, "run", "--preset", "stories-fast"]
        files = {split: str([str(DATA / f"stories_{split}.txt.xz")]) for split in ("train", "valid")}
        subprocess.run(
            [*command, "--root", str(root), "--data.train", files["train"], "--data.valid", files["valid"]], check=True
        )
        model, plain_tokenizer = latest_model(Store(str(root)), str(root)).load("cpu")
        if not isinstance(plain_tokenizer, Tokenizer):
            raise UserError(f"The model in {root} has another kind of tokenizer; name an empty directory.")
        tokenizer = add_chat_tokens(plain_tokenizer)
        grow_vocabulary(model, tokenizer.size, seed=0)
        tokenizer.save(tokenizer_path)
        save_training(model_path, model, [], 0, {})
    return model_path, tokenizer_path


def read_problems(split: str) -> list[Problem]:
    """Read the requests for stories with required words."""
    return read_task("words", str(DATA / f"words_{split}.jsonl.xz"), DamagedRows()).problems


def teach_copying(directory: Path, model: Path, tokenizer: Path) -> Path:
    """Train the base model to use the words of a request; return its checkpoint."""
    dialogs, held_out = (WordDialogs(read_problems(split), seed=0) for split in ("train", "valid"))
    examples = dialogs.lists(NUM_LISTS), held_out.lists(HELD_OUT)
    lists = train(directory / "lists", "sft", model, tokenizer, examples, LISTS)
    mixed = [
        *dialogs.lists(COPYING_LISTS),
        *dialogs.paragraphs(COPYING_PARAGRAPHS),
        *dialogs.stories(COPYING_STORIES),
    ]
    return train(directory / "copying", "sft", lists, tokenizer, (mixed, held_out.stories(HELD_OUT)), COPYING)


def read_sft_dialogs(split: str) -> list[Dialog]:
    """Read the stories with required words, and other stories."""
    others = read_dialogs(str(DATA / f"dialogs_{split}.jsonl.xz"), DamagedRows())
    dialogs = [make_dialog(problem.prompt, problem.solution or "") for problem in read_problems(split)]
    return dialogs + [dialog for dialog in others if isinstance(dialog, Dialog)][:DIALOGS]


def answer_loss(model: TransformerLM, tokenizer: Tokenizer, dialogs: Sequence[Dialog]) -> float:
    """Return the mean loss of the dialogs' answers, in nats per token."""
    inputs = ObjectiveInputs(model, tokenizer, dialogs, dialogs)
    objective = SupervisedFineTuning(replace(SFT, precision="float32"), inputs)
    with torch.no_grad():
        return objective.evaluate(model, is_final=True)["valid_loss"]


@torch.no_grad()
def bits_per_byte(model: TransformerLM, rollouts: Sequence[Rollout]) -> float:
    """Return the information of the responses under ``model``, given their prompts, per byte of their texts."""
    nats = 0.0
    for start in range(0, len(rollouts), 16):
        part = rollouts[start : start + 16]
        ids, mask = pad_responses([(row.prompt_ids, row.ids) for row in part])
        scores = get_response_log_probs(model, ids[:, :-1], ids[:, 1:], return_token_entropy=False)
        nats -= float(scores["log_probs"][mask[:, 1:]].double().sum())
    return nats / math.log(2) / sum(len(row.text.encode()) for row in rollouts)


def distinct_trigrams(texts: Sequence[str]) -> float:
    """Return the share of different ones among all sequences of three words (Li et al. 2016)."""
    trigrams = [tuple(words[place : place + 3]) for words in map(str.split, texts) for place in range(len(words) - 2)]
    return len(set(trigrams)) / max(1, len(trigrams))


def measure(rollouts: Sequence[Rollout], problems: Sequence[Problem], frozen: TransformerLM | None) -> dict[str, Any]:
    """Return the figures of stories, and the first of them. Only stories in the chat template have bits per byte."""
    reward = combine_rewards({"required_words": 1.0})  # whatever else a training is rewarded for
    pairs = list(zip(rollouts, problems, strict=True))
    used = mean(reward(row.text, problem.ground_truth)["reward"] for row, problem in pairs)
    figures = {
        "words used": used,
        "words missed": 1 - used,
        "distinct trigrams": distinct_trigrams([row.text for row in rollouts]),
        "tokens": mean(len(row.ids) for row in rollouts),
        "characters": mean(len(row.text) for row in rollouts),
        "stories": [{"prompt": problem.prompt, "story": row.text} for row, problem in pairs[:QUOTED]],
    }
    return figures if frozen is None else figures | {"bits per byte": bits_per_byte(frozen, rollouts)}


def complete_plain(
    model_path: Path, tokenizer: Tokenizer, prompts: Sequence[str], seeds: Sequence[int]
) -> list[Rollout]:
    """Continue each prompt with the base model, which does not know the chat template."""
    model = prepare_for_inference(load_model(model_path))
    ids = [tokenizer.encode(f"{prompt}\n\n") for prompt in prompts]
    rollouts = generate_rollouts(model, tokenizer, ids, seeds, MAX_NEW_TOKENS)
    return [replace(row, text=row.text.partition(END_OF_TEXT)[0]) for row in rollouts]


def make_pairs(sft: Path, tokenizer: Tokenizer, problems: Sequence[Problem]) -> list[PreferencePair]:
    """Sample stories of the fine-tuned model; pair the best and the worst of each prompt if their rewards differ."""
    reward = combine_rewards(REWARDS)
    prompts = [problem.prompt for problem in problems for _ in range(PAIR_SAMPLES)]
    rollouts = answer(sft, tokenizer, prompts, MAX_NEW_TOKENS, range(len(prompts)))
    pairs = []
    for number, problem in enumerate(problems):
        texts = [row.text for row in rollouts[number * PAIR_SAMPLES : (number + 1) * PAIR_SAMPLES]]
        scored = sorted((reward(text, problem.ground_truth)["reward"], text) for text in texts if text.strip())
        if scored and scored[0][0] < scored[-1][0]:
            prompt = make_dialog(problem.prompt, "").messages[:1]
            pairs.append(PreferencePair(prompt, chosen=scored[-1][1], rejected=scored[0][1]))
    return pairs


def run_seed(directory: Path, seed: int) -> dict[str, Any]:
    """Train and measure with a seed. The base is the same for all seeds."""
    model_path, tokenizer_path = make_base(directory)
    tokenizer = Tokenizer.load(tokenizer_path)
    problems, held_out = read_problems("train"), read_problems("valid")
    dialogs = read_sft_dialogs("train"), read_sft_dialogs("valid")
    place = directory / f"seed-{seed}"

    seeds = range(seed * len(held_out), (seed + 1) * len(held_out))

    def sample(checkpoint: Path) -> list[Rollout]:
        return answer(checkpoint, tokenizer, [problem.prompt for problem in held_out], MAX_NEW_TOKENS, seeds)

    copying = teach_copying(directory, model_path, tokenizer_path)
    sft = train(place / "sft", "sft", copying, tokenizer_path, dialogs, replace(SFT, seed=seed))
    frozen = load_model(sft)
    base_stories = complete_plain(model_path, tokenizer, [problem.prompt for problem in held_out], seeds)
    figures = {"base": measure(base_stories, held_out, None), "sft": measure(sample(sft), held_out, frozen)}
    figures["base"]["answer loss"] = answer_loss(load_model(model_path), tokenizer, dialogs[1])
    figures["sft"]["answer loss"] = answer_loss(frozen, tokenizer, dialogs[1])
    reinforce = train(
        place / "reinforce",
        "reinforce",
        sft,
        tokenizer_path,
        (problems, held_out),
        replace(REINFORCE, seed=seed),
        REINFORCE_SETTINGS,
        REWARDS,
    )
    figures["grpo"] = measure(sample(reinforce), held_out, frozen)
    pairs = make_pairs(sft, tokenizer, problems[:PAIR_PROMPTS])
    parts = pairs[len(pairs) // 8 :], pairs[: len(pairs) // 8]
    dpo = train(place / "preference", "preference", sft, tokenizer_path, parts, replace(PREFERENCE, seed=seed))
    rows = [row for row in metrics(dpo) if "valid_accuracy" in row]
    figures["dpo"] = measure(sample(dpo), held_out, frozen) | {
        "pairs": [len(part) for part in parts],
        "held out": [{key: row[key] for key in ("step", "valid_accuracy", "valid_margin")} for row in rows],
    }
    (directory / f"seed-{seed}.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.posttrain.words", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    for seed in options.seeds:
        figures = run_seed(options.directory.absolute(), seed)
        for name, row in figures.items():
            shown = {key: round(value, 4) for key, value in row.items() if isinstance(value, float)}
            print(f"seed {seed}, {name}: {json.dumps(shown)}", flush=True)


if __name__ == "__main__":
    main()
