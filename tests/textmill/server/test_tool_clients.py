"""A dialog with tools by the clients of OpenAI's API, with a model whose answers are scripted."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.generating import make_model
from tests.helpers.limits import TIMEOUT_SCALE
from tests.helpers.serving import serve_app
from tests.helpers.tool_models import TOOL, scripted_answers, tool_tokenizer
from textmill.server.app import build_app

TOKENIZER = tool_tokenizer("qwen3")
ARGUMENTS = {"place": "Rome", "days": 2}
ANSWER = (
    "<think>\nHm.\n</think>\n\nI look.\n"
    f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
)
MESSAGES: list[Any] = [{"role": "user", "content": "Weather?"}]
TIMEOUT = 120 * TIMEOUT_SCALE


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve_app(build_app(make_model(TOKENIZER.size, 2048).eval(), TOKENIZER, "tiny", 4)) as url:
        yield f"{url}/v1"


def test_openai(url: str) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    with openai.OpenAI(base_url=url, api_key="k", max_retries=0, timeout=TIMEOUT) as client:
        request = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL]}
        with scripted_answers(TOKENIZER, ANSWER):
            choice = client.chat.completions.create(**request).choices[0]
            with client.chat.completions.stream(**request) as stream:
                kinds = [event.type for event in stream]
                streamed = stream.get_final_completion().choices[0]
        for message in (choice.message, streamed.message):
            assert (message.content, message.reasoning_content) == ("I look.", "Hm.")
            assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS
        assert choice.finish_reason == streamed.finish_reason == "tool_calls"
        assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "blue"}
        with scripted_answers(TOKENIZER, "Blue."):
            dialog = [*MESSAGES, choice.message, result]
            final = client.chat.completions.create(model="tiny", messages=dialog, tools=[TOOL]).choices[0]
        assert (final.message.content, final.finish_reason, final.message.tool_calls) == ("Blue.", "stop", None)


@pytest.mark.slow
def test_litellm(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it downloads prices otherwise
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    request = {"model": "openai/tiny", "api_base": url, "api_key": "k", "num_retries": 0, "timeout": TIMEOUT}
    request |= {"messages": MESSAGES, "tools": [TOOL]}
    with scripted_answers(TOKENIZER, ANSWER):
        choice = litellm.completion(**request).choices[0]
        chunks = list(litellm.completion(**request, stream=True))
    streamed = litellm.stream_chunk_builder(chunks).choices[0]
    for message in (choice.message, streamed.message):
        assert (message.content, message.reasoning_content) == ("I look.", "Hm.")
        assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS
    assert choice.finish_reason == streamed.finish_reason == "tool_calls"


@pytest.mark.slow
def test_langchain(url: str) -> None:
    library = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    messages = pytest.importorskip("langchain_core.messages", reason="langchain-openai is not installed")
    for options in ({}, {"use_responses_api": True}):
        model = library.ChatOpenAI(
            base_url=url, api_key="k", model="tiny", max_retries=0, timeout=TIMEOUT, **options
        ).bind_tools([TOOL])
        with scripted_answers(TOKENIZER, ANSWER):
            answer = model.invoke("Weather?")
            chunks = list(model.stream("Weather?"))
        streamed = chunks[0]
        for chunk in chunks[1:]:
            streamed += chunk
        for message in (answer, streamed):
            assert [(call["name"], call["args"]) for call in message.tool_calls] == [("weather", ARGUMENTS)]
            assert message.text == "I look."
        result = messages.ToolMessage("blue", tool_call_id=answer.tool_calls[0]["id"])
        with scripted_answers(TOKENIZER, "Blue."):
            assert model.invoke([messages.HumanMessage("Weather?"), answer, result]).text == "Blue."
