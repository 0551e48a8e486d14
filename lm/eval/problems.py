"""Tasks: problems with ground truths, from files or from a procedure, the name of their reward, and few-shot prompts.

Files are JSON Lines, JSON arrays, CSV or Parquet, local or by URL, with GSM8K's, MATH's or MMLU's fields, with words to
use, or with a question and its accepted answers.
"""

import json
import random
import re
import reprlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from string import ascii_uppercase
from typing import Any, Literal

from lm.common.errors import UserError, did_you_mean
from lm.data.dialog_formats import read_question
from lm.data.dialogs import Message, check_text, final_answer
from lm.eval.answers import extract_boxed, parse_gsm8k_response
from lm.eval.rewards import REWARD_EXTRAS, REWARD_LIBRARIES
from lm.text.rows import DamagedRows, Row, read_rows

Split = Literal["train", "test"]
Prompt = str | list[Message]

_ADDITION = re.compile("addition(?::([0-9])-([0-9]))?")
_REASONING_GYM = "reasoning-gym:"
_TEST_SEED = 1 << 30  # added to the seed of reasoning-gym's problems for the test; numpy takes seeds below 1 << 32

_QUESTION = "{question}"
_SEPARATOR = "\n\n"  # between examples

R1_ZERO_PROMPT = """\
A user asks a question, and an assistant answers it. First the assistant reasons about the question, between the tags \
<think> and </think>. Then it gives the answer alone, between the tags <answer> and </answer>.
User: {question}
Assistant: <think>"""
"""The prompt for :func:`lm.eval.rewards.r1_zero_reward`, after Guo et al. 2025 (DeepSeek-R1-Zero)."""
PROMPT_TEMPLATES = {"question": _QUESTION, "r1_zero": R1_ZERO_PROMPT}
"""Templates of a question by name."""


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


def load_task(
    name: str,
    files: Sequence[str] = (),
    split: Split = "test",
    count: int | None = None,
    seed: int = 0,
    damaged: DamagedRows | None = None,
) -> Task:
    """Return the task of a name: generated, or read from ``files``.

    ``addition`` of two- and three-digit numbers, ``addition:1-3`` of numbers with one to three digits, and
    ``reasoning-gym:DATASET`` are generated from ``split`` and ``seed``, 200 problems by default. gsm8k, math, mmlu,
    words and answers are read, at most ``count`` problems, by default all.

    Raises UserError for an unknown name, for files of a generated task, and as :func:`read_task` and
    :func:`make_reasoning_gym_task` do.
    """
    if files and is_generated(name):
        raise UserError(f"The task {name} is generated; leave out the file {files[0]}, or name the task of its rows.")
    generated = 200 if count is None else count
    if match := _ADDITION.fullmatch(name):
        low, high = (int(digits) if digits else default for digits, default in zip(match.groups(), (2, 3), strict=True))
        if not 1 <= low <= high:
            raise UserError(f"The task is {name!r}; the fewest digits must be 1 to the most digits.")
        return make_addition_task(generated, seed, (low, high), split)
    if name.startswith(_REASONING_GYM):
        seed = seed % _TEST_SEED + (_TEST_SEED if split == "test" else 0)
        return make_reasoning_gym_task(name.removeprefix(_REASONING_GYM), generated, seed)
    _check_file_task(name)
    if not files:
        raise UserError(f"The task {name} is read from files; name a file or a URL of its problems for the {split}.")
    damaged = DamagedRows() if damaged is None else damaged
    problems = [problem for url in files for problem in read_task(name, url, damaged).problems]
    return Task(name, problems[:count], _FILE_TASKS[name][1])


def is_generated(name: str) -> bool:
    """Return whether :func:`load_task` makes the problems of a task without files. Raises UserError if unknown."""
    if _ADDITION.fullmatch(name) or name.startswith(_REASONING_GYM):
        return True
    _check_file_task(name)
    return False


def problem_libraries(name: str) -> dict[str, str]:
    """Return the version of the library that makes the problems of a task, by its name; empty if none does. Raises
    UserError if it is not installed."""
    return _versions({"reasoning_gym"} if name.startswith(_REASONING_GYM) else ())


def reward_libraries(name: str, rewards: Iterable[str]) -> dict[str, str]:
    """Return the versions of the libraries that compute the named rewards, or without any that of a task. Raises
    UserError if one is not installed."""
    names = {*rewards} or {"reasoning_gym" if name.startswith(_REASONING_GYM) else _FILE_TASKS.get(name, (None, ""))[1]}
    return _versions(REWARD_LIBRARIES[name] for name in names if name in REWARD_LIBRARIES)


def _versions(libraries: Iterable[str]) -> dict[str, str]:
    found = {}
    for library in sorted(set(libraries)):
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            extra = REWARD_EXTRAS[library]
            raise UserError(f"This task or its rewards need an extra: pip install 'textmill[{extra}]'.") from None
    return found


def read_task(name: str, url: str, damaged: DamagedRows) -> Task:
    """Read a task of a file. ``name`` is gsm8k, math, mmlu, words or answers.

    Damaged rows, also those with a text that is blank or has over a million characters, are left out and added to
    ``damaged``. Raises UserError for an unknown name, an unreadable file, and a file with damaged rows only.
    """
    _check_file_task(name)
    parse, reward = _FILE_TASKS[name]

    def parse_checked(row: Row) -> Problem:
        problem = parse(row)
        check_text("the prompt", problem.prompt)
        if problem.solution:
            check_text("the solution", problem.solution)
        return problem

    return Task(name, list(read_rows(url, damaged, parse_checked)), reward)


def make_addition_task(count: int, seed: int, digits: tuple[int, int] = (2, 3), split: Split = "train") -> Task:
    """Make ``count`` additions of two numbers with ``digits`` = (fewest, most) digits, by a seed.

    A pair of numbers may occur twice. No pair occurs in both splits: its checksum decides, a tenth are test.
    """
    low, high = 10 ** (digits[0] - 1), 10 ** digits[1] - 1
    generator = random.Random(seed)
    problems: list[Problem] = []
    while len(problems) < count:
        a, b = generator.randint(low, high), generator.randint(low, high)
        question = f"{a} + {b} ="
        is_test = zlib.crc32(question.encode()) % 10 == 0
        if is_test == (split == "test"):
            problems.append(Problem(question, str(a + b), str(a + b)))
    return Task("addition", problems, "exact")


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


def _check_file_task(name: str) -> None:
    if name not in _FILE_TASKS:
        known = (*_FILE_TASKS, "addition:MIN-MAX", "reasoning-gym:DATASET")
        raise UserError(f"There is no task {name!r}{did_you_mean(name, known)}; choose one of {', '.join(known)}.")


def _parse_gsm8k(row: Row) -> Problem:
    match row:
        case {"question": str(question), "answer": str(answer)}:
            final = final_answer(answer)
            if parse_gsm8k_response(final) is None:
                raise ValueError(f"the final answer {reprlib.repr(final)} is no number")
            return Problem(question, final, answer)
    raise ValueError("no texts named question and answer")


def _parse_math(row: Row) -> Problem:
    match row:
        case {"problem": str(problem), "answer": str(answer)}:
            check_text("the answer", answer)
            return Problem(problem, answer, row.get("solution") if isinstance(row.get("solution"), str) else None)
        case {"problem": str(problem), "solution": str(solution)}:
            boxed = extract_boxed(solution)
            if boxed is None:
                raise ValueError("the solution has no \\boxed answer")
            check_text("the answer", boxed)
            return Problem(problem, boxed, solution)
    raise ValueError("no text named problem with a text named answer or solution")


def _parse_mmlu(row: Row) -> Problem:
    options: Any = row.get("options", row.get("choices"))
    is_list = isinstance(options, list) and 0 < len(options) <= len(ascii_uppercase)
    has_options = is_list and all(isinstance(option, str | int | float) for option in options)
    match row:
        case {"question": str(question), "answer": str() | int() as answer} if has_options:
            letters = [*ascii_uppercase[: len(options)]]
            letter = letters[answer] if isinstance(answer, int) and 0 <= answer < len(letters) else str(answer)
            if letter not in letters:
                raise ValueError(f"the answer {reprlib.repr(answer)} is none of the {len(letters)} options")
            lines = [f"{name}. {option}" for name, option in zip(letters, options, strict=True)]
            prompt = "\n".join([question, *lines, "Answer:"])
            return Problem(prompt, {"options": [str(option) for option in options], "answer": letter}, letter)
    raise ValueError("no question, 1 to 26 options (or choices) and answer")


def _parse_words(row: Row) -> Problem:
    match row:
        case {"prompt": str(prompt), "words": [_, *_] as words} if all(
            isinstance(word, str) and word.strip() for word in words
        ):
            return Problem(prompt, words, row.get("response") if isinstance(row.get("response"), str) else None)
    raise ValueError("no prompt with a list of words")


def _parse_answers(row: Row) -> Problem:
    answers = [row[name] for name in ("ground_truth", "answer", "solution", "output", "completion") if name in row]
    match row.get("reward_model"):
        case {"ground_truth": answer}:
            answers.append(answer)
    for answer in answers:
        accepted = [str(text) for text in (answer if isinstance(answer, list) else [answer]) if _is_answer(text)]
        if accepted:
            solution = row.get("solution")
            truth = accepted if len(accepted) > 1 else accepted[0]
            return Problem(read_question(row), truth, solution if isinstance(solution, str) else accepted[0])
    raise ValueError("no ground_truth, answer, solution, output or completion that is a text or a number")


def _is_answer(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else isinstance(value, int | float)


_FILE_TASKS: dict[str, tuple[Callable[[Row], Problem], str]] = {
    "gsm8k": (_parse_gsm8k, "gsm8k"),
    "math": (_parse_math, "boxed_math"),
    "mmlu": (_parse_mmlu, "multiple_choice"),
    "words": (_parse_words, "required_words"),
    "answers": (_parse_answers, "exact"),
}


class PromptFormat:
    """Makes the prompts for the problems of a task.

    ``template`` is the text of a question, with ``{question}`` in the place of the problem's prompt. The first
    ``shots`` of ``examples`` that have a solution, and are not the problem itself, come before it. Raises UserError if
    the template has no ``{question}``.
    """

    def __init__(
        self, template: str = _QUESTION, shots: int = 0, examples: Sequence[Problem] = (), is_plain: bool = False
    ) -> None:
        if _QUESTION not in template:
            raise UserError(f"The template of the prompt, {template[:60]!r}, has no {_QUESTION} in it.")
        self._template, self._shots, self._is_plain = template, shots, is_plain
        self._examples = [example for example in examples if example.solution]
        stop = _SEPARATOR + template.partition(_QUESTION)[0].rstrip()
        is_in_solution = any(stop in (example.solution or "").strip() for example in self._examples[: shots + 1])
        self.stop = [stop] if shots and is_plain and not is_in_solution else []
        """Texts that start the next example. A model that continues text would go on with it."""

    def format(self, problem: Problem) -> Prompt:
        """Return the prompt: text to continue if the format is plain, else a dialog.

        Raises UserError if there are too few examples.
        """
        others = (example for example in self._examples if example.prompt != problem.prompt)
        examples = list(islice(others, self._shots))
        if len(examples) < self._shots:
            raise UserError(f"{self._shots} solved examples are requested, and there are {len(examples)}; give more.")
        if self._is_plain:
            solved = [f"{self._fill(example)} {(example.solution or '').strip()}" for example in examples]
            return _SEPARATOR.join([*solved, self._fill(problem)])
        messages = []
        for example in examples:
            messages.append(Message(role="user", content=self._fill(example)))
            messages.append(Message(role="assistant", content=example.solution or ""))
        return [*messages, Message(role="user", content=self._fill(problem))]

    def _fill(self, problem: Problem) -> str:
        return self._template.replace(_QUESTION, problem.prompt)
