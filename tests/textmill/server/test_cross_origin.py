"""Web pages of other origins that may use the server: ``--allowed_origins``."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from lm.common.errors import UserError
from tests.helpers.generating import LoadedModel, make_model
from tests.helpers.tokenizers import bytes_tokenizer
from textmill.cli import tools
from textmill.cli.main import main
from textmill.server.access import parse_origin
from textmill.server.app import build_app

TOKENIZER = bytes_tokenizer(["<|endoftext|>"])
ORIGIN, OTHER = "https://app.example.com", "https://evil.example"
BODY = {"prompt": "a", "max_tokens": 1}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}


def open_client(**options: Any) -> TestClient:
    app = build_app(make_model(257, 64).eval(), TOKENIZER, "tiny", 2, **options)
    return TestClient(app, base_url="http://127.0.0.1:8000")


@pytest.fixture
def client() -> Iterator[TestClient]:
    with open_client(api_key="k", allowed_origins=[ORIGIN]) as client:
        yield client


def test_a_preflight_request_needs_no_key(client: TestClient) -> None:
    """A browser sends it without the key, and asks for the headers of OpenAI's client."""
    response = client.options("/v1/chat/completions", headers={"Origin": ORIGIN, **PREFLIGHT})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "access-control-allow-credentials" not in response.headers
    refused = client.options("/v1/chat/completions", headers={"Origin": OTHER, **PREFLIGHT})
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers


def test_a_page_of_an_allowed_origin_reads_answers_and_errors(client: TestClient) -> None:
    for key, status in (("k", 200), ("wrong", 401)):
        headers = {"Origin": ORIGIN, "Authorization": f"Bearer {key}"}
        response = client.post("/v1/completions", json=BODY, headers=headers)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, ORIGIN)
        stream = client.post("/v1/completions", json=BODY | {"stream": True}, headers=headers)
        assert stream.headers["access-control-allow-origin"] == ORIGIN
    response = client.post("/v1/completions", json=BODY, headers={"Origin": OTHER, "Authorization": "Bearer k"})
    assert "access-control-allow-origin" not in response.headers, "the browser keeps the answer from the page"


@pytest.mark.parametrize(("allowed", "status"), [([], 403), ([ORIGIN], 200), (["*"], 200), ([OTHER], 403)], ids=str)
def test_a_server_without_a_key_answers_pages_of_allowed_origins_only(allowed: list[str], status: int) -> None:
    with open_client(is_private=True, allowed_origins=allowed) as client:
        response = client.post("/v1/completions", json=BODY, headers={"Origin": ORIGIN})
        assert response.status_code == status
        assert client.post("/v1/completions", json=BODY, headers={"Origin": "null"}).status_code == (
            200 if allowed == ["*"] else 403
        )
        assert client.post("/v1/completions", json=BODY, headers={"Origin": "http://localhost:3000"}).status_code == 200
        rebound = client.post("/v1/completions", json=BODY, headers={"Origin": ORIGIN, "Host": "app.example.com"})
        assert rebound.status_code in (403, 421), "a page that gives this machine its own name stays refused"


def test_without_the_option_no_origin_is_allowed() -> None:
    with open_client() as client:
        response = client.get("/v1/models", headers={"Origin": ORIGIN})
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert client.options("/v1/models", headers={"Origin": ORIGIN, **PREFLIGHT}).status_code == 405


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://App.Example.com", "https://app.example.com"),
        ("https://app.example.com:443", "https://app.example.com"),
        ("http://app.example.com:443", "http://app.example.com:443"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:80", "http://[::1]"),
        ("http://127.0.0.1:65535", "http://127.0.0.1:65535"),
        ("chrome-extension://abcdefgh", "chrome-extension://abcdefgh"),
        ("*", "*"),
    ],
)
def test_an_origin_is_compared_as_a_browser_sends_it(text: str, origin: str) -> None:
    assert parse_origin(text) == origin


@pytest.mark.parametrize(
    "text",
    ["", "app.example.com", "https://", "https://a/", "https://a/path", "https://a?b", "https://u:p@a", "https://a:",
     "https://a:0", "https://a:65536", "https://a:b", "https://*.example.com", "https://a b", "https://a\n", "null",
     "README.md", "https://bücher.example", "a" * 10_000],
)  # fmt: skip
def test_another_text_is_no_origin(text: str) -> None:
    with pytest.raises(UserError, match=r"^--allowed_origins: .* is not an origin\. Write SCHEME://HOST") as error:
        parse_origin(text)
    assert len(str(error.value)) < 300


def test_the_command_passes_the_origins(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tools, "resolve_model", lambda *_: LoadedModel(make_model(257, 8).eval(), TOKENIZER))
    found: list[Any] = []

    def record(*_: Any, **options: Any) -> Any:
        found.append(options["allowed_origins"])
        raise KeyboardInterrupt

    monkeypatch.setattr("textmill.server.listener.build_app", record)
    main(["serve", "--port", "0"])
    main(["serve", "--port", "0", "--allowed-origins", ORIGIN, "https://APP.example.com:443", "http://localhost:3000"])
    main(["serve", "--port", "0", "--allowed_origins", "*"])
    assert found == [[], [ORIGIN, "http://localhost:3000"], ["*"]]
    assert main(["serve", "--port", "0", "--allowed_origins", ORIGIN, "README.md"]) == 2
    error = capsys.readouterr().err
    assert "'README.md' is not an origin" in error and "Traceback" not in error
