"""Log-probabilities, penalties, biases and best_of in responses equal those computed with the model itself."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from lm.inference.chat_format import render_plain
from lm.model.transformer import TransformerLM
from tests.helpers.generating import fixed_model, make_model
from tests.helpers.tokenizers import bytes_tokenizer
from textmill.server.app import build_app
from textmill.server.logprobs import TokenNames

TOKENIZER = bytes_tokenizer(["<|endoftext|>"])
NAMES = TokenNames(TOKENIZER)
MESSAGES: Any = [{"role": "user", "content": "Hi!"}]


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    return make_model(257, 128).eval()


@pytest.fixture(scope="module")
def client(model: TransformerLM) -> Iterator[TestClient]:
    with TestClient(build_app(model, TOKENIZER, "tiny", 4)) as client:
        yield client


def complete(client: TestClient, **body: Any) -> Any:
    response = client.post("/v1/completions", json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(client: TestClient, path: str, **body: Any) -> list[Any]:
    text = client.post(f"/v1/{path}", json={"temperature": 0, "stream": True, **body}).text
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line and line != "data: [DONE]"]


def score(model: TransformerLM, ids: list[int]) -> list[torch.Tensor]:
    """Return the log-probabilities (V,) in the place of each id except the first, one forward pass each."""
    with torch.no_grad():
        return [model(torch.tensor([ids[:end]]))[0, -1].log_softmax(-1) for end in range(1, len(ids))]


def expected_alternatives(row: torch.Tensor, count: int, token_id: int) -> dict[str, float]:
    ids = [*row.topk(count).indices.tolist(), token_id]
    return {NAMES.name(other): float(row[other]) for other in ids}


@pytest.mark.parametrize("count", [1, 5, 20])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_completions_have_alternatives_also_of_the_prompt(
    client: TestClient, model: TransformerLM, count: int, max_tokens: int
) -> None:
    prompts = [list("Onceé".encode()), [104, 105]]
    response = complete(client, prompt=prompts, echo=True, logprobs=count, max_tokens=max_tokens)
    for prompt, choice in zip(prompts, response["choices"], strict=True):
        ids = [*prompt, *bytes_of(choice["logprobs"]["tokens"][len(prompt) :])]
        assert len(ids) == len(prompt) + max_tokens
        assert choice["text"] == bytes(ids).decode(errors="replace")
        assert choice["logprobs"]["tokens"] == [NAMES.name(token_id) for token_id in ids]
        rows = score(model, ids)
        [first, *logprobs], [nothing, *alternatives] = (
            choice["logprobs"][name] for name in ("token_logprobs", "top_logprobs")
        )
        assert (first, nothing) == (None, None)
        assert logprobs == pytest.approx([float(row[i]) for row, i in zip(rows, ids[1:], strict=True)], abs=1e-4)
        for ours, row, token_id, logprob in zip(alternatives, rows, ids[1:], logprobs, strict=True):
            assert ours == pytest.approx(expected_alternatives(row, count, token_id), abs=1e-4)
            assert ours[NAMES.name(token_id)] == logprob, "the same number in both places"
    assert response["usage"]["completion_tokens"] == 2 * max_tokens


def bytes_of(names: list[str]) -> bytes:
    parts = (name.removeprefix("bytes:\\x") for name in names)
    return b"".join(
        bytes.fromhex(part) if part != name else name.encode() for part, name in zip(parts, names, strict=True)
    )


def test_a_stream_has_the_same_scores(client: TestClient) -> None:
    body: dict[str, Any] = {"prompt": "Once", "echo": True, "logprobs": 3, "max_tokens": 9}
    [whole] = complete(client, **body)["choices"]
    chunks = [event["choices"][0] for event in events(client, "completions", **body)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for chunk in chunks for value in chunk["logprobs"][name]] == values


def test_a_chat_has_scores(client: TestClient, model: TransformerLM) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 4, "max_tokens": 6}
    choice = client.post("/v1/chat/completions", json={"temperature": 0, **body}).json()["choices"][0]
    content = choice["logprobs"]["content"]
    ids = [byte for entry in content for byte in entry["bytes"]]
    prompt = list(render_plain(MESSAGES).encode())
    rows = score(model, [*prompt, *ids])[len(prompt) - 1 :]
    for entry, row, token_id in zip(content, rows, ids, strict=True):
        assert entry["token"] == NAMES.name(token_id)
        assert entry["logprob"] == pytest.approx(float(row[token_id]), abs=1e-4)
        top = row.topk(4)
        assert [other["bytes"] for other in entry["top_logprobs"]] == [[i] for i in top.indices.tolist()]
        assert [other["logprob"] for other in entry["top_logprobs"]] == pytest.approx(top.values.tolist(), abs=1e-4)
    chunks = events(client, "chat/completions", **body)
    assert [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]] == content
    del body["top_logprobs"]
    plain = client.post("/v1/chat/completions", json={"temperature": 0, **body}).json()["choices"][0]
    assert [entry["top_logprobs"] for entry in plain["logprobs"]["content"]] == [[]] * 6


def test_impossible_tokens_have_a_finite_score() -> None:
    logits = [0.0] * 257
    logits[65], logits[66] = float("-inf"), float("nan")
    names = [NAMES.name(65), NAMES.name(66)]
    with TestClient(build_app(fixed_model(logits, 16).eval(), TOKENIZER, "tiny", 1)) as client:
        [choice] = complete(client, prompt="AAB", echo=True, logprobs=2, max_tokens=1)["choices"]
    assert names == ["A", "B"] and choice["logprobs"]["token_logprobs"][1:3] == [-9999.0] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_that_ends_a_text_is_scored_too(stream: bool) -> None:
    """Evaluation harnesses ask for one token beyond the text, and drop its score."""
    model = fixed_model([9.0 if token_id == 256 else 0.0 for token_id in range(257)], 64).eval()
    with TestClient(build_app(model, TOKENIZER, "tiny", 1)) as client:
        body: dict[str, Any] = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 1}
        found = events(client, "completions", **body) if stream else [complete(client, **body)]
        chat = {"messages": MESSAGES, "logprobs": True, "max_tokens": 1, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=chat).json()["choices"][0]
    choices = [event["choices"][0] for event in found]
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == ["a", "b", "<|endoftext|>"]
    assert choices[-1]["finish_reason"] == "stop" and "".join(choice["text"] for choice in choices) == "ab"
    assert choices[-1]["logprobs"]["token_logprobs"][-1] > -0.1
    if not stream:
        assert found[0]["usage"]["completion_tokens"] == 0
    [score] = answer["logprobs"]["content"]
    assert answer["message"]["content"] == "" and score["token"] == "<|endoftext|>" and score["logprob"] > -0.1


def test_best_of_does_not_prefer_an_empty_text() -> None:
    logits = [-50.0] * 257
    logits[ord("a")], logits[256] = 2.0, 0.0  # "a" is seven times as likely as the end
    with TestClient(build_app(fixed_model(logits, 64).eval(), TOKENIZER, "tiny", 4)) as client:
        body: dict[str, Any] = {"prompt": "a", "max_tokens": 3, "temperature": 1, "top_p": 1, "best_of": 16}
        texts = [complete(client, **body, seed=seed)["choices"][0]["text"] for seed in range(0, 160, 16)]
    assert texts == ["aaa"] * 10


def test_penalties_and_biases_change_the_text(client: TestClient) -> None:
    [plain] = complete(client, prompt="Once", max_tokens=30)["choices"]
    first = plain["text"][0].encode()[0]
    [biased] = complete(client, prompt="Once", max_tokens=30, logit_bias={str(ord("x")): 100, "0": -100})["choices"]
    assert biased["text"] == "x" * 30
    [excluded] = complete(client, prompt="Once", max_tokens=30, logit_bias={str(first): -100})["choices"]
    assert excluded["text"][0] != plain["text"][0]
    [spread] = complete(
        client, prompt="Once", max_tokens=30, logit_bias={str(ord(c)): 50 for c in "abc"}, presence_penalty=2,
        frequency_penalty=2, logprobs=0,
    )["choices"]  # fmt: skip
    assert {*spread["text"]} == {*"abc"} and len({*map(spread["text"].count, "abc")}) < 3
    answer = client.post(
        "/v1/chat/completions",
        json={"messages": MESSAGES, "max_tokens": 5, "logit_bias": {str(ord("x")): 100}, "temperature": 0},
    )
    assert answer.json()["choices"][0]["message"]["content"] == "xxxxx"


def test_best_of_returns_the_most_likely(client: TestClient) -> None:
    body: dict[str, Any] = {"prompt": ["Once", "a"], "max_tokens": 5, "temperature": 1, "top_p": 1, "seed": 5}
    every = complete(client, **body, n=4, logprobs=0)["choices"]
    best = complete(client, **body, n=2, best_of=4, logprobs=0)
    expected = []
    for group in (every[:4], every[4:]):
        expected += sorted(group, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]) / 5)[:2]
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in expected]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"]["completion_tokens"] == 40, "all that were computed"
    without = complete(client, **body, n=2, best_of=4)["choices"]
    assert [choice["text"] for choice in without] == [choice["text"] for choice in expected]
    assert [choice["logprobs"] for choice in without] == [None] * 4
