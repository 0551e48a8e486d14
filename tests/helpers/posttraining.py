"""Small models, dialogs and jobs for tests of post-training."""

from pathlib import Path
from typing import Any

import torch

from lm.checkpoint.training_checkpoint import save_training
from lm.common.execution import Execution
from lm.data.chat_template import add_chat_tokens
from lm.data.dialogs import Dialog, Message, PreferencePair
from lm.eval.problems import Problem
from lm.eval.reward_worker import RewardWorker, Verdict
from lm.model.config import AdapterConfig, ModelConfig
from lm.model.transformer import TransformerLM
from lm.posttrain.data import write_rows
from lm.posttrain.job import PosttrainJob
from lm.posttrain.losses.reward_model import add_reward_head
from lm.train.config import TrainConfig
from tests.helpers.policies import BYTES, make_policy

CHAT = add_chat_tokens(BYTES)


def chat_policy(seed: int = 0) -> TransformerLM:
    """Return a small random model with the tokens of the chat template."""
    return make_policy(seed, CHAT)


def wide_policy() -> TransformerLM:
    """Return a random model that is wide enough for products in bfloat16 to round otherwise at another length."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=CHAT.size, context_length=256, d_model=192, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=512
    )
    return TransformerLM(config)


def dialog(prompt: str, answer: str) -> Dialog:
    return Dialog((Message(role="user", content=prompt), Message(role="assistant", content=answer)))


def pair(prompt: str, chosen: str, rejected: str) -> PreferencePair:
    return PreferencePair((Message(role="user", content=prompt),), chosen, rejected)


DIALOGS = [dialog(f"say {letter}", letter * (1 + number)) for number, letter in enumerate("abcdefgh")]
PAIRS = [pair(f"say {letter}", letter, letter * (2 + number)) for number, letter in enumerate("abcdefgh")]
PROBLEMS = [Problem(f"write {letter}", [letter]) for letter in "abcdefgh"]
UNEVEN_PROBLEMS = [Problem(letter * length, [letter]) for letter, length in (("a", 18), ("b", 52))]
EXAMPLES: dict[str, list[Any]] = {
    "sft": DIALOGS,
    "distill": PROBLEMS,
    "preference": PAIRS,
    "reward_model": PAIRS,
    "reinforce": PROBLEMS,
    "ppo": PROBLEMS,
}


class LetterReward(RewardWorker):
    """The share of letters below ``m`` in a response, computed in this process."""

    def __init__(self) -> None:
        self.calls = 0

    def score(self, response: str, ground_truth: Any) -> Verdict:
        self.calls += 1
        reward = sum(character < "m" for character in response) / max(1, len(response))
        return Verdict({"reward": reward, "format_reward": 1.0, "answer_reward": reward})


def quick_config(**settings: Any) -> TrainConfig:
    """Return the config of a short training on the CPU."""
    quick: dict[str, Any] = {
        "steps": 6,
        "batch_size": 4,
        "max_lr": 1e-2,
        "min_lr": 1e-3,
        "warmup_steps": 1,
        "eval_interval": 3,
        "checkpoint_interval": 2,
        "sample_prompts": ["say a"],
        "sample_tokens": 4,
    }
    return TrainConfig(**(quick | settings))


def write_posttrain_job(
    directory: Path,
    method: Any,
    settings: dict[str, Any] | None = None,
    adapter: AdapterConfig | None = None,
    **config: Any,
) -> Path:
    """Write a job and its inputs below ``directory``; return the job's path."""
    out = directory / "out"
    out.mkdir(parents=True)
    save_training(directory / "model", chat_policy(), [], 0, {})
    if method == "ppo":
        save_training(directory / "reward_model", add_reward_head(chat_policy(seed=1)), [], 0, {})
    if method == "distill":
        save_training(directory / "teacher", chat_policy(seed=1), [], 0, {})
    CHAT.save(directory / "tokenizer")
    for split in ("train", "valid"):
        write_rows(directory / f"{split}.jsonl", EXAMPLES[method])
    job = PosttrainJob(
        config=quick_config(**config),
        method=method,
        settings=settings or {},
        model="../model",
        tokenizer="../tokenizer",
        train="../train.jsonl",
        valid="../valid.jsonl",
        rewards={"required_words": 1.0} if method in ("distill", "reinforce", "ppo") else {},
        reward_model="../reward_model" if method == "ppo" else "",
        teacher="../teacher" if method == "distill" else "",
        digests={"model": "m"},
        out=".",
        execution=Execution(threads=1, device="cpu", compile=False, log_interval=1, min_validations=1),
        adapter=adapter or AdapterConfig(),
    )
    job.write(out / "job.json")
    return out / "job.json"
