"""The examples of post-training: read from files or generated, split for validation, and stored as JSON Lines."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from lm.common.errors import UserError
from lm.data.dialog_formats import read_dialogs
from lm.data.dialogs import Dialog, Message, PreferencePair
from lm.eval.problems import Problem, Split, Task, is_generated, load_task
from lm.files.json import write_json_lines
from lm.posttrain.config import DialogsConfig
from lm.text.rows import DamagedRows

T = TypeVar("T")
Example = Dialog | PreferencePair | Problem


@dataclass
class Examples:
    """The examples of one split."""

    dialogs: list[Dialog] = field(default_factory=list)
    pairs: list[PreferencePair] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


@dataclass
class RowCounts:
    """Numbers of used and unused rows of a field of the config."""

    name: str
    """Name of the rows in messages."""
    used: int = 0
    left_out: int = 0
    """Rows for training that were left out because a held-out example, or a tested problem, asks the same."""
    damaged: DamagedRows = field(default_factory=DamagedRows)

    @property
    def unused(self) -> int:
        """Number of rows that are damaged or left out."""
        return self.left_out + self.damaged.count

    @property
    def unused_fraction(self) -> float:
        """Fraction of the rows that are damaged or left out."""
        return self.unused / max(1, self.used + self.unused)

    def __str__(self) -> str:
        reasons = []
        if self.left_out:
            reasons.append(f"{self.left_out:,} ask the same as a held-out example or a tested problem")
        if self.damaged.count:
            reasons.append(f"{self.damaged.count:,} are damaged ({'; '.join(self.damaged.names[:3])})")
        return f"{self.unused:,} of {self.used + self.unused:,} {self.name} are not used: {', and '.join(reasons)}"


def read_examples(
    config: DialogsConfig,
    train: Sequence[str],
    valid: Sequence[str],
    task_train: Sequence[str],
    task_test: Sequence[str],
) -> tuple[Examples, Examples, Task, list[RowCounts]]:
    """Return the examples for training, those held out of them, the tested problems, and the counts of the rows.

    The four lists are the files of ``config``'s fields of these names; the counts are in the same order. Raises
    UserError for an unreadable file or an unknown task.
    """
    counts = [
        RowCounts(name)
        for name in ("rows of dialogs.train", "rows of dialogs.valid", "problems to train on", "problems to test on")
    ]
    named = [
        [example for url in urls for example in read_dialogs(url, count.damaged)]
        for urls, count in zip((train, valid), counts, strict=False)
    ]
    common = _find_common_starts([*named[0], *named[1]])
    splits = Examples(), Examples()
    for examples, is_valid in zip(named, (False, True), strict=True):
        for example in examples:
            is_held_out = not valid and _is_held_out(_key(example, common), config.valid_fraction)
            split = splits[is_valid or is_held_out]
            if isinstance(example, Dialog):
                split.dialogs.append(example)
            else:
                split.pairs.append(example)
    test = Task("", [], "")
    if config.task:
        problems = _read_problems(config, "train", task_train, config.train_problems, counts[2].damaged).problems
        test = _read_problems(config, "test", task_test, config.test_problems, counts[3].damaged)
        tested = {problem.prompt for problem in test.problems}
        for problem in problems:
            is_held_out = problem.prompt not in tested and _is_held_out(_key(problem, common), config.valid_fraction)
            splits[is_held_out].problems.append(problem)
        counts[2].used, counts[3].used = len(problems), len(test.problems)
    counts[0].used, counts[1].used = map(len, named)
    left_out = _leave_out_held_out(*splits, test, common)
    for count, kinds in ((counts[0], ("dialogs", "pairs")), (counts[2], ("problems",))):
        count.left_out = sum(left_out[kind] for kind in kinds)
        count.used -= count.left_out
    if config.solutions != 0:
        for split, limit in zip(splits, (config.solutions, None), strict=True):
            solved = [(problem.prompt, problem.solution) for problem in split.problems if problem.solution]
            for prompt, solution in solved[:limit]:
                messages = Message(role="user", content=prompt), Message(role="assistant", content=solution)
                split.dialogs.append(Dialog(messages))
    return *splits, test, counts


def _read_problems(config: DialogsConfig, split: Split, urls: Sequence[str], count: int, damaged: DamagedRows) -> Task:
    if not urls and not is_generated(config.task):
        raise UserError(f"dialogs.task {config.task} is read from files; name them in dialogs.task_{split}.")
    return load_task(config.task, urls, split, count, config.seed, damaged)


def _starts(example: Example) -> Iterator[str]:
    """Yield the question, the messages up to it (a system message may be before it), then one more message each.

    The user's last message is as it was before it was put into a template.
    """
    if isinstance(example, Problem):
        messages = [Message(role="user", content=example.prompt)]
    elif isinstance(example, PreferencePair):
        answers = (Message(role="assistant", content=answer) for answer in (example.chosen, example.rejected))
        messages = [*example.prompt, *answers]
    else:
        messages = [*example.messages]
        if example.question is not None:
            asked = max(index for index, message in enumerate(messages) if message["role"] == "user")
            messages[asked] = Message(role="user", content=example.question)
    parts = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
    first = 1 if messages[0]["role"] == "system" else 0
    yield json.dumps(parts[first : first + 1], sort_keys=True)
    for end in range(first + 1, len(parts) + 1):
        yield json.dumps(parts[:end], sort_keys=True)


def _question(example: Example) -> str:
    """Return the user's first message, whatever the system message is."""
    return next(_starts(example))


def _key(example: Example, common: Set[str]) -> str:
    """Return the messages up to the user's first, or up to the next that make a start that is not ``common``.

    All examples of a key are in one split.
    """
    for key in islice(_starts(example), 1, None):
        if key not in common:
            break
    return key


def _find_common_starts(examples: Sequence[Example]) -> set[str]:
    """Return the starts of dialogs, such as "Continue", that too many examples share to tell them apart."""
    limit = max(20, 0.05 * len(examples))
    new = _more_than(limit, map(_question, examples))
    common = set[str]()
    while new:
        common |= new
        new = _more_than(limit, (_key(example, common) for example in examples)) - common
    return common


def _more_than(limit: float, keys: Iterable[str]) -> set[str]:
    return {key for key, count in Counter(keys).items() if count > limit}


def _is_held_out(key: str, fraction: float) -> bool:
    """Return whether the hash of a key holds its examples out."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < fraction * 2**64


def _leave_out_held_out(train: Examples, valid: Examples, test: Task, common: Set[str]) -> Counter[str]:
    """Take the examples out of ``train`` that ask what a held-out one or a tested problem asks; return their numbers.

    Examples with different system messages ask different things. One without, such as a problem, asks what any with its
    question asks, unless the question is ``common``.
    """
    examples: list[Example] = [*valid.dialogs, *valid.pairs, *valid.problems, *test.problems]
    keys, questions = {_key(example, common) for example in examples}, {_question(example) for example in examples}

    def is_asked(example: Example) -> bool:
        key = _key(example, common)
        return key in keys or key in questions or _question(example) in keys

    left_out = Counter[str]()
    for kind in ("dialogs", "pairs", "problems"):
        given = getattr(train, kind)
        kept = [example for example in given if not is_asked(example)]
        setattr(train, kind, kept)
        left_out[kind] = len(given) - len(kept)
    return left_out


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Write dataclass objects as JSON Lines. Dialogs without tools have no field for them."""
    fields = ({name: value for name, value in asdict(row).items() if (name, value) != ("tools", ())} for row in rows)
    write_json_lines(path, fields)


def read_example_rows(path: Path, *kinds: type[T]) -> list[T]:
    """Read examples of one of ``kinds`` that :func:`write_rows` wrote. Raises UserError for any other file."""

    def parse(line: str) -> T:
        row = json.loads(line)
        example: Example
        if "messages" in row:
            example = Dialog(tuple(row["messages"]), row["question"], tuple(row.get("tools", ())))
        elif "chosen" in row:
            example = PreferencePair(tuple(row["prompt"]), row["chosen"], row["rejected"])
        else:
            example = Problem(**row)
        if not isinstance(example, kinds):
            raise TypeError(f"it has a {type(example).__name__}")
        return example

    try:
        with path.open(encoding="utf-8") as file:
            return [parse(line) for line in file]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of the stage dialogs: {error!r}.") from None
