"""The data of post-training: read from files or generated, divided, and stored as JSON Lines."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lm.common.errors import UserError
from lm.data.dialogs import Dialog, Message, PreferencePair, read_dialogs
from lm.data.json_rows import DamagedRows
from lm.eval.tasks import Problem, Split, Task, is_generated, load_task
from lm.posttrain.config import DialogsConfig

T = TypeVar("T")
Example = Dialog | PreferencePair | Problem


@dataclass
class Examples:
    """The examples of one split."""

    dialogs: list[Dialog] = field(default_factory=list)
    pairs: list[PreferencePair] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    left_out: int = 0
    """Examples for training that were left out because a held-out one, or a tested problem, asks the same."""


def read_examples(
    config: DialogsConfig,
    train: Sequence[str],
    valid: Sequence[str],
    task_train: Sequence[str],
    task_test: Sequence[str],
) -> tuple[Examples, Examples, Task, DamagedRows]:
    """Return the examples for training, those held out of them, the tested problems, and the damaged rows.

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
    test = Task("", [], "")
    if config.task:
        problems = _read_problems(config, "train", task_train, config.train_problems, damaged).problems
        test = _read_problems(config, "test", task_test, config.test_problems, damaged)
        tested = {problem.prompt for problem in test.problems}
        for problem in problems:
            is_held_out = problem.prompt not in tested and _is_held_out(problem, config.valid_fraction)
            splits[is_held_out].problems.append(problem)
    _leave_out_held_out(*splits, test)
    if config.solutions != 0:
        for split, count in zip(splits, (config.solutions, None), strict=True):
            solved = [problem for problem in split.problems if problem.solution]
            split.dialogs += [_solution(problem) for problem in solved[:count]]
    return *splits, test, damaged


def _read_problems(config: DialogsConfig, split: Split, urls: Sequence[str], count: int, damaged: DamagedRows) -> Task:
    if not urls and not is_generated(config.task):
        raise UserError(f"dialogs.task {config.task} is read from files; name them in dialogs.task_{split}.")
    return load_task(config.task, urls, split, count, config.seed, damaged)


def _solution(problem: Problem) -> Dialog:
    messages = Message(role="user", content=problem.prompt), Message(role="assistant", content=problem.solution or "")
    return Dialog(messages)


def _opening(example: Example) -> tuple[Message, ...]:
    """Return the messages up to the user's first, as they were before they were put into a template."""
    if isinstance(example, Problem):
        return (Message(role="user", content=example.prompt),)
    messages = example.messages if isinstance(example, Dialog) else example.prompt
    opening = messages[: 2 if messages[0]["role"] == "system" else 1]
    if isinstance(example, Dialog) and example.question is not None and len(messages) == len(opening) + 1:
        return (*opening[:-1], Message(role="user", content=example.question))  # it is of the user's last message
    return opening


def _is_held_out(example: Example, fraction: float) -> bool:
    """Return whether the hash of the opening holds the example out. All examples of an opening are in one split."""
    digest = hashlib.sha256(json.dumps(_opening(example), sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _leave_out_held_out(train: Examples, valid: Examples, test: Task) -> None:
    """Take the examples out of ``train`` that ask what a held-out one or a tested problem asks, and count them."""

    def asked(example: Example) -> str:
        return _opening(example)[-1]["content"]

    examples: list[Example] = [*valid.dialogs, *valid.pairs, *valid.problems, *test.problems]
    held_out = {asked(example) for example in examples}
    for kind in ("dialogs", "pairs", "problems"):
        given = getattr(train, kind)
        kept = [example for example in given if asked(example) not in held_out]
        setattr(train, kind, kept)
        train.left_out += len(given) - len(kept)


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Write dataclass objects as JSON Lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)


def read_dialog_rows(path: Path) -> list[Dialog]:
    """Read dialogs that :func:`write_rows` wrote."""
    return _read_rows(path, lambda row: Dialog(tuple(row["messages"]), row["question"]))


def read_pair_rows(path: Path) -> list[PreferencePair]:
    """Read pairs that :func:`write_rows` wrote."""
    return _read_rows(path, _parse_pair)


def read_problem_rows(path: Path) -> list[Problem]:
    """Read problems that :func:`write_rows` wrote."""
    return _read_rows(path, lambda row: Problem(**row))


def read_prompt_rows(path: Path) -> list[Problem | PreferencePair]:
    """Read problems, or pairs, that :func:`write_rows` wrote."""
    return _read_rows(path, lambda row: _parse_pair(row) if "chosen" in row else Problem(**row))


def _parse_pair(row: Any) -> PreferencePair:
    return PreferencePair(tuple(row["prompt"]), row["chosen"], row["rejected"])


def _read_rows(path: Path, parse: Callable[[Any], T]) -> list[T]:
    try:
        with path.open(encoding="utf-8") as file:
            return [parse(json.loads(line)) for line in file]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of the stage dialogs: {error!r}.") from None
