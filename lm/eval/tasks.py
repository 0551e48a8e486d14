"""Tasks: problems with ground truths, from files or from a procedure, and the name of the reward that scores them.

Files are JSON Lines or Parquet, local or by URL, with GSM8K's, MATH's or MMLU's fields, or with words to use.
"""

import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from lm.common.errors import UserError, did_you_mean
from lm.data.dialogs import final_answer
from lm.data.json_rows import DamagedRows, Row, read_rows
from lm.eval.answers import extract_boxed

Split = Literal["train", "test"]

R1_ZERO_PROMPT = """\
A user asks a question, and an assistant answers it. First the assistant reasons about the question, between the tags \
<think> and </think>. Then it gives the answer alone, between the tags <answer> and </answer>.
User: {question}
Assistant: <think>"""
"""The prompt for :func:`lm.eval.rewards.r1_zero_reward`, after Guo et al. 2025 (DeepSeek-R1-Zero)."""


@dataclass(frozen=True)
class Problem:
    """A question for a model."""

    prompt: str
    ground_truth: Any
    """Plain data as in JSON, for the task's reward."""
    solution: str | None = None
    """A right response, e.g. to show as an example in few-shot prompts."""


@dataclass(frozen=True)
class Task:
    """Problems and the name of their reward, see :func:`lm.eval.rewards.get_reward`."""

    name: str
    problems: list[Problem]
    reward: str


def read_task(name: str, url: str, damaged: DamagedRows) -> Task:
    """Read a task of a file. ``name`` is gsm8k, math, mmlu or words.

    Damaged rows are left out and added to ``damaged``. Raises UserError for an unknown name, an unreadable file, and a
    file of which all rows are damaged.
    """
    if name not in _FILE_TASKS:
        raise UserError(
            f"There is no task {name!r}{did_you_mean(name, _FILE_TASKS)}; choose one of {', '.join(_FILE_TASKS)}."
        )
    parse, reward = _FILE_TASKS[name]
    return Task(name, list(read_rows(url, damaged, parse)), reward)


def make_addition_task(count: int, seed: int, digits: tuple[int, int] = (2, 3), split: Split = "train") -> Task:
    """Make ``count`` additions of two numbers with ``digits`` = (fewest, most) digits, by a seed.

    A pair of numbers may occur twice. No pair occurs in both splits: its checksum decides, a tenth are test.
    """
    low, high = 10 ** (digits[0] - 1), 10 ** digits[1] - 1
    return Task("addition", list(islice(_additions(random.Random(seed), low, high, split), count)), "exact")


def make_reasoning_gym_task(dataset: str, count: int, seed: int, **options: Any) -> Task:
    """Make ``count`` problems of a data set of the library reasoning-gym, such as ``simple_equations``, by a seed.

    ``options`` are the data set's own. Raises UserError if the library is missing, or refuses the name or an option.
    """
    try:
        import reasoning_gym  # slow to import
    except ImportError:
        raise UserError("This task needs reasoning-gym; install textmill[reasoning-gym].") from None
    try:
        entries = [*reasoning_gym.create_dataset(dataset, size=count, seed=seed, **options)]
        entries = json.loads(json.dumps(entries, default=str))  # a worker computes the reward from JSON
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(f"reasoning-gym cannot make the data set {dataset!r}: {error}") from None
    problems = [
        Problem(entry["question"], {"dataset": dataset, "entry": entry}, entry["answer"] and str(entry["answer"]))
        for entry in entries
    ]
    return Task(dataset, problems, "reasoning_gym")


def _additions(generator: random.Random, low: int, high: int, split: Split) -> Iterator[Problem]:
    while True:
        a, b = generator.randint(low, high), generator.randint(low, high)
        question = f"{a} + {b} ="
        is_test = zlib.crc32(question.encode()) % 10 == 0
        if is_test == (split == "test"):
            yield Problem(question, str(a + b), str(a + b))


def _parse_gsm8k(row: Row) -> Problem:
    match row:
        case {"question": str(question), "answer": str(answer)}:
            return Problem(question, final_answer(answer), answer)
    raise ValueError("no texts named question and answer")


def _parse_math(row: Row) -> Problem:
    match row:
        case {"problem": str(problem), "answer": str(answer)}:
            return Problem(problem, answer, row.get("solution") if isinstance(row.get("solution"), str) else None)
        case {"problem": str(problem), "solution": str(solution)}:
            boxed = extract_boxed(solution)
            if boxed is None:
                raise ValueError("the solution has no \\boxed answer")
            return Problem(problem, boxed, solution)
    raise ValueError("no text named problem with a text named answer or solution")


def _parse_mmlu(row: Row) -> Problem:
    options = row.get("options", row.get("choices"))
    match row:
        case {"question": str(question), "answer": str() | int() as answer} if isinstance(options, list) and options:
            letters = [chr(ord("A") + index) for index in range(len(options))]
            if isinstance(answer, int) and 0 <= answer < len(letters):
                answer = letters[answer]
            if answer not in letters:
                raise ValueError(f"the answer {answer!r} is none of the {len(letters)} options")
            lines = [f"{letter}. {option}" for letter, option in zip(letters, options, strict=True)]
            prompt = "\n".join([question, *lines, "Answer:"])
            return Problem(prompt, {"options": [str(option) for option in options], "answer": answer}, answer)
    raise ValueError("no question, options (or choices) and answer")


def _parse_words(row: Row) -> Problem:
    match row:
        case {"prompt": str(prompt), "words": [_, *_] as words} if all(isinstance(word, str) for word in words):
            return Problem(prompt, words, row.get("response") if isinstance(row.get("response"), str) else None)
    raise ValueError("no prompt with a list of words")


_FILE_TASKS: dict[str, tuple[Callable[[Row], Problem], str]] = {
    "gsm8k": (_parse_gsm8k, "gsm8k"),
    "math": (_parse_math, "boxed_math"),
    "mmlu": (_parse_mmlu, "multiple_choice"),
    "words": (_parse_words, "required_words"),
}
