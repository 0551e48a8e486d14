"""API keys, the limit of requests of a client, /health and /metrics."""

import asyncio
import hmac
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send

from lm.checkpoint.hugging_face.model_files import save_hugging_face
from lm.inference.scheduler import Scheduler
from tests.helpers.examples import examples
from tests.helpers.generating import LoadedModel, make_model
from tests.helpers.tokenizers import bytes_tokenizer
from textmill.cli import tools
from textmill.cli.main import main
from textmill.server.access import AccessControl
from textmill.server.app import build_app

TOKENIZER = bytes_tokenizer(["<|endoftext|>"])
KEY = "correct-horse"


@pytest.fixture
def client() -> Iterator[TestClient]:
    app = build_app(make_model(257, 64).eval(), TOKENIZER, "tiny", 2, 3, api_key=KEY, max_requests_per_client=2)
    with TestClient(app) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def call(app: Any, path: str, headers: list[tuple[bytes, bytes]], client: str = "10.0.0.1") -> int:
    """Return the status of a request whose body must not be read."""

    async def receive() -> Message:
        raise AssertionError("the body of a refused request was read")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "client": (client, 1)}
    asyncio.run(app(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"authorization", f"Basic {KEY}".encode())],
        [(b"authorization", KEY.encode())],
        [(b"authorization", f"Bearer {KEY}x".encode())],
        [(b"authorization", b"Bearer x"), (b"authorization", f"Bearer {KEY}".encode())],
        [(b"x-api-key", f"Bearer {KEY}".encode())],
        [(b"x-api-key", b"x"), (b"x-api-key", KEY.encode())],
        [(b"x-key", KEY.encode())],
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/other"])
def test_a_request_without_the_key_costs_nothing(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, headers: list[tuple[bytes, bytes]]
) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("a refused request was parsed or submitted")

    monkeypatch.setattr("textmill.server.app.parse_request", fail)
    monkeypatch.setattr(Scheduler, "submit", fail)
    assert call(client.app, path, headers) == 401


@pytest.mark.parametrize("name", ["x-api-key", "X-Api-Key"])
def test_the_key_opens_in_anthropics_header_too(client: TestClient, name: str) -> None:
    assert client.get("/v1/models", headers={name: KEY}).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"localhost:8000", 200),
        (b"LOCALHOST", 200),
        (b"127.0.0.1:8000", 200),
        (b"127.0.0.1", 200),
        (b"[::1]:8000", 200),
        (None, 200),
        (b"evil.example", 421),
        (b"evil.example:8000", 421),
        (b"127.0.0.1.evil.example", 421),
        (b"localhost.evil.example", 421),
        (b"10.0.0.1", 421),
        (b"", 421),
        (b"\xff", 421),
    ],
)
@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/completions"])
def test_a_private_server_answers_only_by_the_names_of_its_machine(path: str, host: bytes | None, status: int) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    headers = [] if host is None else [(b"host", host)]
    assert call(AccessControl(answer, is_private=True), path, headers) == status
    assert call(AccessControl(answer), path, headers) == 200
    page = [*headers, (b"origin", b"https://" + host)] if host is not None else []
    assert call(AccessControl(answer, is_private=True), path, page) == status
    if status == 421:
        web_page = [(b"host", b"localhost"), (b"origin", b"https://" + (host or b""))]
        assert call(AccessControl(answer, is_private=True), path, web_page) == 403
        assert call(AccessControl(answer, is_private=True), path, [(b"host", b"localhost"), *headers]) == 421


def test_the_command_is_private_on_a_loopback_address_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "resolve_model", lambda *_: LoadedModel(make_model(257, 8).eval(), TOKENIZER))
    found: list[bool] = []

    def record(*_: Any, **options: Any) -> Any:
        found.append(options["is_private"])
        raise KeyboardInterrupt

    monkeypatch.setattr("textmill.server.listener.build_app", record)
    for arguments in ([], ["--host", "localhost"], ["--host", "0.0.0.0"], ["--api-key", "a"]):
        main(["serve", "--port", "0", *arguments])
    assert found == [True, True, False, False]


@pytest.mark.slow
def test_clients_are_told_no_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The identity of a model is the same as long as its files are."""
    for name in ("one", "two"):
        save_hugging_face(make_model(257, 8).eval(), TOKENIZER, tmp_path / name)
    found: list[str] = []

    def record(*_: Any, **options: Any) -> Any:
        found.append(options["identity"])
        raise KeyboardInterrupt

    monkeypatch.setattr("textmill.server.listener.build_app", record)
    for arguments in (["one"], ["one"], ["two"], ["one", "--quantize", "bfloat16"]):
        main(["serve", "--port", "0", "--model", str(tmp_path / arguments[0]), *arguments[1:]])
    assert found[0] == found[1] and len({*found}) == 3
    assert all(re.fullmatch("[0-9a-f]{16}", identity) for identity in found)


def test_the_answer_without_the_key_is_openais(client: TestClient) -> None:
    response = client.post("/v1/completions", content=b"{" * 100)
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key" and KEY not in response.text
    for scheme in ("Bearer", "bearer", "BEARER "):
        headers = {"Authorization": f"{scheme} {KEY}"}
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers).status_code == 200
    assert client.get("/health").json() == {"status": "ok"}, "a load balancer has no key"


@examples(40)
@given(key=st.binary(max_size=60) | st.just(KEY.encode()))
def test_keys_are_compared_in_constant_time(key: bytes) -> None:
    """The comparison sees digests of one length, for keys of any length, and is that of hmac."""
    compared: list[tuple[bytes, bytes]] = []
    compare_digest = hmac.compare_digest

    def record(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare_digest(a, b)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hmac, "compare_digest", record)
        status = call(AccessControl(answer, KEY), "/v1/models", [(b"authorization", b"Bearer " + key)])
    assert status == (200 if key.strip() == KEY.encode() else 401)
    [(a, b)] = compared
    assert len(a) == len(b) == 32


def test_a_client_has_a_limit_of_requests_at_a_time() -> None:
    async def run() -> None:
        release, statuses = asyncio.Event(), []

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == "/fail":
                raise ConnectionError
            await release.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message: Message) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        app = AccessControl(answer, None, 2)

        def request(client: str, path: str = "/v1/models") -> Any:
            return app({"type": "http", "path": path, "headers": [], "client": (client, 1)}, None, send)  # type: ignore

        running = [asyncio.ensure_future(request(client)) for client in ("a", "a", "b")]
        await asyncio.sleep(0)
        await request("a")
        assert statuses == [429], "the third of the client; its body was not read"
        health = asyncio.ensure_future(request("a", "/health"))
        release.set()
        await asyncio.gather(*running, health)
        assert statuses == [429, 200, 200, 200, 200]
        for _ in range(5):
            with pytest.raises(ConnectionError):
                await request("a", "/fail")
        await request("a")
        assert statuses[-1] == 200, "a failed request frees its place"
        assert not app._requests_of, "no record of clients without requests"

    asyncio.run(run())


def test_metrics_count_requests_tokens_and_latencies(client: TestClient) -> None:
    def read() -> dict[tuple[str, ...], float]:
        response = client.get("/metrics", headers=bearer(KEY))
        assert response.headers["content-type"].startswith("text/plain; version=")
        families = text_string_to_metric_families(response.text)
        samples = [sample for family in families for sample in family.samples]
        return {(sample.name, *sample.labels.values()): sample.value for sample in samples}

    before = read()
    assert before["textmill_running_completions",] == before["textmill_waiting_completions",] == 0
    body = {"prompt": ["ab", "cde"], "max_tokens": 4, "n": 2, "logit_bias": {"256": -100}}  # without an end of text
    assert client.post("/v1/completions", json=body, headers=bearer(KEY)).status_code == 200
    assert client.post("/v1/completions", json=body | {"stream": True}, headers=bearer(KEY)).status_code == 200
    client.post("/v1/completions", json={}, headers=bearer(KEY))
    client.post("/v1/completions", json=body)
    client.post("/made-up", headers=bearer(KEY))
    after = read()
    assert after["textmill_requests_total", "/v1/completions", "200"] == 2
    assert after["textmill_requests_total", "/v1/completions", "400"] == 1
    assert after["textmill_requests_total", "/v1/completions", "401"] == 1
    assert after["textmill_requests_total", "other", "404"] == 1, "clients cannot make new labels"
    assert after["textmill_prompt_tokens_total",] == 10 and after["textmill_completion_tokens_total",] == 32
    assert after["textmill_request_seconds_count", "/v1/completions"] == 4
    assert after["textmill_time_to_first_token_seconds_count",] == 8
    assert after["textmill_time_per_output_token_seconds_count",] == 8
    first, whole = (
        after["textmill_time_to_first_token_seconds_sum",],
        after["textmill_request_seconds_sum", "/v1/completions"],
    )
    assert 0 < first < 4 * whole
    assert after["process_resident_memory_bytes",] > 1e6


def test_speculative_tokens_are_reported() -> None:
    """The text is that of a server without guesses; usage and metrics tell how many there were."""
    model = make_model(257, 64).eval()
    body = {"prompt": "aaaaaaaaaaaa", "max_tokens": 40, "temperature": 0}
    with TestClient(build_app(model, TOKENIZER, "tiny", 2)) as client:
        plain = client.post("/v1/completions", json=body).json()
    assert set(plain["usage"]["completion_tokens_details"].values()) == {0}
    with TestClient(build_app(model, TOKENIZER, "tiny", 2, speculative_tokens=4)) as client:
        response = client.post("/v1/completions", json=body).json()
        metrics = client.get("/metrics").text
    assert response["choices"] == plain["choices"]
    details = response["usage"]["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert 0 < accepted < 40
    assert f"textmill_guessed_tokens_total {accepted + rejected}.0" in metrics
    assert f"textmill_accepted_tokens_total {accepted}.0" in metrics


def test_health_reports_an_ended_scheduler(client: TestClient) -> None:
    assert client.get("/health").status_code == 200
    client.app.state.scheduler.close()  # type: ignore[attr-defined]
    assert client.get("/health").status_code == 503


def test_the_command_takes_the_key_from_an_option_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tools, "resolve_model", lambda *_: LoadedModel(make_model(257, 8).eval(), TOKENIZER))
    keys: list[Any] = []

    def record(*_: Any, **options: Any) -> Any:
        keys.append((options["api_key"], options["max_requests_per_client"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("textmill.server.listener.build_app", record)
    main(["serve", "--port", "0"])
    main(["serve", "--port", "0", "--api-key", "a", "--max-requests-per-client", "3"])
    monkeypatch.setenv("TEXTMILL_API_KEY", "b")
    main(["serve", "--port", "0"])
    main(["serve", "--port", "0", "--api-key", "a"])
    assert keys == [(None, 0), ("a", 3), ("b", 0), ("a", 0)]
    for bad in ("", " a", "a\n", "é"):
        assert main(["serve", "--port", "0", "--api-key", bad]) == 2
        assert "The API key must be printable" in capsys.readouterr().err
