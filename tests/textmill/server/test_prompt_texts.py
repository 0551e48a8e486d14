"""Prompts of completions: a suffix, and special tokens that are written as text."""

import logging
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from lm.inference.generation_request import Generation
from lm.tokenizer.chat_settings import ChatSettings
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.generating import fixed_model, make_model
from tests.helpers.tokenizers import bytes_tokenizer
from tests.textmill.server.test_chat_template import CONTEXT, open_client

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
TOKENIZER = bytes_tokenizer(["<|endoftext|>", *MARKS, "<|file_sep|>"])
BEFORE, BETWEEN, AFTER, SEPARATOR = range(257, 261)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of all prompts."""
    recorded: list[list[int]] = []
    original = Generation.__post_init__

    def record(self: Generation) -> None:
        recorded.append([*self.prompt])
        original(self)

    monkeypatch.setattr(Generation, "__post_init__", record)
    return recorded


def complete(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/completions", json={"max_tokens": 4, "temperature": 0, **body})


def test_a_suffix_asks_for_the_middle(prompts: list[list[int]]) -> None:
    with open_client(make_model(TOKENIZER.size, CONTEXT), TOKENIZER) as client:
        response = complete(client, prompt=["ab", "é"], suffix="cd", logprobs=1)
        assert response.status_code == 200, response.text
        parts = [[*b"ab"], [*"é".encode()]]
        assert prompts == [[BEFORE, *part, BETWEEN, *b"cd", AFTER] for part in parts]
        assert response.json()["usage"]["prompt_tokens"] == 14
        assert complete(client, prompt=[97], suffix="<|fim_middle|>").status_code == 200
        assert prompts[2] == [BEFORE, 97, BETWEEN, *b"<|fim_middle|>", AFTER]
        for nothing in (None, ""):
            assert complete(client, prompt="ab", suffix=nothing).status_code == 200
            assert prompts.pop() == [*b"ab"]


def test_the_middle_ends_at_the_next_file() -> None:
    logits = torch.zeros(TOKENIZER.size)
    logits[SEPARATOR] = 50
    tokenizer = Tokenizer(*TOKENIZER.parts)
    tokenizer.chat = ChatSettings({}, {}, (256,))  # the model's files name one end
    with open_client(fixed_model(logits.tolist(), CONTEXT), tokenizer) as client:
        plain, middle = (complete(client, prompt="a", suffix=suffix).json() for suffix in ("", "b"))
        assert (plain["choices"][0]["finish_reason"], plain["usage"]["completion_tokens"]) == ("length", 4)
        assert (middle["choices"][0]["finish_reason"], middle["usage"]["completion_tokens"]) == ("stop", 0)
        longer = complete(client, prompt="a", suffix="b", min_tokens=2).json()
        assert (longer["choices"][0]["finish_reason"], longer["usage"]["completion_tokens"]) == ("stop", 2)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"suffix": "b", "echo": True}, "echo", "echo: A prompt with a suffix"),
        ({"suffix": 5}, "suffix", "suffix: Input should be a valid string"),
        ({"suffix": "b" * CONTEXT}, "prompt", "The prompt has"),
    ],
)
def test_a_wrong_suffix_is_refused_by_field(fields: dict[str, Any], param: str, message: str) -> None:
    with open_client(make_model(TOKENIZER.size, CONTEXT), TOKENIZER) as client:
        response = complete(client, prompt="a", **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param) and error["message"].startswith(message)


def test_a_model_without_the_tokens_refuses_a_suffix() -> None:
    plain = bytes_tokenizer(["<|endoftext|>", *MARKS[:2]])
    with open_client(make_model(plain.size, CONTEXT), plain) as client:
        response = complete(client, prompt="a", suffix="b")
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "suffix")
        assert error["message"].startswith("suffix: The model has no tokens to fill in the middle")


def test_the_log_says_once_that_a_special_token_is_plain_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "textmill")
    typed = "a<|endoftext|>"
    with open_client(make_model(TOKENIZER.size, CONTEXT), TOKENIZER) as client:
        quiet: list[dict[str, Any]] = [
            {"prompt": "a<|endoftext|"},
            {"prompt": typed, "parse_special": True},
            {"prompt": [*typed.encode()]},
        ]
        for body in quiet:
            assert complete(client, **body).status_code == 200
        chat = {"messages": [{"role": "user", "content": typed}], "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        assert client.post("/tokenize", json={"prompt": typed}).status_code == 200
        assert "plain text, not as" not in caplog.text
        for body in ({"prompt": ["b", typed]}, {"prompt": typed}, {"prompt": "b", "suffix": typed}):
            assert complete(client, **body).status_code == 200
    [line] = [message for message in caplog.messages if "plain text, not as" in message]
    assert line.startswith("A prompt of /v1/completions has the text <|endoftext|>.") and "parse_special: true" in line
