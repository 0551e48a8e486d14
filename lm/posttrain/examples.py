"""The data of post-training: read from files or generated, divided, and stored as JSON Lines."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from lm.common.errors import UserError
from lm.data.dialogs import Dialog, Message, PreferencePair, read_dialogs
from lm.data.json_rows import DamagedRows
from lm.eval.tasks import Problem, Task, make_addition_task, make_reasoning_gym_task, read_task
from lm.posttrain.config import DialogsConfig

T = TypeVar("T")
_ADDITION = re.compile("addition:([0-9])-([0-9])")
_REASONING_GYM = "reasoning-gym:"
_TEST_SEED = 1 << 62  # added to the seed of generated problems for the test


@dataclass
class Examples:
    """The examples of one split."""

    dialogs: list[Dialog] = field(default_factory=list)
    pairs: list[PreferencePair] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read_examples(
    config: DialogsConfig,
    train: Sequence[str],
    valid: Sequence[str],
    task_train: Sequence[str],
    task_test: Sequence[str],
) -> tuple[Examples, Examples, str, DamagedRows]:
    """Return the examples for training and the held-out ones, the name of the task's reward, and the damaged rows.

    The four lists are the files of ``config``'s fields of these names. Raises UserError for an unreadable file or an
    unknown task.
    """
    damaged = DamagedRows()
    splits = Examples(), Examples()
    for urls, is_valid in ((train, False), (valid, True)):
        for url in urls:
            for example in read_dialogs(url, damaged):
                split = splits[is_valid or (not valid and _is_held_out(example, config.valid_fraction))]
                if isinstance(example, Dialog):
                    split.dialogs.append(example)
                else:
                    split.pairs.append(example)
    reward = ""
    if config.task:
        tasks = (
            _read_problems(config, "train", task_train, config.train_problems, damaged),
            _read_problems(config, "test", task_test, config.test_problems, damaged),
        )
        reward = tasks[0].reward
        tested = {problem.prompt for problem in tasks[1].problems}
        splits[0].problems = [problem for problem in tasks[0].problems if problem.prompt not in tested]
        splits[1].problems = tasks[1].problems
        if config.solutions != 0:
            for split, count in zip(splits, (config.solutions, None), strict=True):
                solved = [problem for problem in split.problems if problem.solution]
                split.dialogs += [_solution(problem) for problem in solved[:count]]
    return *splits, reward, damaged


def _read_problems(
    config: DialogsConfig, split: Literal["train", "test"], urls: Sequence[str], count: int, damaged: DamagedRows
) -> Task:
    if match := _ADDITION.fullmatch(config.task):
        low, high = map(int, match.groups())
        if not 1 <= low <= high:
            raise UserError(f"dialogs.task is {config.task!r}; the fewest digits must be 1 to the most digits.")
        return make_addition_task(count, config.seed, (low, high), split)
    if config.task.startswith(_REASONING_GYM):
        seed = config.seed + (_TEST_SEED if split == "test" else 0)
        return make_reasoning_gym_task(config.task.removeprefix(_REASONING_GYM), count, seed % (1 << 63))
    tasks = [read_task(config.task, url, damaged) for url in urls]
    if not tasks:
        raise UserError(f"dialogs.task {config.task} is read from files; name them in dialogs.task_{split}.")
    problems = [problem for task in tasks for problem in task.problems]
    return Task(config.task, problems[:count], tasks[0].reward)


def _solution(problem: Problem) -> Dialog:
    messages = Message(role="user", content=problem.prompt), Message(role="assistant", content=problem.solution or "")
    return Dialog(messages)


def _is_held_out(example: Dialog | PreferencePair, fraction: float) -> bool:
    """Return whether the hash of the prompt holds the example out. All examples of a prompt are in one split."""
    prompt = example.messages[:-1] if isinstance(example, Dialog) else example.prompt
    digest = hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Write dataclass objects as JSON Lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)


def read_dialog_rows(path: Path) -> list[Dialog]:
    """Read dialogs that :func:`write_rows` wrote."""
    return _read_rows(path, lambda row: Dialog(tuple(row["messages"]), row["ground_truth"]))


def read_pair_rows(path: Path) -> list[PreferencePair]:
    """Read pairs that :func:`write_rows` wrote."""
    return _read_rows(path, lambda row: PreferencePair(tuple(row["prompt"]), row["chosen"], row["rejected"]))


def read_problem_rows(path: Path) -> list[Problem]:
    """Read problems that :func:`write_rows` wrote."""
    return _read_rows(path, lambda row: Problem(**row))


def _read_rows(path: Path, parse: Callable[[Any], T]) -> list[T]:
    try:
        with path.open(encoding="utf-8") as file:
            return [parse(json.loads(line)) for line in file]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of the stage dialogs: {error!r}.") from None
