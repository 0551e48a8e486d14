"""The data of post-training: reading, division and storage."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.data.dialogs import Dialog, Message, PreferencePair
from lm.eval.problems import Problem
from lm.posttrain.config import DialogsConfig
from lm.posttrain.data import Examples, read_example_rows, read_examples, write_rows
from tests.helpers.llamas import make_dialog
from tests.helpers.posttraining import dialog, pair


def write_file(path: Path, rows: list[object]) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def test_dialogs_and_pairs_are_divided_by_their_prompts(tmp_path: Path) -> None:
    rows: list[object] = [
        {"prompt": f"question {number % 50}", "response": f"answer {number}"} for number in range(200)
    ]
    rows += [{"prompt": f"question {number}", "chosen": "a", "rejected": "b"} for number in range(50)]
    path = write_file(tmp_path / "rows.jsonl", [*rows, "not json", {"other": 1}])
    train, valid, test, [count, *_] = read_examples(DialogsConfig(valid_fraction=0.3), [path], [], [], [])
    assert test.reward == "" and count.damaged.count == 2 and "line 251: not JSON" in count.damaged.names[0]
    assert len(train.dialogs) + len(valid.dialogs) == 200 and len(train.pairs) + len(valid.pairs) == 50
    prompts = [{example.messages[0]["content"] for example in split.dialogs} for split in (train, valid)]
    assert not prompts[0] & prompts[1] and 5 < len(prompts[1]) < 25
    assert {example.prompt[0]["content"] for example in valid.pairs} == prompts[1]
    again = read_examples(DialogsConfig(valid_fraction=0.3), [path], [], [], [])
    assert again[:2] == (train, valid)


def test_named_held_out_files_leave_the_training_rows_alone(tmp_path: Path) -> None:
    paths = [
        write_file(tmp_path / f"{name}.jsonl", [{"prompt": name, "response": str(n)} for n in range(9)])
        for name in "ab"
    ]
    train, valid, _, _ = read_examples(DialogsConfig(valid_fraction=0.9), paths[:1], paths[1:], [], [])
    assert (len(train.dialogs), len(valid.dialogs)) == (9, 9)


def test_nothing_held_out_is_trained_on(tmp_path: Path) -> None:
    numbers = range(60)
    rows: list[object] = []
    for number in numbers:
        start = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "a"}]
        more = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "b"}]
        system = {"role": "system", "content": "Be kind."}
        rows += [{"messages": start}, {"messages": start + more}, {"messages": [system, *start]}]
        rows.append({"prompt": f"{number}?", "chosen": "a", "rejected": "b"})
        templated = {"role": "user", "content": f"Think first. {number}?"}
        rows.append({"prompt": templated["content"], "response": "c", "question": f"{number}?"})  # as teach writes them
        rows.append({"messages": [system, templated, start[1]], "question": f"{number}?"})
    path = write_file(tmp_path / "rows.jsonl", rows)
    gsm8k = [{"question": f"{number}?", "answer": f"#### {number}"} for number in numbers]
    task_train, task_test = (write_file(tmp_path / f"{len(part)}.jsonl", [*part]) for part in (gsm8k, gsm8k[3:5]))
    config = DialogsConfig(task="gsm8k", valid_fraction=0.2)
    train, valid, test, counts = read_examples(config, [path], [], [task_train], [task_test])

    def asked(split: Examples) -> set[str]:
        messages = [example.messages for example in split.dialogs] + [example.prompt for example in split.pairs]
        firsts = {next(m["content"] for m in part if m["role"] == "user") for part in messages}
        return {first.removeprefix("Think first. ") for first in firsts} | {row.prompt for row in split.problems}

    tested = {problem.prompt for problem in test.problems}
    assert tested == {"3?", "4?"} and not asked(train) & (asked(valid) | tested)
    assert asked(train) | asked(valid) | tested == {f"{number}?" for number in numbers}
    chosen_on = {problem.prompt for problem in valid.problems}
    assert chosen_on and not chosen_on & tested
    kept = sum(len(split.dialogs) + len(split.pairs) for split in (train, valid))  # with the solutions of the problems
    assert sum(count.left_out for count in counts) == len(rows) + len(gsm8k) - kept >= 2


def system_row(system: str, question: str, answer: str = "a") -> Any:
    return {"messages": make_dialog(question, answer, system=system)}


def counted(path: str, valid: list[str], **fields: Any) -> tuple[int, int, int]:
    """Return the numbers of dialogs for training, of those held out, and of those left out."""
    train, held_out, _, counts = read_examples(DialogsConfig(**fields), [path], valid, [], [])
    return len(train.dialogs), len(held_out.dialogs), sum(count.left_out for count in counts)


@pytest.mark.parametrize("question", ["Summarize.", "Hi"])
def test_dialogs_with_other_system_messages_ask_different_things(tmp_path: Path, question: str) -> None:
    rows = [system_row(f"Text {number}", question) for number in range(200)]
    train, held_out, left_out = counted(write_file(tmp_path / "all.jsonl", rows), [])
    assert train + held_out == 200 and 2 <= held_out <= 25 and left_out == 0
    others = [{"prompt": f"{number}?", "response": "a"} for number in range(20)]
    mixed = write_file(tmp_path / "mixed.jsonl", [*rows[:180], *others])
    assert sum(counted(mixed, [])[:2]) == 200
    valid = write_file(tmp_path / "valid.jsonl", rows[:2])
    few = write_file(tmp_path / "few.jsonl", rows[2:12])
    assert counted(few, [valid]) == (10, 2, 0)
    assert counted(few, [few]) == (0, 10, 10), "equal system messages and questions are one question"


def test_two_dialogs_of_which_one_is_held_out(tmp_path: Path) -> None:
    two = write_file(tmp_path / "two.jsonl", [system_row(f"Text {number}", "Summarize.") for number in (30, 31)])
    assert counted(two, []) == (1, 1, 0)


@pytest.mark.parametrize("question", ["Continue", "Tell me a story.", "x"])
def test_a_first_message_that_most_dialogs_share_does_not_decide_alone(tmp_path: Path, question: str) -> None:
    answers = [{"prompt": question, "response": f"story {number}"} for number in range(200)]
    longer = [{"messages": make_dialog(question, "Of what?", f"of {number}", "it was")} for number in range(200)]
    personas = [system_row("Be a poet.", question, f"poem {number}") for number in range(200)]
    pairs = [{"prompt": question, "chosen": f"{number}", "rejected": "b"} for number in range(200)]
    kinds: dict[str, list[Any]] = {"answers": answers, "longer": longer, "personas": personas}
    for name, rows in kinds.items():
        path = write_file(tmp_path / f"{name}.jsonl", [*rows])
        train, held_out, left_out = counted(path, [])
        assert train + held_out == 200 and 2 <= held_out <= 25 and left_out == 0, name
        valid = write_file(tmp_path / "valid.jsonl", [*rows[:5]])
        train_file = write_file(tmp_path / "train.jsonl", [*rows[3:]])
        assert counted(train_file, [valid]) == (195, 5, 2), f"{name}: equal dialogs are left out"
    split, held, _, _ = read_examples(DialogsConfig(), [write_file(tmp_path / "pairs.jsonl", [*pairs])], [], [], [])
    assert len(split.pairs) + len(held.pairs) == 200 and 2 <= len(held.pairs) <= 25


def test_weights_do_not_make_questions_differ(tmp_path: Path) -> None:
    rows: list[object] = []
    for number in range(100):
        [*beginning, last] = make_dialog("Hello!", "Hi!", f"question {number // 2}", "answer")
        beginning[1]["weight"] = number % 2
        rows.append({"messages": [*beginning, last]})
    train, valid, _, _ = read_examples(
        DialogsConfig(valid_fraction=0.4), [write_file(tmp_path / "a", rows)], [], [], []
    )
    asked = [[example.messages[2]["content"] for example in split.dialogs] for split in (train, valid)]
    assert len(asked[0]) + len(asked[1]) == 100 and not {*asked[0]} & {*asked[1]} and asked[1]


def test_a_tested_problem_leaves_out_any_dialog_with_its_question(tmp_path: Path) -> None:
    rows = [system_row(f"Be {number}.", "3?", f"answer {number}") for number in range(200)]
    rows += [{"prompt": "3?", "response": f"answer {number}"} for number in range(200)]
    rows += [{"prompt": "4?", "response": "5"}]
    path = write_file(tmp_path / "rows.jsonl", rows)
    task = write_file(tmp_path / "task.jsonl", [{"question": "3?", "answer": "#### 4"}])
    other = write_file(tmp_path / "other.jsonl", [{"question": "5?", "answer": "#### 6"}])
    config = DialogsConfig(task="gsm8k", valid_fraction=0, solutions=0)
    train, _, _, counts = read_examples(config, [path], [], [other], [task])
    assert [row.messages[0]["content"] for row in train.dialogs] == ["4?"]
    assert [(count.used, count.left_out) for count in counts] == [(1, 400), (0, 0), (1, 0), (1, 0)]


def test_generated_problems_of_training_and_test_differ() -> None:
    config = DialogsConfig(task="addition:1-2", train_problems=3000, test_problems=100)
    train, valid, test, _ = read_examples(config, [], [], [], [])
    assert test.reward == "exact" and len(test.problems) == 100
    assert len(train.problems) + len(valid.problems) == 3000 and 100 < len(valid.problems) < 200
    prompts = [{problem.prompt for problem in part.problems} for part in (train, valid, test)]
    assert len(set.union(*prompts)) == sum(map(len, prompts))
    assert [example.messages[1]["content"] for example in train.dialogs] == [p.solution for p in train.problems]
    for solutions in (0, 7):
        few = read_examples(DialogsConfig(task="addition:1-2", solutions=solutions), [], [], [], [])
        assert len(few[0].dialogs) == solutions and len(few[0].problems) > 1000


def test_problems_of_files_have_their_reward(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": f"so\n#### {n}"} for n in range(4)]
    train, test = (write_file(tmp_path / f"{name}.jsonl", [*part]) for name, part in (("a", rows[:3]), ("b", rows[2:])))
    config = DialogsConfig(task="gsm8k", task_train=[train], task_test=[test])
    split, _, task, _ = read_examples(config, [], [], [train], [test])
    assert task.reward == "gsm8k"
    assert [problem.prompt for problem in split.problems] == ["0?", "1?"], "a tested problem is not trained on"
    assert [problem.ground_truth for problem in task.problems] == ["2", "3"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DialogsConfig(task="gsm8k"), "dialogs.task gsm8k is read from files; name them in dialogs.task_train"),
        (DialogsConfig(task="addition:3-1"), "the fewest digits must be 1 to the most digits"),
        (DialogsConfig(task="sums", task_train=["x"]), "There is no task 'sums'"),
    ],
)
def test_a_bad_task_is_named(config: DialogsConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_examples(config, [], [], config.task_train, [])


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(TEXT, TEXT, TEXT)
def test_stored_rows_are_read_as_they_were(tmp_path_factory: pytest.TempPathFactory, a: str, b: str, c: str) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    first, answer = dialog(c, a).messages
    dialogs: list[Dialog] = [dialog(a, b), Dialog(dialog(b, c).messages, "4")]
    dialogs.append(Dialog((first, Message(**answer, weight=0), *dialog(a, b).messages)))
    pairs: list[PreferencePair] = [pair(a, b, c)]
    problems = [Problem(a, [b, {"c": c}]), Problem(b, c, a)]
    write_rows(path, dialogs)
    assert read_example_rows(path, Dialog) == dialogs
    write_rows(path, pairs)
    assert read_example_rows(path, PreferencePair) == pairs
    write_rows(path, problems)
    assert read_example_rows(path, Problem) == problems
