"""Questions for another model, the cache of its answers, and the selection of answers by reward."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.data.dialog_formats import RowParser
from lm.data.dialogs import Dialog, Message
from lm.eval.chat_client import ChatAnswer, ChatRequest
from lm.eval.config import TeachConfig
from lm.eval.problems import R1_ZERO_PROMPT
from lm.eval.reward_worker import RewardWorker
from lm.eval.teach import (
    AnswerCache,
    Question,
    QuestionSet,
    make_requests,
    read_questions,
    request_key,
    select_answers,
)
from lm.files.json import write_json_lines
from lm.text.rows import DamagedRows
from tests.helpers.full_disk import full_disk

CONFIG = TeachConfig(url="http://127.0.0.1:1", model="tiny")
ANSWER = ChatAnswer("It is 2.\nüñ\u2028", "stop", 5, 3)
GSM8K = {"question": "1+1?", "answer": "It is 2.\n#### 2"}


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def read(tmp_path: Path, *rows: Any, **options: Any) -> tuple[QuestionSet, list[str]]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    damaged = DamagedRows()
    questions = read_questions(replace(CONFIG, file=str(path), **options), damaged)
    return questions, [name.split(": ", 1)[1] for name in damaged.names]


def test_rows_of_prompts_and_dialogs(tmp_path: Path) -> None:
    system = Message(role="system", content="Be kind.")
    rows = [
        {"prompt": "a"},
        {"prompt": "b", "response": "old", "ground_truth": "B"},
        {"messages": [system, user("c"), assistant("d"), user("e")]},
        {"messages": [user("f"), assistant("old")], "ground_truth": ["F", "G"]},
        {"messages": [user("c"), Message(**assistant("d"), weight=0), user("e")]},
        {"messages": [assistant("g")]},
        {"messages": []},
        {"messages": [user("c"), {**assistant("d"), "tool_calls": [{}]}, user("e")]},
        {"prompt": " \n"},
        {"text": "h"},
    ]
    (questions, repeated, rewards), reasons = read(tmp_path, *rows)
    assert questions == [
        Question((user("a"),), "a"),
        Question((user("b"),), "b", "B"),
        Question((system, user("c"), assistant("d"), user("e")), "e"),
        Question((user("f"),), "f", ["F", "G"]),
        Question((user("c"), Message(**assistant("d"), weight=0), user("e")), "e"),
    ]
    assert (repeated, rewards) == (0, {})
    assert reasons == [
        "message 0, from the user, is missing",
        "message 0, from the user, is missing",
        "message 1 has tool_calls, which textmill's own chat template cannot render; remove it, or leave the row out",
        "the prompt is blank",
        "no text named prompt and no list named messages",
    ]


@pytest.mark.parametrize("truth", [Decimal("1.5"), date(2026, 1, 2), b"x"])
def test_a_ground_truth_that_json_has_not_is_damaged(truth: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    rows = [{"prompt": "a", "ground_truth": truth}, {"prompt": "b", "ground_truth": None}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    damaged = DamagedRows()
    questions = read_questions(replace(CONFIG, file=str(path)), damaged).questions
    assert [question.question for question in questions] == ["b"]
    assert damaged.count == 1 and "row 1: the ground_truth is not plain data" in damaged.names[0]


def test_problems_of_a_task_and_their_reward(tmp_path: Path) -> None:
    (questions, _, rewards), _ = read(tmp_path, GSM8K, task="gsm8k", prompt="r1_zero")
    assert questions == [Question((user(R1_ZERO_PROMPT.format(question="1+1?")),), "1+1?", "2")]
    assert rewards == {"gsm8k": 1.0}
    assert read(tmp_path, GSM8K, task="gsm8k", rewards={"r1_zero": 2.0})[0].rewards == {"r1_zero": 2.0}


def test_the_template_is_for_the_last_message(tmp_path: Path) -> None:
    dialog = [user("{a}"), assistant("b"), user("{c}")]
    (questions, _, _), _ = read(tmp_path, {"messages": dialog}, prompt="Q: {question}!")
    assert questions == [Question((user("{a}"), assistant("b"), user("Q: {c}!")), "{c}")]


def test_an_equal_question_is_asked_once(tmp_path: Path) -> None:
    rows = [{"prompt": row[0], "ground_truth": row[1]} for row in ("a1", "b1", "a1", "a2", "b1")]
    (questions, repeated, _), _ = read(tmp_path, *rows)
    assert [(question.question, question.ground_truth) for question in questions] == [
        ("a", "1"),
        ("b", "1"),
        ("a", "2"),
    ]
    assert repeated == 2
    first, _, third = make_requests(questions, replace(CONFIG, samples=2))
    assert first == third  # one request for both ground truths
    assert len(read(tmp_path, *rows, count=2)[0].questions) == 2


def test_nothing_to_ask() -> None:
    with pytest.raises(UserError, match="give a file of prompts or a task"):
        read_questions(CONFIG, DamagedRows())


def test_each_sample_and_setting_has_its_own_key() -> None:
    question = Question((user("a"),), "a")
    (requests,) = make_requests([question], replace(CONFIG, samples=3, seed=7))
    assert [request.seed for request in requests.values()] == [7, 8, 9]
    base = make_requests([question], CONFIG)
    changes: list[dict[str, Any]] = [
        {"model": "other"},
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"max_new_tokens": 9},
        {"seed": 0},
        {"samples": 2},
    ]
    keys = {key for requests in base for key in requests}
    for count, change in enumerate(changes, start=2):
        keys |= {key for requests in make_requests([question], replace(CONFIG, **change)) for key in requests}
        assert len(keys) == count
    assert request_key("tiny", ChatRequest([user("a")]), 0) != request_key("tiny", ChatRequest([user("b")]), 0)
    same = replace(CONFIG, url="http://127.0.0.1:2", token_budget=5, threshold=0.0, out="x.jsonl")
    assert list(make_requests([question], same)) == list(make_requests([question], CONFIG))


def test_the_cache_survives_a_cut_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.answers.jsonl"
    answers = {key: replace(ANSWER, text=f"{key}{ANSWER.text}") for key in ("a", "b", "c")}
    with AnswerCache(path) as cache:
        for key, answer in answers.items():
            cache.add(key, answer)
            assert path.read_bytes().count(b"\n") == len(cache.answers)  # already in the file
    content = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(content) if byte == ord("\n")]
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        complete = list(answers)[: sum(end - 1 <= size for end in ends)]
        with AnswerCache(path) as cache:
            assert cache.answers == {key: answers[key] for key in complete}
            cache.add("new", ANSWER)
        with AnswerCache(path) as cache:
            assert cache.answers == {**{key: answers[key] for key in complete}, "new": ANSWER}


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"null",
        b"\xff",
        b'{"key": "a"}',
        b'{"key": [], "text": "a", "finish_reason": null, "prompt_tokens": 1, "completion_tokens": 1}',
        b'{"key": "a", "text": 3, "finish_reason": null, "prompt_tokens": 1, "completion_tokens": 1}',
        b'{"key": "a", "text": "a", "finish_reason": null, "prompt_tokens": -1, "completion_tokens": 1}',
        b'{"key": "a", "text": "a", "finish_reason": null, "prompt_tokens": 1, "completion_tokens": 1, "x": 1}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_line_of_the_cache_is_skipped(line: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.answers.jsonl"
    path.write_bytes(line + b"\n")
    with AnswerCache(path) as cache:
        assert cache.answers == {}
        cache.add("a", ANSWER)
    with AnswerCache(path) as cache:
        assert cache.answers == {"a": ANSWER}
    assert "damaged lines are skipped: 1" in caplog.text


def test_one_process_at_a_time_has_the_cache(tmp_path: Path) -> None:
    with AnswerCache(tmp_path / "a"), pytest.raises(UserError, match="Another process writes"):
        AnswerCache(tmp_path / "a").__enter__()
    with AnswerCache(tmp_path / "a"):
        pass
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        AnswerCache(tmp_path).__enter__()


def test_a_full_disk_is_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "a"
    message = "a cannot be written: File too large"
    with full_disk(300), pytest.raises(UserError, match=message), AnswerCache(path) as cache:
        for number in range(20):
            cache.add(str(number), ANSWER)
    with AnswerCache(path) as cache:
        assert cache.answers == {str(kept): ANSWER for kept in range(number)}
    with full_disk(0), pytest.raises(UserError, match=r"rows\.jsonl cannot be written: File too large"):
        write_json_lines(tmp_path / "rows.jsonl", [{"prompt": "a"}])


def select(
    texts: Sequence[str], truth: Any, rewards: dict[str, float], threshold: float = 1.0, **changes: Any
) -> list[tuple[str, Any]]:
    answers = {str(index): replace(ANSWER, text=text, **changes) for index, text in enumerate(texts)}
    question = Question((user("1+1?"),), "1+1?", truth)
    if not rewards:
        return list(select_answers([question], [[*answers, "missing"]], answers, None, threshold))
    with RewardWorker(rewards) as worker:
        return list(select_answers([question], [[*answers, "missing"]], answers, worker, threshold))


def test_answers_are_kept_by_reward() -> None:
    texts = ["so 2", "so 3", " ", "so 2", "2.0", "3"]
    selected = select(texts, "2", {"gsm8k": 1.0})
    assert [outcome for outcome, _ in selected] == ["kept", "low reward", "blank", "repeated", "kept", "low reward"]
    assert selected[0][1] == {"prompt": "1+1?", "response": "so 2"}
    assert {outcome for outcome, _ in select(texts[:2], "2", {}, finish_reason="length")} == {"cut at the maximum"}
    assert {outcome for outcome, _ in select(texts[:2], "2", {}, finish_reason="content_filter")} == {"not finished"}
    for reason in ("stop", None):
        assert [outcome for outcome, _ in select(texts[:2], "2", {}, finish_reason=reason)] == ["kept", "kept"]
    with pytest.raises(UserError, match=r"failed for all 4 answers: .* the same command does not ask"):
        select(texts[:5], None, {"gsm8k": 1.0})


def test_the_threshold_allows_for_rounding() -> None:
    weights = {"exact": 0.1, "ends_properly": 0.7}
    assert 0.1 + 0.7 < 0.8
    assert [outcome for outcome, _ in select(["a.", "b."], "a.", weights, 0.8)] == ["kept", "low reward"]


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(st.lists(texts, max_size=3), texts, texts)
@settings(suppress_health_check=[HealthCheck.filter_too_much])
def test_rows_are_dialogs_of_the_posttraining(context: list[str], prompt: str, answer: str) -> None:
    rounds = [message for text in context for message in (user(text), assistant(text))]
    question = Question((*rounds, user(f"Q: {prompt}")), prompt)
    ((_, row),) = select_answers([question], [["k"]], {"k": replace(ANSWER, text=answer)}, None, 1.0)
    assert RowParser().parse(json.loads(json.dumps(row))) == Dialog((*question.messages, assistant(answer)), prompt)
