"""``/v1/messages`` with Anthropic's client: blocks, tools, stop reasons, events in their order, errors in its form."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.constrained import is_valid_json
from tests.helpers.generating import make_model
from tests.helpers.limits import TIMEOUT_SCALE
from tests.helpers.serving import serve_app
from tests.helpers.tool_models import TOOL, scripted_answers, tool_tokenizer
from textmill.server.app import build_app

anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed")

FUNCTION = TOOL["function"]
TOOLS = [
    {"name": "weather", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome", "days": 2}}\n</tool_call>'
ANSWER = f'<think>\nHm.\n</think>\n\nI look.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
TOKENIZER = tool_tokenizer("qwen3")
QUESTION: list[Any] = [{"role": "user", "content": "Weather?"}]
CONTEXT = 2048
KEY = "secret-key"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = build_app(make_model(TOKENIZER.size, CONTEXT).eval(), TOKENIZER, "tiny", 4, api_key=KEY)
    with serve_app(app) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=120 * TIMEOUT_SCALE) as client:
        yield client


def ask(client: Any, **options: Any) -> Any:
    # Some versions of the client have no arguments for these.
    extra = {name: options.pop(name) for name in ("temperature", "top_k", "output_config") if name in options}
    request = {"model": "tiny", "max_tokens": 500, "messages": QUESTION, "extra_body": extra, **options}
    return client.messages.create(**request)


def count(client: Any, **options: Any) -> int:
    return int(client.messages.count_tokens(model="tiny", **{"messages": QUESTION, **options}).input_tokens)


def chat_tokens(url: str, messages: list[Any], **options: Any) -> int:
    """Return the number of tokens of the prompt of a chat in OpenAI's form."""
    headers = {"Authorization": f"Bearer {KEY}"}
    response = httpx.post(f"{url}/tokenize", json={"messages": messages, **options}, headers=headers)
    return int(response.json()["count"])


@pytest.mark.parametrize("system", ["Be kind.", [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]])
def test_a_text_is_answered(client: Any, url: str, system: Any) -> None:
    with scripted_answers(TOKENIZER, "Hello é"):
        message = ask(client, system=system, temperature=0.5, top_k=5)
    assert (message.content[0].text, message.stop_reason, message.role) == ("Hello é", "end_turn", "assistant")
    text = system if isinstance(system, str) else "Be\nkind."
    expected = chat_tokens(url, [{"role": "system", "content": text}, *QUESTION])
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == expected
    assert message.usage.output_tokens == len(TOKENIZER.encode("Hello é"))
    assert count(client, system=system) == expected


def test_an_answer_with_thinking_text_and_calls_goes_in_again(client: Any, url: str) -> None:
    with scripted_answers(TOKENIZER, ANSWER):
        first = ask(client, tools=TOOLS)
    thinking, text, weather, now = first.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm.") and text.text == "I look."
    assert (weather.type, weather.name, weather.input) == ("tool_use", "weather", {"place": "Rome", "days": 2})
    assert (now.name, now.input, first.stop_reason) == ("now", {}, "tool_use") and weather.id != now.id
    results = [
        {"type": "tool_result", "tool_use_id": weather.id, "content": [{"type": "text", "text": "blue"}]},
        {"type": "tool_result", "tool_use_id": now.id},
        {"type": "text", "text": "So?"},
    ]
    dialog = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    with scripted_answers(TOKENIZER, "Blue."):
        assert ask(client, messages=dialog, tools=TOOLS).content[0].text == "Blue."
    calls = [
        {"id": weather.id, "type": "function", "function": {"name": "weather", "arguments": FUNCTION_ARGUMENTS}},
        {"id": now.id, "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    chat = [
        *QUESTION,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": weather.id, "content": "blue"},
        {"role": "tool", "tool_call_id": now.id, "content": ""},
        {"role": "user", "content": "So?"},
    ]
    tools = [TOOL, {"type": "function", "function": {"name": "now", "parameters": TOOLS[1]["input_schema"]}}]
    assert count(client, messages=dialog, tools=TOOLS) == chat_tokens(url, chat, tools=tools)


FUNCTION_ARGUMENTS = '{"place": "Rome", "days": 2}'


def test_a_stream_has_events_in_order(client: Any) -> None:
    with scripted_answers(TOKENIZER, ANSWER):
        whole = ask(client, tools=TOOLS)
        events = list(ask(client, tools=TOOLS, stream=True))
        with client.messages.stream(model="tiny", max_tokens=500, messages=QUESTION, tools=TOOLS) as stream:
            final = stream.get_final_message()
    kinds = [event.type for event in events]
    distinct = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert distinct == ["message_start", *block * 4, "message_delta", "message_stop"]
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1, 2, 3]
    start = events[0].message
    assert (start.content, start.stop_reason, start.usage.output_tokens) == ([], None, 0)
    assert start.usage.input_tokens + start.usage.cache_read_input_tokens == count(client, tools=TOOLS)
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(delta.partial_json for delta in deltas if delta.type == "input_json_delta") == (
        FUNCTION_ARGUMENTS + "{}"
    )
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "reason", "sequence", "text"),
    [
        ({"max_tokens": 3}, "max_tokens", None, None),
        ({"stop_sequences": ["x", "two"]}, "stop_sequence", "two", "One "),
        ({"stop_sequences": ["never"]}, "end_turn", None, "One two three four"),
        ({"max_tokens": 10**6}, "end_turn", None, "One two three four"),
    ],
)
def test_stop_reasons(
    client: Any, stream: bool, options: dict[str, Any], reason: str, sequence: str | None, text: str | None
) -> None:
    with scripted_answers(TOKENIZER, "One two three four"):
        if stream:
            request = {"model": "tiny", "max_tokens": 500, "messages": QUESTION, **options}
            with client.messages.stream(**request) as events:
                message = events.get_final_message()
        else:
            message = ask(client, **options)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert text is None or message.content[0].text == text


def test_an_answer_ends_with_the_context(client: Any) -> None:
    long = [{"role": "user", "content": "a " * 1900}]
    used = count(client, messages=long)
    assert 0 < CONTEXT - used < 300
    message = ask(client, messages=long, max_tokens=10**5, temperature=0)
    assert message.stop_reason == "model_context_window_exceeded" and message.usage.output_tokens == CONTEXT - used


def test_an_answer_that_is_begun_goes_on(client: Any) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "It is"}]
    with scripted_answers(TOKENIZER, " blue."):
        assert ask(client, messages=begun).content[0].text == " blue."


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_demanded_call_is_valid(client: Any, choice: dict[str, Any]) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    choice = {**choice, "disable_parallel_tool_use": True}
    [call] = ask(client, tools=TOOLS[:1], tool_choice=choice, temperature=1).content
    assert call.type == "tool_use"
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.validate(call.input, FUNCTION["parameters"])
    cut = ask(client, tools=TOOLS[:1], tool_choice=choice, max_tokens=30)
    assert cut.stop_reason == "max_tokens" and [block.type for block in cut.content] == ["text"]


def test_an_answer_has_the_requested_form(client: Any) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    config = {"format": {"type": "json_schema", "schema": FUNCTION["parameters"]}}
    message = ask(client, temperature=1, output_config=config)
    assert is_valid_json(message.content[0].text, FUNCTION["parameters"])


def test_errors_have_anthropics_form(client: Any, url: str) -> None:
    for fields, message in (
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1."),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type: Input should be 'custom'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: There are no tools to call."),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences: "),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type: Input should"),
        ({"messages": [{"role": "user", "content": "a " * 3000}]}, "The prompt has "),
    ):
        with pytest.raises(anthropic.BadRequestError) as refused:
            ask(client, **fields)
        error = refused.value.body["error"]
        assert error["type"] == "invalid_request_error" and error["message"].startswith(message), error
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="other")
    with anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            ask(stranger)
        assert unknown.value.body["error"]["type"] == "authentication_error"
    with anthropic.Anthropic(base_url=url, auth_token=KEY, max_retries=0) as bearer:
        assert count(bearer) > 0


def test_a_failure_in_a_stream_is_an_event(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("lm.inference.engine.Generation.append", fail)
    with pytest.raises(anthropic.APIStatusError, match="The model failed"):
        list(ask(client, stream=True))
    with pytest.raises(anthropic.InternalServerError):
        ask(client)
