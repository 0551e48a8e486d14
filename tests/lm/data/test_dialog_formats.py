"""The forms of rows: each is read as the dialog or the pair that was written in it, from each kind of file."""

import csv
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.data.dialog_formats import FORMS, RowParser, read_dialogs
from lm.data.dialogs import Dialog, Message, PreferencePair
from lm.text.rows import DamagedRows
from tests.helpers.examples import examples
from tests.helpers.llamas import make_dialog

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8).filter(str.strip)
TURNS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3)
Row = dict[str, Any]
Messages = list[Message]


def parts(message: Message) -> Row:
    """Return a message whose content is in two parts."""
    half = len(message["content"]) // 2
    texts = message["content"][:half], message["content"][half:]
    return {**message, "content": [{"type": "text", "text": text} for text in texts]}


def sharegpt(messages: Messages) -> list[Row]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[message["role"]], "value": message["content"]} for message in messages]


def alpaca(messages: Messages) -> Row:
    system, turns = split_system(messages)
    contents = [message["content"] for message in turns]
    history = [[*pair] for pair in zip(contents[:-2:2], contents[1:-2:2], strict=True)]
    return {"instruction": contents[-2], "input": "", "output": contents[-1], "history": history, "system": system}


def split_system(messages: Messages) -> tuple[str, Messages]:
    has_system = messages[0]["role"] == "system"
    return (messages[0]["content"], messages[1:]) if has_system else ("", messages)


DIALOGS: dict[str, Callable[[Messages], Row]] = {
    "messages": lambda messages: {"messages": messages},
    "messages in parts": lambda messages: {"messages": [parts(message) for message in messages]},
    "messages as JSON text": lambda messages: {"messages": json.dumps(messages)},
    "ShareGPT": lambda messages: {"conversations": sharegpt(messages)},
    "ShareGPT with a system message": lambda messages: {
        "system": split_system(messages)[0],
        "conversations": sharegpt(split_system(messages)[1]),
    },
    "ShareGPT with OpenAI's names": lambda messages: {"conversations": messages},
    "Alpaca": alpaca,
    "prompt and completion of messages": lambda messages: {"prompt": messages[:-1], "completion": messages[-1:]},
    "prompt of messages and completion": lambda messages: {
        "prompt": messages[:-1],
        "completion": messages[-1]["content"],
    },
}
PAIRS: dict[str, Callable[[Messages, str], Row]] = {
    "messages and texts": lambda chosen, rejected: {
        "prompt": chosen[:-1],
        "chosen": chosen[-1]["content"],
        "rejected": rejected,
    },
    "messages": lambda chosen, rejected: {
        "prompt": chosen[:-1],
        "chosen": chosen[-1:],
        "rejected": make_dialog("", rejected)[1:],
    },
    "one message": lambda chosen, rejected: {
        "prompt": chosen[:-1],
        "chosen": chosen[-1],
        "rejected": make_dialog("", rejected)[1],
    },
    "whole dialogs": lambda chosen, rejected: {
        "chosen": chosen,
        "rejected": [*chosen[:-1], make_dialog("", rejected)[1]],
    },
    "whole dialogs and the prompt": lambda chosen, rejected: {
        "prompt": chosen[-2]["content"],
        "chosen": chosen,
        "rejected": [*chosen[:-1], make_dialog("", rejected)[1]],
    },
    "ShareGPT": lambda chosen, rejected: {
        "conversations": sharegpt(chosen[:-1]),
        "chosen": sharegpt(chosen[-1:])[0],
        "rejected": sharegpt(make_dialog("", rejected)[1:])[0],
    },
    "OpenAI": lambda chosen, rejected: {
        "input": {"messages": chosen[:-1]},
        "preferred_output": chosen[-1:],
        "non_preferred_output": make_dialog("", rejected)[1:],
    },
    "Alpaca": lambda chosen, rejected: {
        **{name: value for name, value in alpaca(chosen).items() if name != "output"},
        "chosen": chosen[-1]["content"],
        "rejected": rejected,
    },
}


def write(path: Path, rows: list[Row]) -> Path:
    """Write rows to a file of the kind that its name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            for row in rows:
                texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
                writer.writerow(texts)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def read(path: Path) -> list[Dialog | PreferencePair]:
    damaged = DamagedRows()
    examples = list(read_dialogs(str(path), damaged))
    assert not damaged.count, damaged
    return examples


def make_messages(turns: list[tuple[str, str]], system: str | None) -> Messages:
    return make_dialog(*(text for turn in turns for text in turn), system=system)


FILES = [".jsonl", ".json", ".csv", ".parquet"]
IN_TABLES = [form for form in DIALOGS if not form.startswith("prompt")]  # there, a prompt is a text


@pytest.mark.parametrize(
    ("form", "suffix"), [(form, suffix) for suffix in FILES for form in (IN_TABLES if suffix == ".csv" else DIALOGS)]
)
@examples(15)
@given(st.lists(st.tuples(TURNS, st.none() | TEXTS), min_size=1, max_size=3))
def test_dialogs_in_each_form_are_those_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, form: str, suffix: str, dialogs: list[tuple[Any, str | None]]
) -> None:
    messages = [make_messages(*dialog) for dialog in dialogs]
    path = write(tmp_path_factory.mktemp("forms") / f"rows{suffix}", [DIALOGS[form](dialog) for dialog in messages])
    assert read(path) == [Dialog(tuple(dialog)) for dialog in messages]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("form", PAIRS)
@examples(15)
@given(st.lists(st.tuples(TURNS, st.none() | TEXTS, TEXTS), min_size=1, max_size=3))
def test_pairs_in_each_form_are_those_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, form: str, suffix: str, pairs: list[tuple[Any, str | None, str]]
) -> None:
    dialogs = [(make_messages(turns, system), f"{turns[-1][1]} not {answer}") for turns, system, answer in pairs]
    path = write(tmp_path_factory.mktemp("forms") / f"rows{suffix}", [PAIRS[form](*dialog) for dialog in dialogs])
    expected = [PreferencePair(tuple(chosen[:-1]), chosen[-1]["content"], rejected) for chosen, rejected in dialogs]
    assert read(path) == expected


HI = tuple(make_dialog("Hi.", "Ho."))
SYSTEM_HI = tuple(make_dialog("Hi.", "Ho.", system="Be kind."))
PAIR = PreferencePair(HI[:1], "Ho.", "No.")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Hi.", "completion": "Ho."}, Dialog(HI)),
        ({"prompt": "Hi.", "completion": "Ho.", "system_prompt": "Be kind."}, Dialog(SYSTEM_HI)),
        ({"instruction": "Add.", "input": "1 + 1", "output": "2"}, Dialog(tuple(make_dialog("Add.\n\n1 + 1", "2")))),
        ({"instruction": "Hi.", "input": None, "output": "Ho.", "text": "…"}, Dialog(HI)),
        ({"instruction": "Hi.", "context": "", "response": "Ho.", "category": "chat"}, Dialog(HI)),
        ({"system_prompt": "Be kind.", "question": "Hi.", "response": "Ho."}, Dialog(SYSTEM_HI)),
        ({"system": "", "question": "Hi.", "chosen": "Ho.", "rejected": "No."}, PAIR),
        ({"instruction": "Hi.", "chosen": "Ho.", "rejected": "No.", "input": ""}, PAIR),
        ({"messages": [{"role": "developer", "content": "Be kind."}, *HI]}, Dialog(SYSTEM_HI)),
        # textmill's own forms are read as ever, whatever else a row has.
        ({"messages": list(HI), "prompt": "a", "chosen": "b", "rejected": "c", "system": "d"}, Dialog(HI)),
        ({"prompt": "Hi.", "response": "Ho.", "chosen": "b", "rejected": "c", "system": "d"}, Dialog(HI)),
        ({"prompt": "Hi.", "chosen": "Ho.", "rejected": "No.", "completion": "x", "system": "d"}, PAIR),
        ({"question": "Hi.", "answer": "Ho.", "output": "x", "instruction": "y"}, Dialog(HI)),
    ],
)
def test_rows(row: Row, expected: Dialog | PreferencePair) -> None:
    assert RowParser().parse(row) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"text": "a"},
            "its fields with a value are 'text'; it needs those of a form, such as messages | prompt, resp",
        ),
        ({"prompt": "a", "completion": "b", "label": False}, "it has a label, as rows for KTO; keep the rows whose"),
        ({"prompt": "a", "completion": "b", "label": "False"}, "it has a label, as rows for KTO"),
        ({"instruction": "a", "output": 5}, "output must be a text, not 5"),
        ({"instruction": "a", "output": " "}, "message 1 is blank"),
        ({"instruction": "a", "output": "b", "history": 5}, "history must be a list of questions with their answers"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, r"history 0 is \['c'\], not a list of a question"),
        ({"instruction": "a", "output": "b", "tools": [{"name": "f"}]}, "the row has tools, which textmill's own"),
        ({"conversations": "[{"}, "conversations is a text, but not JSON: "),
        ({"conversations": [{"from": "gpt", "value": "a"}]}, "message 0 has the role 'assistant', not 'user'"),
        ({"conversations": [*HI, {"from": "human"}]}, "message 2 has no content"),
        ({"conversations": [*SYSTEM_HI], "system": "b"}, "it has the field system and a system message"),
        ({"chosen": "a", "rejected": "b"}, "chosen is a text, so the row needs a prompt; or chosen is a list of mess"),
        ({"chosen": [*HI], "rejected": make_dialog("Hey.", "No.")}, "the messages before the last of chosen and reje"),
        ({"prompt": "x", "chosen": [*HI], "rejected": [*HI]}, "chosen is a whole dialog, without the prompt 'x'"),
        ({"chosen": [*HI], "rejected": [*HI]}, "chosen and rejected are equal"),
        ({"input": 5, "preferred_output": [], "non_preferred_output": []}, "input must be an object with messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "message 0 has a part of the type 'image_url'; textmill reads parts of the type 'text' only",
        ),
        (
            {"conversations": [HI[0], {"from": "function_call", "value": '{"name": "f"}'}]},
            "message 1 has tool_calls, which textmill's own chat template cannot render; remove it, or leave the row",
        ),
    ],
)
def test_damaged_rows(row: Row, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RowParser().parse(row)


def test_a_form_is_not_hidden_by_one_before_it() -> None:
    for index, form in enumerate(FORMS):
        assert not [other.name for other in FORMS[:index] if {*other.required} <= {*form.required}]


def test_the_forms_of_a_file_are_logged_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def log_of(name: str, rows: list[Row]) -> list[str]:
        caplog.clear()
        read(write(tmp_path / name, rows))
        return caplog.messages

    alpaca_rows: list[Row] = [{"instruction": "a", "input": "", "output": "b"}, {"instruction": "a", "output": "b"}]
    with caplog.at_level(logging.INFO, logger="lm"):
        assert log_of("dialogs.json", alpaca_rows) == ["dialogs.json: Alpaca rows (instruction, input, output)"]
        mixed = [*alpaca_rows, {"prompt": "a", "chosen": "b", "rejected": "c"}]
        line = "a.jsonl: Alpaca rows (instruction, input, output): 2; preference rows (prompt, chosen, rejected): 1"
        assert log_of("a.jsonl", mixed) == [line]
        unused = [{"messages": HI, "chosen": [*HI], "rejected": "c", "id": 5}]
        assert log_of("b.jsonl", unused) == ["b.jsonl: rows of messages (messages); not used: chosen, rejected"]


def test_a_row_that_does_not_fit_the_others_is_named_with_its_field(tmp_path: Path) -> None:
    path = tmp_path / "dialogs.csv"
    path.write_text('instruction,input,output\nAdd.,"1,\n1",2\nAdd.,1,\nHi.,,Ho.\n')
    damaged = DamagedRows()
    assert len(list(read_dialogs(str(path), damaged))) == 2
    assert damaged.names == [f"{path}, line 4: it has no usable output; Alpaca rows have instruction, output"]


SCALARS = (
    st.none() | st.booleans() | st.integers(-1, 2) | st.floats() | st.sampled_from(["", " ", "a", "[", "{}", "[1]"])
)
VALUES = st.recursive(
    SCALARS | st.sampled_from(["user", "assistant", "system", "tool", "human", "function_call"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "type", "text", "name"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)
KEYS = [
    "weight",
    "tool_calls",
    "thinking",
    "function_call",
    *dict.fromkeys(name for form in FORMS for name in form.fields),
]


def damage(draw: st.DrawFn, value: Any) -> Any:
    """Return a value with a part of it replaced, added or removed."""
    inner = [*value] if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    if not inner or draw(st.integers(0, 3)) == 0:
        return draw(VALUES)
    key = draw(st.sampled_from(inner))
    changed = value.copy()
    match draw(st.integers(0, 3)):
        case 0:
            del changed[key]
        case 1 if isinstance(value, dict):
            changed[draw(st.sampled_from(KEYS))] = draw(VALUES)
        case _:
            changed[key] = damage(draw, changed[key])
    return changed


@st.composite
def damaged_rows(draw: st.DrawFn) -> Row:
    messages = make_messages(draw(TURNS), draw(st.none() | TEXTS))
    row = draw(
        st.sampled_from([*DIALOGS.values()]).map(lambda write: write(messages))
        | st.sampled_from([*PAIRS.values()]).map(lambda write: write(messages, "no"))
    )
    for _ in range(draw(st.integers(1, 3))):
        row = damage(draw, row)
        if not isinstance(row, dict):
            return {}
    return row


@examples(2000)
@given(damaged_rows(), st.booleans())
def test_a_damaged_row_is_still_valid_or_has_a_reason(row: Row, has_tools: bool) -> None:
    try:
        example = RowParser(has_tools).parse(row)
    except ValueError as error:
        assert str(error)
        return
    answer: Any = {"role": "assistant", "content": "a"}
    messages = [*example.prompt, answer] if isinstance(example, PreferencePair) else example.messages
    assert messages[-1]["role"] == "assistant"
    for message in messages:
        assert has_tools or message.keys() <= {"role", "content", "weight"}
        assert message["content"].strip() or message.get("tool_calls") or message["role"] == "tool"
        assert isinstance(message.get("tool_calls", []), list)
