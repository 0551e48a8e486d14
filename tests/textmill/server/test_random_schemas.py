"""Calls of tools and JSON over random schemas, a random model at temperature 1, and the clients of three APIs.

Each answer that ends is valid by jsonschema, at least 95 % end, and one that is cut says so. ``TEXTMILL_SCHEMAS=200``
takes minutes.
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.helpers.constrained import is_valid_json, random_schema
from tests.helpers.generating import make_model
from tests.helpers.limits import TIMEOUT_SCALE
from tests.helpers.serving import serve_app
from tests.helpers.tool_models import tool_tokenizer
from textmill.server.app import build_app

pytest.importorskip("llguidance", reason="llguidance is not installed")
pytest.importorskip("jsonschema", reason="jsonschema is not installed")
pytestmark = pytest.mark.slow

NUM_SCHEMAS = int(os.environ.get("TEXTMILL_SCHEMAS", "24"))  # for each client, over all families
MAX_TOKENS = 800
FAMILIES = ("qwen", "llama", "mistral")
QUESTION = "Go!"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
OPTIONS: dict[str, Any] = {"max_retries": 0, "timeout": 300 * TIMEOUT_SCALE}
Answer = tuple[bool, list[str]]
"""Whether the answer ended, and the JSON texts in it."""


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A server's family and URL."""
    tokenizer = tool_tokenizer(request.param)
    app = build_app(make_model(tokenizer.size, 4096).eval(), tokenizer, "tiny", 8, 64)
    with serve_app(app) as url:
        yield request.param, url


def tool_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def chat_calls(url: str, schema: dict[str, Any], seed: int) -> Answer:
    """Call by a stream for odd seeds."""
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    request: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [tool_of(schema)], "seed": seed}
    request |= {"tool_choice": "required", "temperature": 1, "top_p": 1, "max_tokens": MAX_TOKENS}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", **OPTIONS) as client:
        if seed % 2 == 0:
            choice = client.chat.completions.create(**request).choices[0]
            reason, calls = choice.finish_reason, choice.message.tool_calls or []
            return _check(reason, "tool_calls"), [call.function.arguments for call in calls]
        texts: list[str] = []
        for chunk in client.chat.completions.create(**request, stream=True):
            reason = chunk.choices[0].finish_reason
            for call in chunk.choices[0].delta.tool_calls or []:
                texts += [""] if call.index == len(texts) else []
                texts[call.index] += call.function.arguments
        return _check(reason, "tool_calls"), texts


def chat_json(url: str, schema: dict[str, Any], seed: int) -> Answer:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", **OPTIONS) as client:
        [choice] = client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format=response_format, seed=seed, temperature=1, top_p=1,
            max_tokens=MAX_TOKENS,
        ).choices  # fmt: skip
    return _check(choice.finish_reason, "stop"), [choice.message.content]


def responses(url: str, schema: dict[str, Any], seed: int) -> Answer:
    """Ask for one call, or for JSON if the number is odd; half of each by a stream. The API has no seed."""
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    request: dict[str, Any] = {"model": "tiny", "input": QUESTION, "max_output_tokens": MAX_TOKENS, "temperature": 1}
    if seed % 2:
        request["text"] = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    else:
        request |= {"tools": [{"type": "function", "name": "f", "parameters": schema}], "tool_choice": "required"}
        request["parallel_tool_calls"] = False
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", **OPTIONS) as client:
        response = client.responses.create(**request, top_p=1, stream=bool(seed & 2))
        if seed & 2:
            response = list(response)[-1].response
    texts = [item.arguments for item in response.output if item.type == "function_call"]
    has_ended = response.status == "completed"
    assert has_ended or response.incomplete_details.reason == "max_output_tokens"
    return has_ended, texts or [response.output_text]


def messages(url: str, schema: dict[str, Any], seed: int) -> Answer:
    """Call by a stream for odd numbers. The API has no seed."""
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed")
    request: dict[str, Any] = {"model": "tiny", "max_tokens": MAX_TOKENS, "messages": MESSAGES}
    request |= {
        "tools": [{"name": "f", "input_schema": schema}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    request["extra_body"] = {"temperature": 1, "top_p": 1}
    with anthropic.Anthropic(base_url=url, api_key="k", **OPTIONS) as client:
        if seed % 2:
            with client.messages.stream(**request) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**request)
    has_ended = message.stop_reason == "tool_use"
    assert has_ended or message.stop_reason == "max_tokens"
    return has_ended, [json.dumps(block.input) for block in message.content if block.type == "tool_use"]


def litellm_calls(url: str, schema: dict[str, Any], seed: int) -> Answer:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it downloads prices otherwise
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    choice = litellm.completion(
        model="openai/tiny", messages=MESSAGES, tools=[tool_of(schema)], tool_choice="required", seed=seed,
        temperature=1, top_p=1, max_tokens=MAX_TOKENS, api_base=f"{url}/v1", api_key="k", num_retries=0,
    ).choices[0]  # fmt: skip
    calls = choice.message.tool_calls or []
    return _check(choice.finish_reason, "tool_calls"), [call.function.arguments for call in calls]


def langchain_calls(url: str, schema: dict[str, Any], seed: int) -> Answer:
    library = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = library.ChatOpenAI(
        base_url=f"{url}/v1", api_key="k", model="tiny", temperature=1, top_p=1, seed=seed, max_tokens=MAX_TOKENS,
        **OPTIONS,
    )  # fmt: skip
    message = model.bind_tools([tool_of(schema)], tool_choice="required").invoke(QUESTION)
    calls = [json.dumps(call["args"]) for call in message.tool_calls]
    return _check(message.response_metadata["finish_reason"], "tool_calls"), calls


def _check(reason: str, end: str) -> bool:
    assert reason in (end, "length"), reason
    return reason == end


CALLERS: list[Callable[[str, dict[str, Any], int], Answer]] = [
    *(chat_calls, chat_json, responses, messages, litellm_calls, langchain_calls),
]


@pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: caller.__name__)
def test_answers_that_end_are_valid(
    served: tuple[str, str], caller: Callable[[str, dict[str, Any], int], Answer]
) -> None:
    family, url = served
    source = random.Random(f"{family} {caller.__name__}")
    schemas = [random_schema(source) for _ in range(-(-NUM_SCHEMAS // len(FAMILIES)))]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(caller, [url] * len(schemas), schemas, range(len(schemas))))
    num_ended = sum(has_ended for has_ended, _ in answers)
    num_texts = sum(len(texts) for _, texts in answers)
    print(f"{family}, {caller.__name__}: {num_ended} of {len(schemas)} ended, {num_texts} texts")
    for (has_ended, texts), schema in zip(answers, schemas, strict=True):
        if has_ended:
            assert texts
            assert all(is_valid_json(text, schema) for text in texts), (texts, schema)
    assert num_ended >= 0.95 * len(schemas)
