"""Rows as dialogs and preference pairs, and the reasons why a row is damaged."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lm.data.dialog_formats import RowParser, read_dialogs
from lm.data.dialogs import Dialog, PreferencePair, final_answer, find_role_problem
from lm.text.rows import DamagedRows
from tests.helpers.llamas import make_dialog

HI = tuple(make_dialog("Hi.", "Ho."))
LONG = tuple(make_dialog("a", "b", "c", "d", system="e"))
GSM8K = tuple(make_dialog("1+1?", "It is 2.\n#### 1,002 "))


def weighted(first: Any, second: Any) -> list[Any]:
    """Return a dialog of two answers with these weights."""
    [user, answer, other_user, other_answer] = make_dialog("a", "b", "c", "d")
    return [user, {**answer, "weight": first}, other_user, {**other_answer, "weight": second}]


def with_field(**fields: Any) -> dict[str, Any]:
    return {"messages": [HI[0], {**HI[1], **fields}]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": list(HI)}, Dialog(HI)),
        ({"messages": list(LONG)}, Dialog(LONG)),
        ({"messages": [{**message, "name": None} for message in HI], "id": 3}, Dialog(HI)),
        ({"messages": make_dialog("Hi.", "Ho.", system="")}, Dialog(HI)),
        ({"messages": make_dialog("a", "b", "c", "d", system=" \n")}, Dialog(LONG[1:])),
        ({"prompt": "Hi.", "response": "Ho.", "words": ["a"], "reasoning": "off", "tools": []}, Dialog(HI)),
        ({"messages": weighted(0, 1)}, Dialog((LONG[1], weighted(0, 1)[1], *LONG[3:]))),
        ({"messages": weighted(None, 1.0)}, Dialog(LONG[1:])),
        ({"messages": [{**HI[0], "weight": 0}, HI[1]]}, Dialog(HI)),
        ({"messages": [{**message, "tool_calls": [], "reasoning": ""} for message in HI], "tools": None}, Dialog(HI)),
        ({"prompt": "Hi.", "response": "Ho.", "question": "Hey?"}, Dialog(HI, "Hey?")),
        ({"messages": list(LONG), "question": "Hey?"}, Dialog(LONG, "Hey?")),
        ({"question": "Hi.", "answer": "Ho."}, Dialog(HI)),
        ({"prompt": "Hi.", "chosen": "Ho.", "rejected": "No."}, PreferencePair(HI[:1], "Ho.", "No.")),
        ({"question": "1+1?", "answer": "It is 2.\n#### 1,002 "}, Dialog(GSM8K)),
    ],
)
def test_the_four_kinds_of_rows(row: dict[str, Any], expected: Dialog | PreferencePair) -> None:
    assert RowParser().parse(row) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "its fields with a value are none; it needs those of a form, such as messages | prompt, response"),
        ({"prompt": "a", "response": None}, "its fields with a value are 'prompt'; it needs those"),
        ({"prompt": ["a"], "chosen": "b", "rejected": "c"}, "prompt has the part 'a', not "),
        ({"messages": []}, "message 0, from the assistant, is missing"),
        ({"messages": make_dialog(system="a")}, "message 1, from the assistant, is missing"),
        ({"messages": make_dialog("a")}, "message 1, from the assistant, is missing"),
        ({"messages": make_dialog("a", "b", "c")}, "message 3, from the assistant, is missing"),
        ({"messages": [*make_dialog("a"), *make_dialog("b")]}, "message 1 has the role 'user', not 'assistant'"),
        ({"messages": make_dialog("a", "b")[::-1]}, "message 0 has the role 'assistant', not 'user'"),
        ({"messages": [*HI, *make_dialog(system="a")]}, "message 2 has the role 'system', not 'user'"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "message 0 has the role 'tool'"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, r"message 0 has the role \['user'\]"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "message 0 has the part {'text': 'a'}, not "),
        ({"messages": ["Hi."]}, "message 0 has no content"),
        ({"messages": make_dialog("a", " \n")}, "message 1 is blank"),
        ({"messages": make_dialog("a", "", system="")}, "message 2 is blank"),
        ({"messages": make_dialog("", "b", system=" ")}, "message 1 is blank"),
        ({"messages": weighted(0, 0)}, "all answers have the weight 0"),
        ({"messages": weighted(1, 0.5)}, "message 3 has the weight 0.5; it must be 0 or 1"),
        ({"messages": weighted("0", 1)}, "message 1 has the weight '0'"),
        (
            with_field(tool_calls=[{"id": "1"}]),
            "message 1 has tool_calls, which textmill's own chat template",
        ),
        (with_field(tool_calls=[{"id": "1"}], content=None), "message 1 has tool_calls"),
        (with_field(function_call={"name": "f"}), "message 1 has function_call"),
        (with_field(reasoning_content="hm"), "message 1 has reasoning_content"),
        (with_field(thinking="hm"), "message 1 has thinking"),
        (
            {"messages": list(HI), "tools": [{"type": "function"}]},
            "the row has tools, which textmill's own",
        ),
        ({"prompt": "a", "response": "b", "reasoning_content": "c"}, "the row has reasoning_content"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": [{}]}, "the row has tools"),
        ({"messages": 5}, "its fields with a value are none; it needs those of a form, such as messages"),
        ({"prompt": "", "response": "b"}, "message 0 is blank"),
        ({"prompt": "x" * 10_000_000, "response": "b"}, "message 0 has 10,000,000 characters, more than 1,000,000"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "message 1 is blank"),
        ({"question": "a", "answer": " "}, "message 1 is blank"),
    ],
)
def test_damaged_rows(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RowParser().parse(row)


def test_a_dialog_to_be_answered_ends_with_the_user() -> None:
    assert find_role_problem(make_dialog("a"), "user") is None
    assert find_role_problem(make_dialog("a", "b", "c", system="d"), "user") is None
    assert find_role_problem(make_dialog("a", "b"), "user") == "message 2, from the user, is missing"


def test_a_file_of_good_and_damaged_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"prompt": "\udcff"', errors="surrogateescape")
    damaged = DamagedRows()
    kinds = [type(row) for row in read_dialogs(str(path), damaged)]
    assert kinds == [Dialog, PreferencePair]
    assert damaged.count == 2 and "line 2" in damaged.names[0] and "line 4: not UTF-8" in damaged.names[1]


@pytest.mark.parametrize(("name", "count"), [("dialogs_valid", 206), ("words_valid", 271), ("gsm8k_test", 1319)])
def test_real_files(shared_data: Path, name: str, count: int) -> None:
    damaged = DamagedRows()
    dialogs = list(read_dialogs(str(shared_data / f"{name}.jsonl.xz"), damaged))
    assert len(dialogs) == count and not damaged.count
    if name == "gsm8k_test":
        for row in dialogs:
            assert isinstance(row, Dialog) and math.isfinite(float(final_answer(row.messages[1]["content"])))
