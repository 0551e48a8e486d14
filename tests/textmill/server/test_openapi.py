"""The OpenAPI document, and the errors for paths and methods that the server does not have."""

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from fastapi.testclient import TestClient

from tests.helpers.generating import make_model
from tests.helpers.tokenizers import bytes_tokenizer
from textmill.server.app import build_app
from textmill.server.requests import ChatRequest, CompletionRequest


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = build_app(make_model(257, 64).eval(), bytes_tokenizer(["<|endoftext|>"]), "tiny", 2, api_key="k")
    with TestClient(app, headers={"Authorization": "Bearer k"}) as client:
        yield client


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_the_document_has_the_fields_that_the_server_supports(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert references(document) <= {f"#/components/schemas/{name}" for name in schemas}
    for path, request in (("/v1/completions", CompletionRequest), ("/v1/chat/completions", ChatRequest)):
        body = document["paths"][path]["post"]["requestBody"]
        [name] = re.findall(r"\w+$", body["content"]["application/json"]["schema"]["$ref"])
        fields = request.model_fields.items()
        supported = {field for field, info in fields if info.annotation is not Any and Any not in get_args(info)}
        assert schemas[name]["properties"].keys() == supported >= {"model", "stop", "seed", "logprobs"}
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert document["paths"].keys() == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/v1/models/{model_id}",
    }


def test_the_document_needs_the_key_and_has_no_page(client: TestClient) -> None:
    assert client.get("/openapi.json", headers={"Authorization": ""}).status_code == 401
    for path in ("/docs", "/redoc"):
        assert client.get(path).status_code == 404, "FastAPI's pages load scripts of other servers"


def test_an_unknown_path_gets_openais_error_and_the_endpoints(client: TestClient) -> None:
    response = client.post("/v1/audio", json={})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "unknown_url")
    assert error["message"].startswith("Unknown request URL: POST /v1/audio. This server has POST /v1/completions,")
    assert len(client.get("/" + "a" * 5000).json()["error"]["message"]) < 400


def test_an_endpoint_names_its_method(client: TestClient) -> None:
    response = client.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["message"] == "GET /v1/completions is not possible; the method is POST."
    assert response.json()["error"]["code"] == "method_not_supported"


def test_all_endpoints_of_the_error_exist(client: TestClient) -> None:
    message = client.get("/nothing").json()["error"]["message"]
    endpoints = message.partition(" This server has ")[2].removesuffix(".").split(", ")
    assert len(endpoints) == 13
    for endpoint in endpoints:
        assert client.request(*endpoint.split()).status_code in (200, 400), endpoint
