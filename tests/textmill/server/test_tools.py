"""Tools in chats: calls that a model writes, calls that a request demands, and reasoning, whole and streamed."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.helpers.constrained import is_valid_json
from tests.helpers.generating import make_model
from tests.helpers.tokenizers import bytes_tokenizer
from tests.helpers.tool_models import NOW, TOOL, scripted_answers, tool_tokenizer
from textmill.server.app import build_app

SCHEMA = TOOL["function"]["parameters"]
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
QUESTION: list[Any] = [{"role": "user", "content": "How is it in Rome?"}]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome", "days": 2}}\n</tool_call>'
CALL = {"name": "weather", "arguments": '{"place": "Rome", "days": 2}'}
ANSWERS = {
    "qwen": f"I look.\n{HERMES}",
    "llama": '<|python_tag|>{"name": "weather", "parameters": {"place": "Rome", "days": 2}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"place": "Rome", "days": 2}, "id": "abcdefghi"}]',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"place": "Rome", "days": 2}}]',
}


@contextmanager
def open_client(family: str = "qwen", context: int = 2048) -> Iterator[TestClient]:
    tokenizer = tool_tokenizer(family)
    with TestClient(build_app(make_model(tokenizer.size, context).eval(), tokenizer, "tiny", 4)) as client:
        yield client


def ask(client: TestClient, **options: Any) -> Any:
    body = {"messages": QUESTION, "tools": [TOOL, NOW], "seed": 0, **options}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def stream(client: TestClient, **options: Any) -> list[dict[str, Any]]:
    """Return the choices of all chunks."""
    body = {"messages": QUESTION, "tools": [TOOL, NOW], "seed": 0, "stream": True, **options}
    lines = client.post("/v1/chat/completions", json=body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [choice for line in lines[:-2] for choice in json.loads(line.removeprefix("data: "))["choices"]]


def join(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of the chunks of one choice, as a client joins them."""
    message: dict[str, Any] = {"content": "", "calls": []}
    for choice in choices:
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            message["reasoning"] = message.get("reasoning", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["calls"]):
                assert call["type"] == "function" and call["function"]["arguments"] == ""
                message["calls"].append({**call["function"]})
            else:
                assert call["index"] == len(message["calls"]) - 1 and call.keys() == {"index", "function"}
                message["calls"][-1]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("family", ANSWERS)
def test_a_call_that_the_model_writes_is_parsed(family: str) -> None:
    text = ANSWERS[family]
    with open_client(family) as client, scripted_answers(tool_tokenizer(family), text):
        [choice] = ask(client)
        chunks = stream(client)
        [ignored] = ask(client, tool_choice="none")
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["role"] == "assistant"
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function" and len(call["id"]) == 9 and call["function"] == CALL
    assert choice["message"]["content"] == ("I look." if family == "qwen" else None)
    assert join(chunks) == {"content": choice["message"]["content"] or "", "calls": [CALL]}
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]
    assert ignored["finish_reason"] == "stop" and "tool_calls" not in ignored["message"]
    assert ignored["message"]["content"].endswith(text.removeprefix("<|python_tag|>")[-20:])


def test_content_before_a_call_is_streamed_at_once_and_the_name_first() -> None:
    with open_client() as client, scripted_answers(tool_tokenizer("qwen"), ANSWERS["qwen"]):
        deltas = [chunk["delta"] for chunk in stream(client)]
    kinds = ["call" if "tool_calls" in delta else "content" for delta in deltas]
    assert kinds.index("call") >= 2 and "content" not in kinds[kinds.index("call") : -1]
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."


@pytest.mark.parametrize(
    "text",
    [
        HERMES.replace("weather", "other"),
        HERMES.replace('"Rome", "days": 2}', '"Rome"'),
        "A <tool_call> is markup.",
        HERMES[:-30],
    ],
    ids=["unknown tool", "no JSON", "prose", "cut"],
)
def test_what_only_looks_like_a_call_stays_content(text: str) -> None:
    with open_client() as client, scripted_answers(tool_tokenizer("qwen"), text):
        [choice] = ask(client)
        assert join(stream(client)) == {"content": text, "calls": []}
    assert choice["message"]["content"] == text and choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


def test_parallel_calls_have_ids_of_their_own() -> None:
    second = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    with open_client() as client, scripted_answers(tool_tokenizer("qwen"), f"{HERMES}\n{second}", "No."):
        calling, plain = ask(client, n=2, logprobs=True)
        chunks = stream(client, n=2, logprobs=True)
        [single] = ask(client, parallel_tool_calls=False)
    calls = calling["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "now"]
    assert calls[0]["id"] != calls[1]["id"]
    assert (plain["message"]["content"], plain["finish_reason"]) == ("No.", "stop")
    assert [call["function"] for call in single["message"]["tool_calls"]] == [CALL]
    assert join([chunk for chunk in chunks if chunk["index"] == 0])["calls"] == [call["function"] for call in calls]
    assert join([chunk for chunk in chunks if chunk["index"] == 1]) == {"content": "No.", "calls": []}
    for choice in (calling, plain):
        streamed = [chunk["logprobs"]["content"] for chunk in chunks if chunk["index"] == choice["index"]]
        names = [entry["token"] for part in streamed for entry in part]
        assert names == [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(names) == "No.<|im_end|>"


@pytest.mark.parametrize(("family", "begins"), [("qwen3", False), ("qwq", False), ("deepseek", True)])
def test_reasoning_is_split_off(family: str, begins: bool) -> None:
    """Whether the model or its template begins it."""
    source = "{{ messages[0].content + '<think>\\n' }}{# </think> #}" if begins else None
    tokenizer = tool_tokenizer(family, source)
    text = ("" if begins else "<think>\n") + "First, é.\n\nThen.\n</think>\n\nBlue."
    app = build_app(make_model(tokenizer.size, 512).eval(), tokenizer, "tiny", 4)
    with TestClient(app) as client, scripted_answers(tokenizer, text):
        [choice] = ask(client, tools=None)
        assert join(stream(client, tools=None)) == {"content": "Blue.", "calls": [], "reasoning": "First, é.\n\nThen."}
        [cut] = ask(client, tools=None, max_tokens=15)
    assert choice["message"] == {"role": "assistant", "content": "Blue.", "reasoning_content": "First, é.\n\nThen."}
    assert cut["message"]["content"] == "" and cut["finish_reason"] == "length"


@pytest.mark.slow
@pytest.mark.parametrize("family", ANSWERS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_demanded_call_is_valid(family: str, choice: Any) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    with open_client(family) as client:
        for seed in range(2):
            options = {"tool_choice": choice, "temperature": 1, "top_p": 1, "seed": seed, "max_tokens": 500}
            [result] = ask(client, **options)
            assert result["finish_reason"] == "tool_calls" and result["message"]["content"] is None
            functions = [call["function"] for call in result["message"]["tool_calls"]]
            for function in functions:
                assert function["name"] in ("weather", "now") if choice == "required" else ("weather",)
                assert is_valid_json(function["arguments"], SCHEMA if function["name"] == "weather" else {})
            chunks = stream(client, **options)
            assert join(chunks) == {"content": "", "calls": functions}
            assert len(ask(client, **options, parallel_tool_calls=False)[0]["message"]["tool_calls"]) == 1
    named = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", []) if "id" in call]
    assert len({call["id"] for call in named}) == len(named) == len(functions)


def test_a_demanded_call_that_is_cut_says_length() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    with open_client() as client:
        [choice] = ask(client, tool_choice="required", max_tokens=25)
        chunks = stream(client, tool_choice="required", max_tokens=25)
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "length"


def test_strict_tools_are_valid_also_where_no_call_is_demanded() -> None:
    """The bias makes the model begin with a brace, which no text can do then."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    options = {"temperature": 1, "max_tokens": 300, "logit_bias": {str(ord("{")): 100}}
    with open_client("llama") as client:
        [call] = ask(client, **options, tools=[STRICT])
        [free] = ask(client, **options)
    assert call["finish_reason"] == "tool_calls"
    assert is_valid_json(call["message"]["tool_calls"][0]["function"]["arguments"], SCHEMA)
    assert free["message"]["content"].startswith("{{{") and free["finish_reason"] == "length"


def test_an_answer_is_a_call_or_has_the_requested_form() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    schema = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 3}
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    kinds = set()
    with open_client() as client:
        for seed in range(6):
            [choice] = ask(client, **fields, tools=[STRICT], temperature=1, top_p=1, max_tokens=500, seed=seed)
            message = choice["message"]
            kinds.add(choice["finish_reason"])
            if choice["finish_reason"] == "stop":
                assert is_valid_json(message["content"], schema)
            else:
                assert message["content"] is None and message["tool_calls"]
    assert kinds == {"stop", "tool_calls"}


def test_calls_and_answers_of_tools_go_into_the_prompt() -> None:
    dialog = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "blue"}]},
    ]
    with open_client() as client:
        body = {"messages": dialog, "tools": [TOOL]}
        with scripted_answers(tool_tokenizer("qwen"), "Blue."):
            assert ask(client, **body)[0]["message"]["content"] == "Blue."
        ids = client.post("/tokenize", json=body).json()["tokens"]
    text = tool_tokenizer("qwen").decode(ids)
    assert HERMES in text and "<tool_response>\nblue\n</tool_response>" in text
    assert '{"type": "function", "function": {"name": "weather", "description": "Says the weather.", "par' in text


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [TOOL, TOOL]}, "tools", "tools: Two tools have the name 'weather'."),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.function: Field required."),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0.type: Input should be 'function'"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "tool_choice: There are no tools to call."),
        ({"tool_choice": "always"}, "tool_choice", "tool_choice: Input should be 'none', 'auto' or 'required'."),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "tool_choice: There is no tool with the name 'f'.",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
                "tool_choice": "required",
            },
            "tool_choice",
            "tool_choice: The parameters of f must be a JSON schema of an object.",
        ),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
            "response_format: The answer has one constraint already: tool_choice.",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "tools: The parameters of 'f': The JSON schema is invalid or not supported",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:40],
)
def test_wrong_fields_are_named(fields: dict[str, Any], param: str, message: str) -> None:
    if "JSON schema is invalid" in message:
        pytest.importorskip("llguidance", reason="llguidance is not installed")
    with open_client() as client:
        response = client.post("/v1/chat/completions", json={"messages": QUESTION, "tools": [TOOL], **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and error["message"].startswith(message), error


def test_a_model_without_tools_refuses_them() -> None:
    tokenizer = bytes_tokenizer(["<|endoftext|>"])
    with TestClient(build_app(make_model(257, 64).eval(), tokenizer, "tiny", 2)) as client:
        body = {"messages": QUESTION, "tools": [TOOL], "max_tokens": 1}
        error = client.post("/v1/chat/completions", json=body).json()["error"]
        assert error["param"] == "tools" and "has no place for tools" in error["message"]
        assert client.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).status_code == 200


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with open_client() as client:
        body = {"messages": QUESTION, "tools": [TOOL], "tool_choice": "required"}
        error = client.post("/v1/chat/completions", json=body).json()["error"]
        assert error["message"].startswith("tool_choice: Structured output needs an extra: pip install")
        with scripted_answers(tool_tokenizer("qwen"), HERMES):
            assert ask(client)[0]["finish_reason"] == "tool_calls", "a call that is not demanded needs no library"
