"""Answers of chat models in unusual forms."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.eval import chat_client
from lm.eval.chat_client import ChatAnswer
from tests.helpers.chat_endpoint import completion

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["", "a", "stop", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["choices", "message", "content", "usage", "error", "prompt_tokens"]), inner)
    ),
)


@given(
    JSON
    | st.fixed_dictionaries({"choices": st.lists(st.fixed_dictionaries({"message": JSON, "finish_reason": JSON}))})
    | st.builds(lambda **values: json.loads(completion("a", **values)), usage=JSON)
)
def test_any_json_is_an_answer_or_malformed(value: Any) -> None:
    body = json.dumps(value).encode()
    answer = chat_client._parse_answer(body)
    chat_client._error_message(body)
    if answer:
        answer.text.encode()
        assert answer.tokens >= 0
        assert answer.finish_reason is None or isinstance(answer.finish_reason, str)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (completion("a").replace(b"stop", b"\\ud800"), ChatAnswer("a", "\ufffd", 5, 3)),
        (completion("a\ud83d\ude00\ud800"), ChatAnswer("a😀�", "stop", 5, 3)),
        (completion(None), ChatAnswer("", "stop", 5, 3)),
        (completion("a", usage=None), ChatAnswer("a", "stop", 0, 0)),
        (completion("a", usage={"prompt_tokens": -4, "completion_tokens": "9"}), ChatAnswer("a", "stop", 0, 0)),
        (completion([{"type": "text", "text": "a"}]), ChatAnswer("a", "stop", 5, 3)),
        (
            completion(
                [{"type": "thinking", "thinking": []}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            ),
            ChatAnswer("ab", "stop", 5, 3),
        ),
        (completion([]), ChatAnswer("", "stop", 5, 3)),
        (completion([{"type": "text"}]), None),
        (completion(["a"]), None),
        (completion({"text": "a"}), None),
        (b'{"choices": []}', None),
        (b"[" * 100_000, None),
        (b"\xff", None),
        (b"", None),
    ],
)
def test_unusual_answers(body: bytes, expected: ChatAnswer | None) -> None:
    assert chat_client._parse_answer(body) == expected
