"""Dialogs with tools: kept in the messages, and refused by name where the template cannot render them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm.common.errors import UserError
from lm.data.chat_template import add_chat_tokens, encode_dialog
from lm.data.dialog_formats import RowParser, read_dialogs
from lm.data.dialogs import Dialog
from lm.posttrain.data import read_example_rows, write_rows
from lm.text.rows import DamagedRows
from tests.helpers.tokenizers import make_tokenizer

FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
TOOLS = ({"type": "function", "function": FUNCTION},)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
MESSAGES: list[Any] = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **CALL}, {"id": "c2", **CALL}]},
    {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    {"role": "tool", "content": "", "tool_call_id": "c2"},
    {"role": "assistant", "content": "It is 2.", "reasoning_content": "Easy."},
]
DIALOG = Dialog(tuple(MESSAGES), None, TOOLS)
OPENAI_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
OPENAI = {
    "messages": [
        *MESSAGES[:2],
        {"role": "assistant", "content": None, "tool_calls": [OPENAI_CALL, {**OPENAI_CALL, "id": "c2"}]},
        *MESSAGES[3:5],
        {"role": "assistant", "content": "It is 2.", "reasoning": "Easy.", "tool_calls": None},
    ],
    "tools": json.dumps([FUNCTION]),
}


def test_rows_of_openai_and_sharegpt() -> None:
    assert RowParser(has_tools=True).parse({"messages": MESSAGES, "tools": [*TOOLS]}) == DIALOG
    assert RowParser(has_tools=True).parse(OPENAI) == DIALOG
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "1 + 1?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "It is 2."},
        ],
        "system": "Add.",
        "tools": json.dumps([FUNCTION]),
    }
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    tool, answer = {"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}
    expected: Any = (*MESSAGES[:2], calls, tool, answer)
    assert RowParser(has_tools=True).parse(sharegpt) == Dialog(expected, None, TOOLS)


def test_parquet_adds_no_fields(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([OPENAI]), tmp_path / "a.parquet")
    assert list(read_dialogs(str(tmp_path / "a.parquet"), DamagedRows(), has_tools=True)) == [DIALOG]


def test_a_stored_dialog_keeps_its_tools_and_one_without_has_no_field_for_them(tmp_path: Path) -> None:
    plain = Dialog(tuple(MESSAGES[:2] + MESSAGES[-1:]))
    write_rows(tmp_path / "dialogs.jsonl", [DIALOG, plain])
    assert read_example_rows(tmp_path / "dialogs.jsonl", Dialog) == [DIALOG, plain]
    keys = [json.loads(line).keys() for line in (tmp_path / "dialogs.jsonl").read_text().splitlines()]
    assert keys == [{"messages", "question", "tools"}, {"messages", "question"}]


def test_a_dialog_may_end_with_a_call() -> None:
    row = {"messages": MESSAGES[:3], "tools": [FUNCTION]}
    assert RowParser(has_tools=True).parse(row) == Dialog(tuple(MESSAGES[:3]), None, TOOLS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"messages": [*MESSAGES[:2], *MESSAGES[3:]]},
            "message 2 has the role 'tool', not 'assistant'; the roles must",
        ),
        (
            {"messages": [*MESSAGES[:3], MESSAGES[5]]},
            "message 3 has the role 'assistant', not 'tool'; .*, and tool aft",
        ),
        ({"messages": MESSAGES[:5]}, "message 5, from the assistant, is missing"),
        ({"tools": "[{"}, "tools is a text, but not JSON"),
        ({"tools": {"name": "f"}}, "tools must be a list of functions, not"),
        ({"tools": [{"type": "function"}]}, "tool 0 has no name; it must be an object with a name and its parameters"),
        ({"functions": [FUNCTION]}, "the row has functions, which is not read; write it as tools"),
        (
            {"messages": [MESSAGES[1], {**MESSAGES[5], "function_call": {"name": "f"}}]},
            "message 1 has function_call, w",
        ),
        (
            {"messages": [MESSAGES[1], {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "message 1, tool call 0 has no name; it must be as",
        ),
        (
            {"messages": [MESSAGES[1], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            r"message 1, tool call 0: the arguments must be an object, not \[1\]",
        ),
        (
            {"messages": [MESSAGES[1], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "message 1, tool call 0, arguments is a text, but not JSON",
        ),
    ],
    ids=range(11),
)
def test_damaged_rows(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RowParser(has_tools=True).parse({"messages": MESSAGES, "tools": [*TOOLS]} | changes)


def test_pairs_have_no_tools() -> None:
    row = {"prompt": "a", "chosen": [MESSAGES[2]], "rejected": "c"}
    with pytest.raises(ValueError, match="message 1 has tool_calls, which textmill's own chat template cannot render"):
        RowParser(has_tools=True).parse(row)


def test_the_template_refuses_what_it_cannot_render() -> None:
    with pytest.raises(ValueError, match="the row has tools, which textmill's own chat template cannot render"):
        RowParser().parse({"messages": MESSAGES, "tools": [*TOOLS]})
    tokenizer = add_chat_tokens(make_tokenizer())
    with pytest.raises(UserError, match="The dialog: message 2 has tool_calls, which textmill's own chat template can"):
        encode_dialog(tokenizer, DIALOG.messages)
