"""``/v1/responses`` with OpenAI's client: items of a dialog, tools, forms of the answer, typed events in order."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.constrained import is_valid_json
from tests.helpers.generating import make_model
from tests.helpers.limits import TIMEOUT_SCALE
from tests.helpers.serving import serve_app
from tests.helpers.tool_models import TOOL, scripted_answers, tool_tokenizer
from textmill.server.app import build_app

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

FUNCTION: dict[str, Any] = {"type": "function", **TOOL["function"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome", "days": 2}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL.replace('Rome', 'Oslo')}"
TOKENIZER = tool_tokenizer("qwen3")


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    options = {"api_key": "k", "max_retries": 0, "timeout": 120 * TIMEOUT_SCALE}
    app = build_app(make_model(TOKENIZER.size, 2048).eval(), TOKENIZER, "tiny", 4)
    with serve_app(app) as url, openai.OpenAI(base_url=f"{url}/v1", **options) as client:
        yield client


def rendered(client: Any, messages: list[Any], **options: Any) -> int:
    """Return the number of tokens of the prompt of a chat."""
    body = {"messages": messages, **options}
    return int(client.post("../tokenize", body=body, cast_to=object)["count"])


def test_a_text_is_answered(client: Any) -> None:
    with scripted_answers(TOKENIZER, "Hello é"):
        response = client.responses.create(model="tiny", input="Hi", instructions="Be kind.", temperature=0.5)
    assert (response.output_text, response.status, response.error) == ("Hello é", "completed", None)
    assert response.id.startswith("resp_") and response.store is False and response.instructions == "Be kind."
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert response.usage.input_tokens == rendered(client, messages)
    assert response.usage.output_tokens == len(TOKENIZER.encode("Hello é"))
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_an_answer_with_reasoning_text_and_calls(client: Any) -> None:
    with scripted_answers(TOKENIZER, ANSWER):
        response = client.responses.create(model="tiny", input="Weather?", tools=[FUNCTION])
    reasoning, message, *calls = response.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
    assert (message.type, message.content[0].text) == ("message", "I look.")
    assert [(call.type, call.name, json.loads(call.arguments)["place"]) for call in calls] == [
        ("function_call", "weather", "Rome"),
        ("function_call", "weather", "Oslo"),
    ]
    ids = [item.id for item in response.output] + [call.call_id for call in calls]
    assert len({*ids}) == len(ids)


def test_the_items_of_a_dialog_are_the_messages_of_a_chat(client: Any) -> None:
    """As they come out, they go in again."""
    with scripted_answers(TOKENIZER, ANSWER):
        first = client.responses.create(model="tiny", input="Weather?", tools=[FUNCTION])
    calls = [item for item in first.output if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "blue"} for call in calls]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}, *first.output, *outputs]
    with scripted_answers(TOKENIZER, "Blue."):
        second = client.responses.create(model="tiny", input=items, tools=[FUNCTION], instructions="Be kind.")
    assert second.output_text == "Blue."
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ],
        },
        *({"role": "tool", "tool_call_id": call.call_id, "content": "blue"} for call in calls),
    ]
    assert second.usage.input_tokens == rendered(client, messages, tools=[TOOL])


def test_a_stream_has_typed_events_in_order(client: Any) -> None:
    with scripted_answers(TOKENIZER, ANSWER):
        whole = client.responses.create(model="tiny", input="Weather?", tools=[FUNCTION])
        events = list(client.responses.create(model="tiny", input="Weather?", tools=[FUNCTION], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    distinct = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]

    def part(delta: str) -> list[str]:
        return ["output_item.added", "content_part.added", f"{delta}.delta", f"{delta}.done", "content_part.done"]

    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    expected = ["created", "in_progress", *part("reasoning_text"), "output_item.done", *part("output_text")]
    assert distinct == [*expected, "output_item.done", *call, *call, "completed"]
    last = events[-1].response
    plain = [item.model_dump(exclude={"id", "call_id"}) for item in last.output]
    assert plain == [item.model_dump(exclude={"id", "call_id"}) for item in whole.output]
    assert last.usage == whole.usage and last.id == events[0].response.id
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in last.output]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.output_text == "I look."


def test_the_clients_own_stream_reads_the_events(client: Any) -> None:
    request = {"model": "tiny", "input": "Weather?", "tools": [FUNCTION]}
    with scripted_answers(TOKENIZER, ANSWER), client.responses.stream(**request) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_answer_is_incomplete(client: Any, stream: bool) -> None:
    with scripted_answers(TOKENIZER, "Hello, hello, hello, hello"):
        response = client.responses.create(model="tiny", input="Hi", max_output_tokens=3, stream=stream)
        if stream:
            *_, last = response
            assert last.type == "response.incomplete"
            response = last.response
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[-1].status == "incomplete" and response.usage.output_tokens == 3


def test_forms_and_demanded_calls_hold(client: Any) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    schema = FUNCTION["parameters"]
    text = {"format": {"type": "json_schema", "name": "w", "schema": schema, "strict": True}}
    response = client.responses.create(model="tiny", input="Hi", text=text, temperature=1)
    assert response.status == "completed" and is_valid_json(response.output_text, schema)
    for choice in ("required", {"type": "function", "name": "weather"}):
        called = client.responses.create(
            model="tiny", input="Hi", tools=[FUNCTION], tool_choice=choice, parallel_tool_calls=False, temperature=1
        )
        [call] = called.output
        assert is_valid_json(call.arguments, schema)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_id: This server does not"),
        ({"background": True}, "background", "background: This server does not support it"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0.type: Input should be 'function'"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice: There are no tools to call."),
        ({"max_output_tokens": 10**6}, "input", "The prompt has "),
        ({"temperature": 3}, "temperature", "temperature: Input should be less than or equal to 2."),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "text: The type json_schema needs a json_schema."),
        ({"input": []}, "input", "input: List should have at least 1 item"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input", "input.0"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]},
            "input",
            "input.0: The arguments must be the JSON text of an object.",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "input.0.content.0.type: Input should be 'input_text'",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:40],
)
def test_wrong_fields_are_named(client: Any, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "tiny", "input": "Hi", **fields})
    assert refused.value.param == param
    assert refused.value.body["message"].startswith(message), refused.value.body


def test_a_failure_in_a_stream_is_an_event(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("lm.inference.engine.Generation.append", fail)
    [event] = client.responses.create(model="tiny", input="Hi", stream=True)
    assert event.type == "error" and event.message == "The model failed; see the server's log."
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="tiny", input="Hi")
