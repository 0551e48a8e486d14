"""The flows under test: their commands, stages, and the inputs and configs of short runs."""

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, get_args

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
        from lm.checkpoint.hugging_face import save_hugging_face  # imports torch
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


PIPELINE = Pipeline()
POSTTRAIN = Posttrain()
ALL_STAGES = (*PIPELINE.stages, *POSTTRAIN.stages)
_WORDS = ["amber", "blue", "crimson", "gold", "indigo", "jade", "lilac", "mauve", "navy", "olive", "pink", "scarlet"]


def write_json_lines(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
