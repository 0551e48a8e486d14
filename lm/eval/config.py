"""The settings of an evaluation, and of answers from another model.

Importing this module does not import torch, so that the command line starts fast.
"""

import math
from dataclasses import dataclass, field

from lm.common.config import Config, bounded_field


@dataclass(frozen=True)
class EvaluationConfig(Config, section="evaluate"):
    """The problems of a task, and how a model is asked."""

    task: str
    """addition:1-3, of numbers with one to three digits, and reasoning-gym:DATASET are generated. gsm8k, math, mmlu,
    words and answers are read from a file."""
    file: str = ""
    """File of the problems: a path or a URL."""
    count: int | None = bounded_field(None, ge=1)
    """Number of problems. Default: all of the file, and 200 of a generated task."""
    shots: int = bounded_field(0, ge=0)
    """Number of solved examples before each problem."""
    examples: str = ""
    """File of the examples: a path or a URL. A generated task makes its own."""
    prompt: str = "question"
    """How a problem is put: question, as it is; r1_zero, which asks for <think> and <answer>; or a text with
    {question} in it."""
    reward: str = ""
    """Name of the reward, see docs/posttraining.md. Default: the task's."""
    is_plain: bool = False
    """Continue each prompt as text, though the model has a chat template. A model without one always does."""
    max_new_tokens: int = bounded_field(512, ge=1)
    """Maximum number of tokens of a response."""
    temperature: float = bounded_field(0.0, ge=0, lt=math.inf)
    """Divides the logits; 0 always takes the most likely token."""
    seed: int = bounded_field(0, ge=0, lt=1 << 63)
    """Seed of generated problems and of sampling."""


@dataclass(frozen=True)
class TeachConfig(Config, section="teach"):
    """The prompts for another model, how it is asked, and the answers to keep."""

    url: str
    """Server with OpenAI's API, e.g. http://127.0.0.1:8000."""
    model: str
    """The model's name for the server."""
    file: str = ""
    """File of the prompts, a path or a URL: the rows of the task, or rows with a prompt or messages."""
    task: str = ""
    """gsm8k, math, mmlu, words or answers, whose fields the file has; or a generated task, such as addition:1-3."""
    count: int | None = bounded_field(None, ge=1)
    """Number of prompts, the first of the file. Default: all, and 200 of a generated task."""
    prompt: str = "question"
    """How a prompt is put: question, as it is; r1_zero, which asks for <think> and <answer>; or a text with
    {question} in it."""
    samples: int = bounded_field(1, ge=1)
    """Number of answers to each prompt."""
    temperature: float = bounded_field(1.0, ge=0, lt=math.inf)
    """Divides the logits; 0 always takes the most likely token."""
    top_p: float = bounded_field(1.0, gt=0, le=1)
    """Sample from the fewest tokens with this total probability."""
    max_new_tokens: int = bounded_field(1024, ge=1)
    """Maximum number of tokens of an answer. An answer that reaches it is not kept."""
    seed: int | None = bounded_field(None, ge=0, lt=1 << 62)
    """Seed for each prompt's first answer; each further answer adds 1. Default: the server chooses."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Weights of rewards by name, see docs/posttraining.md. Default: the task's; without a task, all answers are
    kept."""
    threshold: float | None = bounded_field(None, gt=-math.inf, lt=math.inf)
    """Minimum reward of an answer that is kept. Default: the full reward."""
    token_budget: int | None = bounded_field(None, ge=1)
    """Tokens of prompts and answers, of earlier runs too, after which no prompt is sent. Default: no limit."""
    max_in_flight: int = bounded_field(100, ge=1, le=10_000)
    """Requests at a time."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the server's key. It may be unset."""
    out: str = "taught.jsonl"
    """File of the answers that are kept. All answers are kept beside it, in taught.answers.jsonl."""
