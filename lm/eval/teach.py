"""Training data made by another model: its answers to prompts, filtered by a reward.

This is rejection sampling, one round of expert iteration with another model (Yuan et al. 2023, arXiv:2308.01825).
"""

import fcntl
import hashlib
import json
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from lm.common.errors import UserError, translate_write_errors
from lm.data.dialogs import Message, find_role_problem, read_message, refuse_fields
from lm.eval.chat_client import ChatAnswer, ChatClient, ChatFailure, ChatRequest
from lm.eval.config import TeachConfig
from lm.eval.problems import PROMPT_TEMPLATES, Problem, PromptFormat, load_task
from lm.eval.reward_worker import RewardWorker
from lm.eval.rewards import REWARD_TOLERANCE
from lm.text.rows import DamagedRows, Row, read_rows

Outcome = Literal["kept", "low reward", "reward failed", "cut at the maximum", "not finished", "blank", "repeated"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """Messages to answer; the last is the user's."""

    messages: tuple[Message, ...]
    question: str
    """The last message before it was put into the template of the prompt."""
    ground_truth: Any = None


class QuestionSet(NamedTuple):
    """Different questions in the order of their file, and the names and weights of the rewards for the answers."""

    questions: list[Question]
    repeated: int
    """Number of questions that were left out because an earlier one is equal."""
    rewards: dict[str, float]


def read_questions(config: TeachConfig, damaged: DamagedRows) -> QuestionSet:
    """Read the questions of a task, or without a task the rows of a file, each with a ``prompt`` or ``messages``.

    A row may have a ``ground_truth`` for the rewards. A last message of the assistant is left out. Raises UserError as
    :func:`lm.eval.problems.load_task` and :func:`lm.text.rows.read_rows` do, and if nothing names the questions.
    """
    prompt_format = PromptFormat(PROMPT_TEMPLATES.get(config.prompt, config.prompt), is_plain=True)
    rewards = dict(config.rewards)
    if config.task:
        files = [config.file] if config.file else []
        task = load_task(config.task, files, "train", config.count, config.seed or 0, damaged)
        dialogs = [_parse_row({"prompt": item.prompt, "ground_truth": item.ground_truth}) for item in task.problems]
        rewards = rewards or {task.reward: 1.0}
    elif config.file:
        dialogs = [*read_rows(config.file, damaged, _parse_row)][: config.count]
    else:
        raise UserError("Nothing names the prompts; give a file of prompts or a task.")
    questions: dict[str, Question] = {}
    for messages, ground_truth in dialogs:
        question = messages[-1]["content"]
        prompt = str(prompt_format.format(Problem(question, ground_truth)))
        asked = Question((*messages[:-1], Message(role="user", content=prompt)), question, ground_truth)
        questions.setdefault(json.dumps([asked.messages, ground_truth], sort_keys=True), asked)
    return QuestionSet([*questions.values()], len(dialogs) - len(questions), rewards)


def request_key(model: str, request: ChatRequest, sample: int) -> str:
    """Return the key of an answer: the SHA-256 of the model's name, the request, and the sample's number."""
    given = {name: value for name, value in asdict(request).items() if value is not None}  # a new field keeps old keys
    content = {"model": model, "sample": sample, **given}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class AnswerCache:
    """Answers by :func:`request_key`, in memory and in a file.

    Use it in a ``with``: one process at a time has the file. Damaged lines, such as a last line that a kill cut off,
    are skipped. Raises UserError if another process has the file, or if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, ChatAnswer] = {}

    def __enter__(self) -> "AnswerCache":
        with translate_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(f"Another process writes {self.path}; wait for it, or use another --out.") from None
        self._read()
        return self

    def __exit__(self, *error: object) -> None:
        with translate_write_errors(self.path):  # after a failure, this tries to write again
            self._file.close()  # releases the lock

    def add(self, key: str, answer: ChatAnswer) -> None:
        """Keep an answer. When this returns, it survives the process. Raises UserError if it cannot be written."""
        with translate_write_errors(self.path):
            self._file.write(json.dumps({"key": key, **asdict(answer)}, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        self.answers[key] = answer

    def _read(self) -> None:
        self._file.seek(0)
        damaged, line = 0, b"\n"
        for line in self._file:
            try:
                row = json.loads(line)
                key = row.pop("key")
                answer = ChatAnswer(**row)
                counts = (answer.prompt_tokens, answer.completion_tokens)
                is_valid = all(isinstance(count, int) and count >= 0 for count in counts)
                if not (is_valid and isinstance(answer.text, str)):
                    raise TypeError("a field has a wrong type")
                self.answers[key] = answer
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                damaged += 1
        if not line.endswith(b"\n"):
            self._file.write(b"\n")  # the next line starts after the one that was cut off
        if damaged:
            log.warning("%s: damaged lines are skipped: %d.", self.path, damaged)


def make_requests(questions: Iterable[Question], config: TeachConfig) -> Iterator[dict[str, ChatRequest]]:
    """Yield the requests for each question, one a sample, by the key of the answer."""
    for question in questions:
        requests = {}
        for sample in range(config.samples):
            seed = None if config.seed is None else config.seed + sample
            request = ChatRequest(question.messages, config.temperature, config.top_p, config.max_new_tokens, seed)
            requests[request_key(config.model, request, sample)] = request
        yield requests


def ask_missing(
    requests: Mapping[str, ChatRequest], client: ChatClient, cache: AnswerCache, token_budget: int | None
) -> Generator[tuple[str, ChatAnswer | ChatFailure]]:
    """Ask for the answers that ``cache`` does not have, and yield each after it was added there.

    No request is sent after the prompts and answers of ``requests``, with those in the cache and the malformed ones,
    have ``token_budget`` tokens; the answers to requests in flight are still received. Raises UserError as
    :meth:`lm.eval.chat_client.ChatClient.answers` does.
    """
    missing = [key for key in requests if key not in cache.answers]
    spent_tokens = sum(cache.answers[key].tokens for key in requests.keys() - set(missing))

    def take() -> Iterator[ChatRequest]:
        for key in missing:
            if token_budget is not None and spent_tokens >= token_budget:
                return
            yield requests[key]

    for index, answer in client.answers(take(), has_answers=len(missing) < len(requests)):
        spent_tokens += answer.tokens
        if isinstance(answer, ChatAnswer):
            cache.add(missing[index], answer)
            if token_budget is not None and not answer.tokens:
                raise UserError("The server does not report how many tokens an answer has; leave out the token budget.")
        yield missing[index], answer


def select_answers(
    questions: Sequence[Question],
    requests: Sequence[Iterable[str]],
    answers: Mapping[str, ChatAnswer],
    reward: RewardWorker | None,
    threshold: float,
) -> Iterator[tuple[Outcome, Row]]:
    """Yield each answer as a row for supervised fine-tuning, and whether to keep it.

    ``requests`` has the keys of the answers to each question. The order is that of the questions and samples. Only an
    answer with a reward of at least ``threshold`` is kept, if there is a ``reward``. Raises UserError at the end if the
    reward failed for all answers that it got.
    """
    rows: set[str] = set()
    scored, errors = 0, list[str]()
    for question, keys in zip(questions, requests, strict=True):
        for answer in (answers[key] for key in keys if key in answers):
            row = _make_row(question, answer.text)
            text = json.dumps(row)
            outcome: Outcome = "kept"
            if not answer.text.strip():
                outcome = "blank"
            elif answer.finish_reason == "length":
                outcome = "cut at the maximum"
            elif answer.finish_reason not in ("stop", None):
                outcome = "not finished"
            elif text in rows:
                outcome = "repeated"
            elif reward:
                verdict = reward.score(answer.text, question.ground_truth)
                scored += 1
                if verdict.error:
                    if not errors:
                        log.warning("The first answer whose reward failed: %s", verdict.error)
                    errors.append(verdict.error)
                    outcome = "reward failed"
                elif verdict.rewards["reward"] < threshold - REWARD_TOLERANCE:
                    outcome = "low reward"
            if outcome == "kept":
                rows.add(text)
            yield outcome, row
    if errors and len(errors) == scored:
        raise UserError(
            f"The reward function failed for all {scored:,} answers: {errors[0]}. Name rewards that fit the prompts; "
            "the answers are kept, and the same command does not ask for them again."
        )


def _parse_row(row: Row) -> tuple[tuple[Message, ...], Any]:
    refuse_fields(row)
    match row:
        case {"messages": [*messages, {"role": "assistant"}]} | {"messages": [*messages]}:
            pass
        case {"prompt": str(prompt)}:
            messages = [Message(role="user", content=prompt)]
        case _:
            raise ValueError("no text named prompt and no list named messages")
    if problem := find_role_problem(messages, "user"):
        raise ValueError(problem)
    if not messages[-1]["content"].strip():
        raise ValueError("the prompt is blank")
    try:
        json.dumps(row.get("ground_truth"))
    except TypeError as error:  # of Parquet
        raise ValueError(f"the ground_truth is not plain data: {error}") from None
    dialog = tuple(read_message(message, index) for index, message in enumerate(messages))
    return dialog, row.get("ground_truth")


def _make_row(question: Question, answer: str) -> Row:
    *context, last = question.messages
    asked = {} if last["content"] == question.question else {"question": question.question}
    if context:
        return {"messages": [*question.messages, Message(role="assistant", content=answer)], **asked}
    return {"prompt": last["content"], "response": answer, **asked}
