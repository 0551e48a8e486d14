"""Evaluation of responses to problems: rewards, categories, and accuracy with a confidence interval."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from math import sqrt
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from filelock import FileLock, Timeout

from lm.common.errors import UserError, translate_write_errors
from lm.eval.problems import Problem, Prompt
from lm.eval.reward_worker import RewardWorker
from lm.eval.rewards import REWARD_KEYS, REWARD_TOLERANCE, perfect_rewards
from lm.files.json import write_json_lines

Category = Literal["right", "wrong answer", "wrong format"]
CATEGORIES: tuple[Category, ...] = get_args(Category)

_Z_95 = 1.959963984540054  # 95 % of a normal distribution lie within this many standard deviations


class Response(NamedTuple):
    """The answer of a model."""

    text: str
    tokens: int | None = None
    finish_reason: str | None = None
    """``stop`` if the model ended the response, ``length`` if it was cut."""


Respond = Callable[[Sequence[tuple[int, Prompt]]], Iterable[tuple[int, Response]]]
"""Yields the index and the response of each numbered prompt, in any order. Prompts without a response are left out."""


@dataclass(frozen=True)
class ScoredResponse:
    """A response to a problem, and its rewards."""

    index: int
    """Index of the problem in its task."""
    prompt: Prompt
    response: str
    ground_truth: Any
    rewards: dict[str, float]
    category: Category
    tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    """Why the rewards could not be computed, and are 0."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weight of each reward by name."""


@dataclass(frozen=True)
class Summary:
    """Figures of a model's responses to the problems of a task."""

    problems: int
    accuracy: float
    """Share of right responses."""
    accuracy_low: float
    """Low end of its 95 % confidence interval (Wilson 1927)."""
    accuracy_high: float
    reward: float
    """Mean of the rewards."""
    format_reward: float
    answer_reward: float
    response_tokens: float | None
    categories: dict[str, int]
    """Number of responses in each of ``CATEGORIES``."""
    cut_responses: int
    """Responses that reached the maximum number of tokens."""
    failed_rewards: int
    """Responses whose rewards could not be computed, and are 0."""


def score_responses(
    problems: Sequence[Problem],
    prompts: Sequence[Prompt],
    responses: Iterable[tuple[int, Response]],
    reward: RewardWorker,
) -> Iterator[ScoredResponse]:
    """Yield each response with its rewards. ``responses`` has the index of the problem before each response."""
    for index, response in responses:
        verdict = reward.score(response.text, problems[index].ground_truth)
        yield ScoredResponse(
            index,
            prompts[index],
            response.text,
            problems[index].ground_truth,
            verdict.rewards,
            categorize(verdict.rewards, reward.weights),
            response.tokens,
            response.finish_reason,
            verdict.error,
            reward.weights,
        )


def categorize(rewards: Mapping[str, float], weights: Mapping[str, float]) -> Category:
    """Return the category of a response. ``weights`` are those of its named rewards.

    It is right if its content has the full reward; if no reward is for the content, if the form has it. Otherwise its
    format is wrong if nothing of the reward is for the form.
    """
    perfect = perfect_rewards(weights)
    key = "answer_reward" if perfect["answer_reward"] > 0 else "reward"
    if rewards[key] >= perfect[key] - REWARD_TOLERANCE:
        return "right"
    return "wrong answer" if rewards["format_reward"] > 0 else "wrong format"


def summarize(responses: Sequence[ScoredResponse]) -> Summary:
    """Return the figures of at least one response."""
    count = len(responses)
    categories: dict[str, int] = {name: sum(response.category == name for response in responses) for name in CATEGORIES}
    tokens = [response.tokens for response in responses if response.tokens is not None]
    means = {key: sum(response.rewards[key] for response in responses) / count for key in REWARD_KEYS}
    low, high = wilson_interval(categories["right"], count)
    return Summary(
        problems=count,
        accuracy=categories["right"] / count,
        accuracy_low=low,
        accuracy_high=high,
        response_tokens=sum(tokens) / len(tokens) if tokens else None,
        categories=categories,
        cut_responses=sum(response.finish_reason == "length" for response in responses),
        failed_rewards=sum(response.error is not None for response in responses),
        **means,
    )


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a probability, from the successes of ``count`` trials (Wilson 1927).

    Unlike the normal approximation, it stays within 0 and 1, and has a width if no trial or every trial succeeded.
    """
    share, z2 = successes / count, _Z_95**2
    center = (share + z2 / (2 * count)) / (1 + z2 / count)
    half_width = _Z_95 * sqrt(share * (1 - share) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    low = 0.0 if successes == 0 else center - half_width  # exact at the ends, without a rounding error
    high = 1.0 if successes == count else center + half_width
    return low, high


def pick_examples(responses: Sequence[ScoredResponse], count: int = 3) -> dict[Category, list[ScoredResponse]]:
    """Return the first ``count`` responses of each category that has some."""
    examples = {name: [response for response in responses if response.category == name] for name in CATEGORIES}
    return {name: found[:count] for name, found in examples.items() if found}


class ResponseFile:
    """Responses, one JSON object a line, each with its ``index``; the first line has the settings.

    Use it in a ``with``: one process at a time has the file. Raises UserError if another process has it, if it cannot
    be written, if its settings other than the ``reward`` are not ``settings``, or if a line is damaged. A last line
    without an end, as a kill leaves it, is dropped.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(settings))  # as they are read
        self.rows: list[dict[str, Any]] = []
        self._lock = FileLock(f"{path}.lock")

    def __enter__(self) -> "ResponseFile":
        with translate_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=0)
            except Timeout:  # an OSError too
                raise UserError(f"Another process writes {self.path}; wait for it, or use another directory.") from None
        try:
            self._read()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def append(self, row: dict[str, Any]) -> None:
        """Add a response."""
        self.rows.append(row)
        write_json_lines(self.path, [row], "a")

    def sort(self) -> None:
        """Put the responses into the order of their indices. The last row of an index counts."""
        self.rows = sorted({row["index"]: row for row in self.rows}.values(), key=lambda row: row["index"])
        self._rewrite()

    def _read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
                problem = "" if isinstance(rows[-1], dict) else "is not a JSON object"
            except (ValueError, RecursionError) as error:
                problem = f"is damaged: {error}"
            if problem:
                raise UserError(f"{self.path}, line {number:,}, {problem}. Delete the line or the file.")
        self.rows, theirs = rows[1:], rows[0].get("settings") if rows else self.settings
        if not isinstance(theirs, dict) or any(not isinstance(row.get("index"), int) for row in self.rows):
            raise UserError(f"{self.path} is no file of responses; use another directory.")
        differences = [
            f"{name} was {theirs.get(name)!r} and is now {self.settings.get(name)!r}"
            for name in {**theirs, **self.settings}
            if name != "reward" and theirs.get(name) != self.settings.get(name)  # rewards are computed again
        ]
        if differences:
            raise UserError(
                f"{self.path} has responses under other settings: {'; '.join(differences)}. Repeat the settings, use "
                "another directory, or delete the file."
            )
        self._rewrite()

    def _rewrite(self) -> None:
        write_json_lines(self.path, [{"settings": self.settings}, *self.rows])


def evaluate(
    problems: Sequence[Problem],
    prompts: Sequence[Prompt],
    respond: Respond,
    reward: RewardWorker,
    file: ResponseFile,
) -> list[ScoredResponse]:
    """Return the responses to all problems with their rewards, in the order of the problems.

    Each response is appended to ``file`` when it arrives; ``respond`` is asked only for those that the file does not
    have. The rewards of a response in the file are computed again if they failed or were others. At the end, the file
    is in the order of the problems. Raises UserError if a row of the file is damaged or belongs to another problem, if
    ``respond`` leaves out a prompt, or if the reward failed for all responses.
    """
    done = {row["index"]: _parse_row(row, problems, prompts, file) for row in file.rows if row["index"] < len(problems)}
    missing = [(index, prompt) for index, prompt in enumerate(prompts) if index not in done]
    stale = [
        (row.index, Response(row.response, row.tokens, row.finish_reason))
        for row in done.values()
        if row.error is not None or row.weights != reward.weights
    ]
    for scored in score_responses(problems, prompts, chain(stale, respond(missing) if missing else ()), reward):
        file.append(asdict(scored))
        done[scored.index] = scored
    if len(done) < len(problems):
        raise UserError(
            f"{len(problems) - len(done):,} of {len(problems):,} problems have no response. Run the same command again "
            f"to ask for them; {file.path} has the others."
        )
    file.sort()
    if all(row.error is not None for row in done.values()):
        raise UserError(
            f"The reward failed for all {len(done):,} responses: {done[0].error}. Name a reward that fits the task; "
            f"{file.path} has the responses."
        )
    return [done[index] for index in range(len(problems))]


def _parse_row(
    row: dict[str, Any], problems: Sequence[Problem], prompts: Sequence[Prompt], file: ResponseFile
) -> ScoredResponse:
    try:
        response = ScoredResponse(**row)
    except TypeError:
        raise UserError(f"A row of {file.path} is damaged; delete the file, or use another directory.") from None
    index = response.index
    if (response.prompt, response.ground_truth) != (prompts[index], problems[index].ground_truth):
        raise UserError(
            f"{file.path} has a response to another problem {index}: the data of the task has changed since. "
            "Delete the file, or use another directory."
        )
    return response
