"""The flows under test: their commands, stages, and the inputs and configs of short runs."""

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, get_args

from flows.curate import CurateStage
from flows.posttrain import PosttrainStage
from lm.text.demo_corpus import demo_stories
from tests.helpers.deployed import STAGES, TINY


class TestedFlow(ABC):
    """A flow under test."""

    command: ClassVar[str]
    """The command of ``textmill`` that runs it."""
    stages: ClassVar[tuple[str, ...]]
    source: ClassVar[str]
    """Name of a source file that is not copied. A fault removes it."""

    @abstractmethod
    def write_inputs(self, home: Path) -> dict[str, Any]:
        """Write the sources below ``home`` and return the config of a run."""


class Pipeline(TestedFlow):
    """All stages of the flow ``pipeline``."""

    command = "run"
    stages = STAGES
    source = "train.txt"

    def write_inputs(self, home: Path) -> dict[str, Any]:
        """Write stories, those for validation as JSON Lines, which are copied."""
        (home / self.source).write_text("".join(demo_stories(1200)), encoding="utf-8")
        stories = "".join(demo_stories(100, seed=1)).split("<|endoftext|>\n")[:-1]
        write_json_lines(home / "valid.jsonl", [{"text": story} for story in stories])
        return {
            "data": {"train": [str(home / self.source)], "valid": [str(home / "valid.jsonl")]},
            "chunk": {"target_bytes": 60_000},
            "tokenizer": {"vocab_size": 600},
            "model": TINY["model"],
            "train": TINY["train"] | {"steps": 200, "eval_interval": 40, "checkpoint_interval": 30},
            "sample": {"prompts": ["Once", "One day"], "max_new_tokens": 60},
        }


class Posttrain(TestedFlow):
    """All stages of the flow ``posttrain``, from a tiny random model in a directory of Hugging Face."""

    command = "posttrain"
    stages = get_args(PosttrainStage)
    source = "dialogs.jsonl"

    def write_inputs(self, home: Path) -> dict[str, Any]:
        """Write the model, and dialogs and pairs of answers in one file."""
        from lm.checkpoint.hugging_face.model_files import save_hugging_face  # imports torch
        from tests.helpers.policies import BYTES, make_policy

        save_hugging_face(make_policy(), BYTES, home / "base")
        rows = [{"prompt": f"Say {word}.", "response": word} for word in _WORDS]
        rows += [{"prompt": f"Say {word}.", "chosen": word, "rejected": word[::-1]} for word in _WORDS]
        write_json_lines(home / self.source, rows)
        train = {
            "steps": 40,
            "batch_size": 4,
            "max_lr": 0.01,
            "min_lr": 0.001,
            "warmup_steps": 2,
            "eval_interval": 20,
            "checkpoint_interval": 10,
            "sample_prompts": ["Say blue."],
            "sample_tokens": 4,
        }
        return {
            "base": str(home / "base"),
            "methods": ["sft", "preference", "reinforce"],
            "dialogs": {
                "train": [str(home / self.source)],
                "valid_fraction": 0.2,
                "task": "addition:1-1",
                "train_problems": 60,
                "test_problems": 4,
            },
            "sft": train,
            "preference": {"train": train},
            "reinforce": {
                "train": train,
                "group_size": 2,
                "updates_per_epoch": 2,
                "max_new_tokens": 12,
                "importance_reweighting": "grpo",
                "rewards": {"length:8-20": 1.0},  # it differs between the responses
                "valid_problems": 4,
            },
            "evaluate": {"prompts": ["Say blue."], "max_new_tokens": 8},
        }


class Curate(TestedFlow):
    """All stages of the flow ``curate``. Stories come in four files, some of them twice, some nearly so."""

    command = "curate"
    stages = get_args(CurateStage)
    source = "train.txt"

    def write_inputs(self, home: Path) -> dict[str, Any]:
        """Write stories, one file of them as plain text, and examples of wanted and unwanted text."""
        stories = "".join(demo_stories(6000)).split("<|endoftext|>\n")[:-1]
        copies = [story if number % 2 else f"{story} It was late." for number, story in enumerate(stories[:1000])]
        spam = [f"BUY {number} pills now!!! Best price, click here, click here." for number in range(400)]
        texts = "<|endoftext|>\n".join([*stories[:3000], *spam[:200]])
        (home / self.source).write_text(f"{texts}<|endoftext|>\n", encoding="utf-8")
        write_json_lines(home / "copies.jsonl", [{"text": text} for text in copies])
        write_json_lines(home / "stories.jsonl", [{"text": text} for text in stories[3000:]])
        write_json_lines(home / "wanted.jsonl", [{"text": text} for text in stories[:100]])
        write_json_lines(home / "unwanted.jsonl", [{"text": text} for text in spam[200:]])
        return {
            "data": {"train": [str(home / name) for name in (self.source, "copies.jsonl", "stories.jsonl")]},
            "filter": {
                "rules": {"gopher_min_words": 10, "gopher_min_alphabetic_words": 0.5, "c4_min_sentences": 1},
                "score": {"wanted": [str(home / "wanted.jsonl")], "unwanted": [str(home / "unwanted.jsonl")]},
            },
            "deduplicate": {"equal": True, "jaccard_threshold": 0.8, "repeats": "paragraph"},
            "decontaminate": {"validation": True},
        }


PIPELINE = Pipeline()
POSTTRAIN = Posttrain()
CURATE = Curate()
ALL_STAGES = (*PIPELINE.stages, *POSTTRAIN.stages, *CURATE.stages)
_WORDS = ["amber", "blue", "crimson", "gold", "indigo", "jade", "lilac", "mauve", "navy", "olive", "pink", "scarlet"]


def write_json_lines(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
