"""Embeddings over HTTP: as openai-python asks for them, wrong requests, and other clients meanwhile."""

import base64
import struct
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import pytest
import torch
from fastapi.testclient import TestClient

from lm.inference.scheduler import Scheduler
from tests.helpers.generating import make_model
from tests.helpers.limits import wait_for
from tests.helpers.serving import serve_app
from tests.helpers.tokenizers import bytes_tokenizer
from textmill.server import embeddings
from textmill.server.app import build_app

CONTEXT, WIDTH = 64, 16
TOKENIZER = bytes_tokenizer(["<|endoftext|>"])
MODEL = make_model(TOKENIZER.size, CONTEXT).eval()


@pytest.fixture(scope="module", params=["last", "mean"])
def pooling(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def client(pooling: Any) -> Iterator[TestClient]:
    with TestClient(build_app(MODEL, TOKENIZER, "tiny", 2, pooling=pooling)) as client:
        yield client


def post(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/embeddings", json=body)


def expected(texts: list[list[int]], pooling: Any) -> list[Any]:
    """The embeddings of each text, computed alone."""
    rows = []
    with torch.no_grad():
        for text in texts:
            states_TD = MODEL.hidden_states(torch.tensor([text]))[0]
            pooled = states_TD[-1] if pooling == "last" else states_TD.mean(0)
            rows.append(pytest.approx((pooled / pooled.norm()).tolist(), abs=1e-5))
    return rows


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("ab", [b"ab"]),
        (["ab", "é", ""], [b"ab", "é".encode(), [256]]),
        ([97, 256], [[97, 256]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        ("<|endoftext|>", [b"<|endoftext|>"]),
        ("a" * CONTEXT, [b"a" * CONTEXT]),
    ],
    ids=["text", "texts", "ids", "lists of ids", "typed special token", "whole context"],
)
def test_the_response_has_openais_form(client: TestClient, pooling: Any, given: Any, texts: Any) -> None:
    ids = [[*text] for text in texts]
    for encoding_format in (None, "float", "base64"):
        response = post(client, input=given, model="tiny", encoding_format=encoding_format, user="u")
        assert response.status_code == 200, response.text
        body = response.json()
        vectors = [row.pop("embedding") for row in body["data"]]
        if encoding_format == "base64":
            vectors = [[*struct.unpack(f"<{WIDTH}f", base64.b64decode(vector))] for vector in vectors]
        assert vectors == expected(ids, pooling)
        assert body.pop("data") == [{"object": "embedding", "index": index} for index in range(len(ids))]
        num_tokens = sum(map(len, ids))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert body == {"object": "list", "model": "tiny", "usage": usage}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input: Field required"),
        ({"input": []}, "input", "input: The text is empty."),
        ({"input": [[97], []]}, "input", "input.1: The text is empty."),
        ({"input": ["a", "a" * (CONTEXT + 1)]}, "input", "input.1: The text has 65 tokens; the model's"),
        ({"input": "a" * 1000}, "input", "input: The text has 1000 tokens"),
        ({"input": [97, 257]}, "input", "input: 257 is not a token id"),
        ({"input": [[1], [-1]]}, "input", "input.1: -1 is not a token id"),
        ({"input": [10**30]}, "input", "input: 1000"),
        ({"input": ["a", 5]}, "input", "input"),
        ({"input": {"a": 1}}, "input", "input"),
        ({"input": ["a"] * 2049}, "input", "input: 2,049 texts are given; at most 2,048"),
        ({"input": "a", "dimensions": 8}, "dimensions", "dimensions: The model has vectors of one length only"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "does not support it"),
        ({"input": "a", "model": "other"}, "model", "There is no model 'other'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_requests_are_refused_by_field(
    client: TestClient, body: dict[str, Any], param: str, message: str
) -> None:
    response = post(client, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (404 if param == "model" else 400, param)
    assert message in error["message"] and len(error["message"]) < 500
    assert (error["code"] == "context_length_exceeded") == ("tokens; the" in error["message"])


def test_a_large_response_is_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "_MAX_NUMBERS", {"float": 2 * WIDTH, "base64": 3 * WIDTH})
    assert post(client, input=["a"] * 2).status_code == 200
    refused = post(client, input=["a"] * 3)
    assert refused.status_code == 400 and "48 numbers; at most 32" in refused.text
    assert post(client, input=["a"] * 3, encoding_format="base64").status_code == 200


def test_a_tokenizer_without_a_document_token_has_no_empty_text() -> None:
    with TestClient(build_app(make_model(256, CONTEXT).eval(), bytes_tokenizer(), "tiny", 2)) as client:
        assert "The text is empty" in post(client, input="").text
        assert post(client, input="a").status_code == 200


@pytest.mark.parametrize("problem", ["error", "nan"])
def test_a_model_that_fails_is_no_answer(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Generator[None, None, Any]:
        yield
        if problem == "error":
            raise RuntimeError("out of memory")
        return torch.full((1, WIDTH), torch.nan)

    monkeypatch.setattr(embeddings, "embed_in_steps", fail)
    with TestClient(build_app(MODEL, TOKENIZER, "tiny", 2)) as client:
        response = post(client, input="a")
        assert response.status_code == 500 and "The model failed" in response.json()["error"]["message"]
        assert post(client, input="a").status_code == 500, "the scheduler still runs"


@pytest.mark.slow
def test_openais_client_gets_embeddings(pooling: Any) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    with serve_app(build_app(MODEL, TOKENIZER, "tiny", 2, pooling=pooling)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for options in ({}, {"encoding_format": "float"}):  # without it, the client asks for base64
            response = client.embeddings.create(model="tiny", input=["ab", "c"], **options)
            assert [row.embedding for row in response.data] == expected([[*b"ab"], [*b"c"]], pooling)
            assert (response.usage.prompt_tokens, response.model) == (3, "tiny")
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="tiny", input="a", dimensions=4)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Embeddings never end. Returns the times of their steps."""
    steps: list[float] = []

    def embed(*arguments: Any) -> Generator[None, None, Any]:
        while True:
            steps.append(time.monotonic())
            yield

    monkeypatch.setattr(embeddings, "embed_in_steps", embed)
    return steps


def test_completions_go_on_beside_embeddings_and_a_client_that_leaves_ends_them(endless: list[float]) -> None:
    app = build_app(MODEL, TOKENIZER, "tiny", 2)
    scheduler: Scheduler = app.state.scheduler
    with serve_app(app) as url:
        thread = threading.Thread(target=_give_up, args=(url,))
        thread.start()
        wait_for(lambda: len(endless) > 0, 60, "the first step")
        body = {"prompt": "a", "max_tokens": 9, "stop_token_ids": []}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        thread.join()
        wait_for(lambda: not scheduler._jobs, 60, "the end of the job")


def _give_up(url: str) -> None:
    """Ask for embeddings, and disconnect after two seconds."""
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, timeout=2)
