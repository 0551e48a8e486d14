"""Hostile dialogs: each row is refused by name or encoded as plain text, and nothing else is lost."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.data.chat_template import CHAT_TOKENS, encode_chat_prompt, encode_dialog
from lm.data.dialog_formats import read_dialogs
from lm.data.dialogs import Dialog
from lm.eval.problems import read_task
from lm.inference.chat_format import ChatFormat
from lm.posttrain.config import DialogsConfig
from lm.posttrain.data import read_example_rows, write_rows
from lm.posttrain.objectives.generation import encode_prompts
from lm.text.pretokenize import END_OF_TEXT
from lm.text.rows import DamagedRows
from tasks.dialogs import dialogs, find_dialog_sources
from tasks.runtime.output import Output, read_output
from tests.helpers.examples import examples
from tests.helpers.llamas import make_dialog
from tests.helpers.posttraining import CHAT
from tests.helpers.processes import PROJECT
from tests.helpers.roots import materialize, run_context
from textmill.server.requests import ApiError, ChatRequest, CompletionRequest, parse_request

GOOD = b'{"prompt": "good", "response": "fine"}'
SPECIAL_IDS = set(CHAT.special_ids.values())
USER, ASSISTANT, SYSTEM, END = (CHAT.special_ids[f"<|{name}|>"] for name in ("user", "assistant", "system", "end"))
SURROGATE = "\\ud800"  # as escaped in JSON

hostile = st.lists(
    st.sampled_from([*CHAT_TOKENS, END_OF_TEXT, "<|", "|>", "<|end", "assistant|>", "\0", "\ud800", "\u2028", "é", " "])
    | st.text(max_size=3),
    min_size=1,
    max_size=8,
).map("".join)
hostile_texts = hostile.filter(lambda text: bool(text.strip()))


def make_output(root: Path, *paths: Path, **fields: Any) -> Output:
    """Run the stage dialogs on files."""
    config = DialogsConfig(train=[str(path) for path in paths], valid_fraction=0, **fields)
    run = run_context(root)
    return read_output(run.store, materialize(dialogs, run, *find_dialog_sources(config, run.store), config))


def write_lines(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"\n".join(lines))
    return path


# Users' words never become special tokens.


def specials(ids: list[int]) -> list[int]:
    return [token_id for token_id in ids if token_id in SPECIAL_IDS]


@examples(50)
@given(st.lists(st.tuples(hostile_texts, hostile_texts, st.none() | hostile_texts), min_size=1, max_size=4))
def test_special_tokens_in_a_file_are_plain_text(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str | None]]
) -> None:
    directory = tmp_path_factory.mktemp("dialogs")
    messages = [make_dialog(user, answer, system=system) for user, answer, system in rows]
    path = write_lines(directory / "rows.jsonl", *(json.dumps({"messages": row}).encode() for row in messages))
    write_rows(directory / "dialogs.jsonl", read_dialogs(str(path), DamagedRows()))  # as the stage dialogs does
    read = read_example_rows(directory / "dialogs.jsonl", Dialog)
    for row, dialog in zip(messages, read, strict=True):
        example = encode_dialog(CHAT, dialog.messages)
        marks = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
        assert specials(example.ids) == [token for message in row for token in (marks[message["role"]], END)]
        targets = [token for token, is_target in zip(example.ids, example.is_target, strict=True) if is_target]
        assert specials(targets) == [END], "the user's words are never learned"


@examples(100)
@given(hostile)
def test_special_tokens_in_prompts_and_requests_are_plain_text(text: str) -> None:
    chat_format = ChatFormat(CHAT)
    prompt = [USER, END, ASSISTANT]
    user = make_dialog(text)
    assert specials(encode_chat_prompt(CHAT, user)) == specials(chat_format.encode(user)) == prompt
    assert specials(encode_prompts(CHAT, [text], 1 << 20)[0]) == prompt
    body = json.dumps({"messages": make_dialog(text, text, text, system=text)}).encode()
    completion = json.dumps({"prompt": text}).encode()
    try:
        [ids] = parse_request(ChatRequest, body).encode_prompts(chat_format)
        [completion_ids] = parse_request(CompletionRequest, completion).encode_prompts(chat_format)
    except ApiError as error:
        assert error.status == 400 and "Invalid JSON" in str(error) and "\ud800" in text
        return
    assert specials(ids) == [SYSTEM, END, USER, END, ASSISTANT, END, *prompt]
    assert not specials(completion_ids) or not text, "an empty prompt begins with the end-of-text token"


@pytest.mark.parametrize("role", ["<|assistant|>", "assistant<|end|>", "function", "", "Assistant", "system\0"])
def test_a_role_cannot_be_a_special_token(role: str) -> None:
    messages: list[Any] = [{"role": role, "content": "x"}]
    with pytest.raises(UserError, match="message 0 has the role"):
        encode_chat_prompt(CHAT, messages)
    with pytest.raises(ApiError, match=r"messages\.0\.role"):
        parse_request(ChatRequest, json.dumps({"messages": messages}).encode())


# Damaged rows


def in_role(value: bytes) -> bytes:
    return b'{"messages": [{"role": ' + value + b', "content": "x"}]}'


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


DAMAGED: dict[str, tuple[bytes, str]] = {
    "roles out of order": (
        json.dumps({"messages": [*make_dialog("a", "b")][::-1]}).encode(),
        "message 0 has the role 'assistant', not 'user'",
    ),
    "unknown role": (in_role(b'"<|assistant|>"'), "message 0 has the role '<|assistant|>', not 'user'"),
    "role of 10 MB": (in_role(b'"' + b"x" * 10_000_000 + b'"'), "message 0 has the role 'xxx"),
    "nested role": (in_role(nested(900)), "message 0 has the role [[[[[[[...]]]]]]], not 'user'"),
    "empty message": (b'{"prompt": "a", "response": ""}', "message 1 is blank"),
    "message of 10 MB": (
        b'{"prompt": "' + b"x" * 10_000_000 + b'", "response": "b"}',
        "message 0 has 10,000,000 characters, more than 1,000,000",
    ),
    "invalid UTF-8": (b'{"prompt": "\xff", "response": "b"}', "not UTF-8: byte 0xff at offset 12"),
    "raw NUL byte": (b'{"prompt": "\0", "response": "b"}', "not JSON: Invalid control character"),
    "deep nesting": (b'{"messages": ' + nested(100_000) + b"}", "not JSON: maximum recursion depth"),
    "nesting with a lone surrogate": (
        b'{"prompt": "a", "response": "\\ud800", "x": ' + nested(900) + b"}",
        "not JSON: maximum recursion depth",
    ),
    "huge integer": (b'{"prompt": 1' + b"0" * 5000 + b"}", "it has no usable response; prompt-response rows have"),
    "huge float": (b'{"prompt": 1e999, "response": "b"}', "prompt must be a text, not inf"),
    "array": (b'["prompt", "response"]', "not a JSON object"),
    "text": (b'"prompt"', "not a JSON object"),
    "null": (b"null", "not a JSON object"),
    "null in a message": (b'{"messages": [null]}', "message 0 has no content"),
    "half a row": (b'{"prompt": "a", "resp', "not JSON: Unterminated string"),
    "UTF-16": ('{"prompt": "a", "response": "b"}'.encode("utf-16"), "not UTF-8: byte 0xff at offset 0"),
}


def test_damaged_rows_are_named_and_the_others_are_kept(tmp_path: Path) -> None:
    lines = [GOOD]
    for line, _ in DAMAGED.values():
        lines += [line, GOOD]
    path = write_lines(tmp_path / "rows.jsonl", *lines)
    output = make_output(tmp_path / "root", path)
    named = output.json("examples.json")["damaged"]
    for number, (kind, (_, reason)) in enumerate(DAMAGED.items()):
        assert named[number].startswith(f"{path}, line {2 * number + 2}: {reason}"), kind
    assert len(named) == output.manifest["figures"]["damaged"] == len(DAMAGED)
    assert max(map(len, named)) < 1000, "the reason quotes only a part of the row"
    assert output.manifest["figures"]["dialogs"]["train"] == len(DAMAGED) + 1
    assert f"{len(DAMAGED):,} damaged rows were skipped" in (output.page or "")


def test_harmless_oddities_are_kept(tmp_path: Path) -> None:
    lines = [
        b'{"prompt": "\\u0000", "response": "b\\u0000"}',
        f'{{"prompt": "{SURROGATE}", "response": "b{SURROGATE}"}}'.encode(),
        b'{"prompt": "a\\r\\u2028\\u0085", "response": "b", "x": 1e999, "y": NaN}',
        b'{"prompt": "x", "prompt": "a", "response": "b"}\r',
    ]
    output = make_output(tmp_path / "root", write_lines(tmp_path / "rows.jsonl", *lines))
    rows = read_example_rows(output.path("dialogs-train.jsonl"), Dialog)
    assert [[message["content"] for message in row.messages] for row in rows] == [
        ["\0", "b\0"],
        ["\ufffd", "b\ufffd"],
        ["a\r\u2028\u0085", "b"],
        ["a", "b"],
    ]


TASK_ROWS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "gsm8k": [
        ("the prompt has 10,000,000 characters", {"question": "x" * 10_000_000, "answer": "#### 1"}),
        ("the prompt is blank", {"question": " ", "answer": "#### 1"}),
    ],
    "math": [("the solution has 10,000,000 characters", {"problem": "x", "answer": "1", "solution": "x" * 10_000_000})],
    "mmlu": [
        ("no question, 1 to 26 options", {"question": "x", "options": ["a"] * 60_000, "answer": "A"}),
        ("no question, 1 to 26 options", {"question": "x", "options": [["a"]], "answer": "A"}),
        ("the answer 'xxx", {"question": "x", "options": ["a"], "answer": "x" * 10_000_000}),
        ("the prompt has", {"question": "x", "options": ["a" * 1_000_000], "answer": "A"}),
    ],
    "words": [
        ("no prompt with a list of words", {"prompt": "x", "words": []}),
        ("the prompt is blank", {"prompt": "", "words": ["a"]}),
    ],
}
GOOD_PROBLEMS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "x", "answer": "#### 1"},
    "math": {"problem": "x", "answer": "1"},
    "mmlu": {"question": "x", "options": ["a"], "answer": "A"},
    "words": {"prompt": "x", "words": ["a"]},
}


@pytest.mark.parametrize("task", TASK_ROWS)
def test_damaged_problems_are_named_and_the_others_are_kept(tmp_path: Path, task: str) -> None:
    rows = [*(row for _, row in TASK_ROWS[task]), GOOD_PROBLEMS[task]]
    path = write_lines(tmp_path / "rows.jsonl", *(json.dumps(row).encode() for row in rows))
    damaged = DamagedRows()
    assert len(read_task(task, str(path), damaged).problems) == 1
    for name, (reason, _) in zip(damaged.names, TASK_ROWS[task], strict=True):
        assert f": {reason}" in name and len(name) < 1000


# Whole files


def parquet(values: pa.Array) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.table({"prompt": ["a"], "response": ["b"], "other": values}), path)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (pa.array([1 << 60], pa.int64()).view(pa.date64()), "a value cannot be read: OverflowError"),
        (pa.array([1 << 60], pa.int64()).view(pa.duration("s")), "a value cannot be read: OverflowError"),
        (pa.array([0], pa.int64()).view(pa.timestamp("s", "No/Where")), "a value cannot be read: "),
    ],
)
def test_a_parquet_row_that_python_cannot_represent_is_damaged(tmp_path: Path, values: pa.Array, reason: str) -> None:
    parquet(values)(tmp_path / "rows.parquet")
    damaged = DamagedRows()
    with pytest.raises(UserError, match="has no usable row"):
        list(read_dialogs(str(tmp_path / "rows.parquet"), damaged))
    assert reason in damaged.names[0]


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": [b"a"], "response": [b"b"]},
        {"prompt": [1], "response": [2.5]},
        {"prompt": [None], "response": ["b"]},
        {"prompt": [["a"]], "response": [{"text": "b"}]},
        {"messages": ["[]"]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": pa.array([[[("role", "user"), ("content", "x")]]], pa.list_(pa.map_(pa.string(), pa.string())))},
        {"messages": [[{"role": "user", "content": 1}, {"role": "assistant", "content": 2}]]},
    ],
    ids=range(8),
)
def test_parquet_columns_of_wrong_types_are_damaged_rows(tmp_path: Path, columns: dict[str, Any]) -> None:
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    write_lines(tmp_path / "good.jsonl", GOOD)
    with pytest.raises(UserError, match=r"rows\.parquet has no usable row\. 1 damaged row was skipped: .*row 1: "):
        make_output(tmp_path / "root", tmp_path / "good.jsonl", tmp_path / "rows.parquet")


READ = """
import resource, sys
from lm.data.dialog_formats import read_dialogs
from lm.text.rows import DamagedRows
list(read_dialogs(sys.argv[1], DamagedRows()))  # imports and the first row
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
damaged = DamagedRows()
print(len(list(read_dialogs(sys.argv[2], damaged))), *(name.partition(", ")[2] for name in damaged.names), sep="; ")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_line_of_100_mb_is_skipped_in_little_memory(tmp_path: Path, name: str) -> None:
    start, line = b'{"prompt": "' + b"x" * (1 << 20), b"x" * (1 << 20)
    opened: Any = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "wb") as file:  # compressed, it has 100 KB
        file.write(GOOD + b"\n" + start)
        for _ in range(100):
            file.write(line)
        file.write(b"\n" + GOOD)
    paths = [str(write_lines(tmp_path / "small.jsonl", GOOD)), str(tmp_path / name)]
    done = subprocess.run([sys.executable, "-c", READ, *paths], cwd=PROJECT, capture_output=True, text=True, check=True)
    [outcome, kilobytes] = done.stdout.splitlines()
    assert outcome == "2; line 2: longer than 16 MiB"
    assert int(kilobytes) < 64 << 10


def test_a_file_of_a_single_huge_line_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", b"x" * (17 << 20))
    with pytest.raises(UserError, match=r"has no usable row\. 1 damaged row was skipped: .*line 1: longer than 16 MiB"):
        make_output(tmp_path / "root", path)


def json_values() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.floats() | st.integers() | hostile
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hostile, inner, max_size=3))


names = st.sampled_from(["messages", "prompt", "response", "chosen", "rejected", "question", "answer"])
messages = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "assistant", "system"]) | json_values(), "content": json_values()}
)
any_rows = st.dictionaries(names, json_values() | st.lists(messages, max_size=4), max_size=4) | json_values()


@examples(100)
@given(st.lists(any_rows.map(lambda row: json.dumps(row).encode()) | st.binary(max_size=40), max_size=6))
def test_each_row_is_read_or_damaged(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    lines = [line.replace(b"\n", b" ") for line in lines]
    path = write_lines(tmp_path_factory.mktemp("rows") / "rows.jsonl", GOOD, *lines, GOOD)
    damaged = DamagedRows()
    read = list(read_dialogs(str(path), damaged))
    assert len(read) + damaged.count == 2 + sum(bool(line.strip()) for line in lines)
    for row in read:
        if isinstance(row, Dialog):
            assert len(specials(encode_dialog(CHAT, row.messages).ids)) == 2 * len(row.messages)
