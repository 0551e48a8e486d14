"""Answers in the form that a request asks for, and requests for forms that do not exist."""

import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field

from lm.common.errors import UserError
from lm.inference.constraints import ConstraintError
from tests.helpers.completion_server import CLIENT_TIMEOUT_SECONDS, CONTEXT, RunningServer, openai, run_server
from tests.helpers.constrained import is_valid_json
from tests.helpers.generating import make_model
from tests.helpers.tokenizers import bytes_tokenizer
from textmill.server.app import build_app

pytest.importorskip("llguidance", reason="llguidance is not installed")

MESSAGES: list[Any] = [{"role": "user", "content": "a"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
JSON_FIELDS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA), "guided_regex": None},
]
SLOW_REGEX = "a?" * 20_000 + "a" * 20_000


@pytest.fixture(scope="module", params=[0, 4], ids=["plain", "speculative"])
def constrained_server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with run_server(make_model(257, CONTEXT).eval(), speculative_tokens=request.param) as running:
        yield running


def answer(server: RunningServer, fields: dict[str, Any], **options: Any) -> tuple[str, str]:
    """Return the text and the finish reason of a chat."""
    body = {"messages": MESSAGES, "max_tokens": 300, "temperature": 1, "top_p": 1, "seed": 1, **fields, **options}
    response = server.post(body, "chat/completions")
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


@pytest.mark.slow
@pytest.mark.parametrize("fields", JSON_FIELDS, ids=lambda fields: next(iter(fields)))
def test_the_answer_is_valid_json(constrained_server: RunningServer, fields: dict[str, Any]) -> None:
    texts = []
    for seed in range(4):
        text, finish_reason = answer(constrained_server, fields, seed=seed)
        assert finish_reason == "stop" and is_valid_json(text, SCHEMA), text
        texts.append(text)
        completion = constrained_server.post(
            {"prompt": "a", "max_tokens": 300, "temperature": 1, "seed": seed, **fields}
        )
        assert is_valid_json(completion.json()["choices"][0]["text"], SCHEMA)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("special_tokens", [[], ["<|endoftext|>"]])
def test_a_stop_id_that_the_model_lacks_changes_nothing(special_tokens: list[str]) -> None:
    tokenizer = bytes_tokenizer(special_tokens)
    with TestClient(build_app(make_model(tokenizer.size, CONTEXT).eval(), tokenizer, "tiny", 2)) as client:
        body = {"prompt": "a", "guided_regex": "abc", "stop_token_ids": [10**6, tokenizer.size]}
        [choice] = client.post("/v1/completions", json=body).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")


def test_a_cut_answer_says_length(constrained_server: RunningServer) -> None:
    text, finish_reason = answer(constrained_server, JSON_FIELDS[0], max_tokens=6)
    assert finish_reason == "length" and len(text.encode()) == 6 and text.startswith("{")


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_choice": [" yes", "no"]}, {" yes", "no"}),
        ({"structured_outputs": {"choice": ["one"]}}, {"one"}),
        ({"guided_regex": "x{3}\nUser:y?"}, {"xxx\nUser:", "xxx\nUser:y"}),
        ({"structured_outputs": {"regex": "(a|b)c"}}, {"ac", "bc"}),
        ({"guided_grammar": 'root ::= "a" | "b"'}, {"a", "b"}),
        ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, {"a", "b"}),
    ],
)
def test_the_answer_is_one_of_the_texts(
    constrained_server: RunningServer, fields: dict[str, Any], texts: set[str]
) -> None:
    """White space at the start stays, and the stop text of the plain chat format does not cut the answer."""
    text, finish_reason = answer(constrained_server, fields)
    assert text in texts and finish_reason == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json_object": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_json_object_begins(constrained_server: RunningServer, fields: dict[str, Any]) -> None:
    text, finish_reason = answer(constrained_server, fields)
    if finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    assert text.startswith("{")


def test_streams_and_several_choices_have_constraints_of_their_own(constrained_server: RunningServer) -> None:
    stream = constrained_server.client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=3, stream=True, temperature=1, max_tokens=300, seed=5,
        response_format=JSON_FIELDS[0]["response_format"],
    )  # fmt: skip
    texts = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert all(is_valid_json(text, SCHEMA) for text in texts) and len(set(texts)) > 1


def test_openais_client_parses_a_pydantic_model(constrained_server: RunningServer) -> None:
    class Pet(BaseModel):
        name: str = Field(max_length=4)
        is_cat: bool

    completion = constrained_server.client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Pet, max_tokens=200, temperature=1
    )
    assert isinstance(completion.choices[0].message.parsed, Pet)


def test_logprobs_include_every_token_and_the_end(constrained_server: RunningServer) -> None:
    body = {"prompt": "a", "guided_choice": ["xyz"], "logprobs": 1, "max_tokens": 9, "temperature": 0}
    [choice] = constrained_server.post(body).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["x", "y", "z", "<|endoftext|>"]
    assert any(
        alternatives.keys() != {token}
        for token, alternatives in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True)
    ), "not masked"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "response_format.type: "),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs a json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format",
            "json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
            "response_format",
            "Invalid type: strin.",
        ),
        ({"guided_json": {"type": "strin"}}, "guided_json", "Invalid type: strin."),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        ({"guided_json": 5}, "guided_json", "guided_json: "),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": SLOW_REGEX}, "guided_regex", "regular expression"),
        ({"guided_choice": []}, "guided_choice", "empty"),
        ({"guided_choice": ["a", 5]}, "guided_choice", "guided_choice.1: "),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "unknown name"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not support"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "structured_outputs.regex: "),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "has one constraint already"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs",
            "structural_tag: This server does not",
        ),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "constraint already: guided_json."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_an_invalid_form_is_refused_by_its_field(
    server: RunningServer, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    response = server.post({"prompt": "a", "messages": MESSAGES, "max_tokens": 1, **fields}, path)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"] and error["message"].startswith(param) and len(error["message"]) < 400


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"guided_json_object": False}]
)
def test_fields_without_a_constraint_have_no_effect(server: RunningServer, fields: dict[str, Any]) -> None:
    body = {"prompt": "a", "max_tokens": 5, "temperature": 0}
    assert server.post(body | fields).json()["choices"] == server.post(body).json()["choices"]


def test_a_slow_regex_delays_no_other_request(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many compile at once, more than the server has threads for other work."""
    has_answered = threading.Event()

    def compile(self: object, grammar: object) -> None:
        has_answered.wait(CLIENT_TIMEOUT_SECONDS)
        raise UserError("This is slow.")

    monkeypatch.setattr("lm.inference.constraints.ConstraintCompiler.compile", compile)
    body = {"prompt": "a", "guided_regex": "a"}
    with ThreadPoolExecutor(40) as pool:
        slow = [pool.submit(server.post, body) for _ in range(40)]
        try:
            assert server.post({"prompt": "a", "max_tokens": 3}).status_code == 200
            assert not any(response.done() for response in slow)
        finally:
            has_answered.set()
        assert all("This is slow." in response.result().text for response in slow)


def test_without_the_library_the_extra_is_named(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    response = server.post({"prompt": "a", "guided_regex": "a"})
    assert response.status_code == 400 and "pip install 'textmill[grammar]'" in response.json()["error"]["message"]


def test_a_text_that_cannot_go_on_is_a_400(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def advance(self: object, token_id: int) -> None:
        raise ConstraintError("The constraint of the answer failed: it is too complex.")

    monkeypatch.setattr("lm.inference.constraints.Constraint.advance", advance)
    body = {"prompt": "a", "guided_regex": "a"}
    response = server.post(body)
    assert response.status_code == 400 and "too complex" in response.json()["error"]["message"]
    with pytest.raises(openai.APIError, match="too complex"):
        list(server.client.completions.create(model="tiny", prompt="a", stream=True, extra_body={"guided_regex": "a"}))
