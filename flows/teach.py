"""``textmill teach``: answers of another model to prompts, filtered by a reward into a file for fine-tuning."""

import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from lm.common.errors import UserError
from lm.eval.chat_client import ChatClient, ChatFailure
from lm.eval.config import TeachConfig
from lm.eval.reward_worker import RewardWorker
from lm.eval.rewards import REWARD_TOLERANCE, perfect_rewards
from lm.eval.teach import AnswerCache, Outcome, ask_missing, make_requests, read_questions, select_answers
from lm.files.json import write_json_lines
from lm.text.rows import DamagedRows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TeachResult:
    """What became of the prompts, and where the answers are."""

    prompts: int
    repeated_prompts: int
    """Prompts that were left out because an earlier one is equal."""
    answers: int
    earlier_answers: int
    """Answers that an earlier run had received."""
    failures: list[str]
    """Number of the prompt and error of each request without an answer, in the order of the prompts."""
    not_asked: int
    """Answers that were not asked for because the budget was reached."""
    outcomes: Counter[Outcome]
    """Number of answers kept, and left out for each reason."""
    prompt_tokens: int
    """Of all answers, with those of earlier runs."""
    completion_tokens: int
    file: Path
    answers_file: Path


def teach(config: TeachConfig) -> TeachResult:
    """Ask a model for the answers to prompts, and write those with enough reward to ``config.out``.

    Each answer is kept in a second file when it arrives, and not asked for again. The order of the rows is that of the
    prompts. Raises UserError for mistakes in the settings, a damaged file, and a server that refuses all requests.
    """
    path = _check_out(config)
    damaged = DamagedRows()
    questions, repeated, rewards = read_questions(config, damaged)
    if damaged.count:
        log.warning("%s", damaged)
    threshold = _find_threshold(config, rewards)
    client = ChatClient(config.url, config.model, config.api_key_variable, config.max_in_flight)
    requests = [*make_requests(questions, config)]
    all_requests = {key: request for part in requests for key, request in part.items()}
    failed: dict[str, ChatFailure] = {}
    with (
        RewardWorker(rewards) if rewards else nullcontext() as reward,  # checks the names before anything is asked
        AnswerCache(path.with_suffix(".answers.jsonl")) as cache,
    ):
        earlier = len(all_requests.keys() & cache.answers.keys())
        with closing(ask_missing(all_requests, client, cache, config.token_budget)) as new_answers:
            for key, answer in tqdm(new_answers, "answers", len(all_requests), initial=earlier, disable=None):
                if isinstance(answer, ChatFailure):
                    if not failed:
                        log.warning("The first prompt without an answer: %s", answer.error)
                    failed[key] = answer
        answers = {key: cache.answers[key] for key in all_requests if key in cache.answers}
        selected = select_answers(questions, requests, answers, reward, threshold)
        outcomes = [*tqdm(selected, "rewards", len(answers), disable=None)]
        write_json_lines(path, (row for outcome, row in outcomes if outcome == "kept"))
    return TeachResult(
        prompts=len(questions),
        repeated_prompts=repeated,
        answers=len(answers),
        earlier_answers=earlier,
        failures=[
            f"prompt {number:,}: {failed[key].error}"
            for number, part in enumerate(requests, start=1)
            for key in part
            if key in failed
        ],
        not_asked=len(all_requests) - len(answers) - len(failed),
        outcomes=Counter(outcome for outcome, _ in outcomes),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers.values()),
        completion_tokens=sum(answer.completion_tokens for answer in answers.values()),
        file=path,
        answers_file=cache.path,
    )


def _find_threshold(config: TeachConfig, rewards: Mapping[str, float]) -> float:
    full = perfect_rewards(rewards)["reward"]
    if config.threshold is None:
        return full
    if not rewards:
        raise UserError("threshold is the least reward of an answer to keep, and there is no reward; name rewards.")
    if rewards and config.threshold > full + REWARD_TOLERANCE:
        raise UserError(f"threshold is {config.threshold:g}, but the full reward is {full:g}; lower it.")
    return config.threshold


def _check_out(config: TeachConfig) -> Path:
    path = Path(config.out)
    if path.suffix != ".jsonl" or path.stem.endswith(".answers"):
        raise UserError(
            f"out is {config.out!r}; its name must end with .jsonl, but not with .answers.jsonl, where a run keeps all "
            "answers."
        )
    for file in (path, path.with_suffix(".answers.jsonl")):
        if file.is_dir() or (file.exists() and Path(config.file).exists() and file.samefile(config.file)):
            raise UserError(f"{file} would be written, and is a directory or the file of the prompts; change out.")
    return path
