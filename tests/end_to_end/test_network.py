"""Network failures: which operations are retried, and which errors are final."""

import http.server
import io
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.implementations.local import LocalFileSystem
from tenacity import stop_after_delay, wait_none

from flows import executor
from flows.config import PipelineConfig
from flows.pipeline import pipeline, pipeline_stages
from flows.plan import plan
from lm.common.errors import TransientError, UserError
from lm.files import retry
from lm.text.demo_corpus import demo_stories
from lm.text.sources import hash_source
from tasks.runtime import store
from tasks.runtime.output import read_output
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.stage import Stage
from tests.helpers.corpora import read_documents, serve_http

TEXT = "".join(demo_stories(50)).encode()
BREAK = "break"


class FlakyHandler(http.server.BaseHTTPRequestHandler):
    """Answers each GET with the next of ``replies``: a status, or BREAK for half of the body. Then with the text."""

    replies: ClassVar[list[Any]] = []
    request_count = 0

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(TEXT)))
        self.end_headers()

    def do_GET(self) -> None:
        type(self).request_count += 1
        response = self.replies.pop(0) if self.replies else 200
        self.send_response(200 if response == BREAK else response)
        self.send_header("Content-Length", str(len(TEXT)))
        self.end_headers()
        self.wfile.write(TEXT[: len(TEXT) // 2] if response == BREAK else TEXT)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def flaky_url() -> Iterator[str]:
    """Yield the URL of a text on a server that fails as told by ``FlakyHandler.replies``."""
    FlakyHandler.replies[:], FlakyHandler.request_count = [], 0
    with serve_http(FlakyHandler) as url:
        yield f"{url}/a.txt"


@pytest.mark.parametrize("response", [500, 503, 429, BREAK])
def test_a_failing_server_raises_a_transient_error(flaky_url: str, response: Any) -> None:
    for reader in (hash_source, read_documents):
        FlakyHandler.replies[:] = [response]
        with pytest.raises(TransientError, match=flaky_url):
            reader(flaky_url)
    assert hash_source(flaky_url).bytes == len(TEXT)


@pytest.mark.parametrize("response", [401, 403, 404, 410])
def test_a_client_error_is_not_transient(flaky_url: str, response: int) -> None:
    FlakyHandler.replies[:] = [response]
    with pytest.raises(UserError, match=flaky_url) as caught:
        hash_source(flaky_url)
    assert not isinstance(caught.value, TransientError)


def test_a_refused_connection_raises_a_transient_error() -> None:
    with pytest.raises(TransientError, match="cannot be"):
        hash_source("http://127.0.0.1:9/a.txt")


class BrokenFile(io.FileIO):
    """A file on a network file system whose connection is broken."""

    def read(self, size: int | None = -1, /) -> bytes:
        raise ConnectionResetError("reset by peer")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.zst", "a.jsonl", "a.parquet"])
def test_a_broken_connection_is_not_a_corrupt_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).write_bytes(bytes(100))
    monkeypatch.setattr(LocalFileSystem, "open", lambda fs, path, mode: BrokenFile(path))
    with pytest.raises(TransientError, match="the connection broke"):
        read_documents(str(tmp_path / name))


@pytest.fixture
def no_retry_wait(monkeypatch: pytest.MonkeyPatch, prefect_server: None) -> Iterator[None]:
    monkeypatch.setattr(retry.retry_reading, "wait", wait_none())
    monkeypatch.setattr(executor, "RETRY_DELAYS", [0, 0, 0])
    executor.make_task.cache_clear()
    yield
    executor.make_task.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("responses", [[500, 503], [BREAK], [200, 500, BREAK, 429]])
def test_the_flow_retries(
    flaky_url: str, tmp_path: Path, no_retry_wait: None, responses: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    FlakyHandler.replies[:] = responses
    config = PipelineConfig.load_preset("demo")
    config.data.train[:] = [flaky_url]
    pipeline(config, str(tmp_path), until="ingest")
    assert not FlakyHandler.replies
    assert "Trying again." in caplog.text
    (text,) = tmp_path.glob("ingest-group/*/*/text.txt")
    assert text.read_bytes() == TEXT, "validation documents stay in the file"


@pytest.mark.slow
def test_the_flow_gives_up_after_three_retries(flaky_url: str, tmp_path: Path, no_retry_wait: None) -> None:
    FlakyHandler.replies[:] = [500] * 99
    config = PipelineConfig.load_preset("demo")
    config.data.train[:] = [flaky_url]
    with pytest.raises(TransientError):
        pipeline(config, str(tmp_path), until="ingest")
    assert FlakyHandler.request_count == 4
    FlakyHandler.replies[:] = [200, *[500] * 99]  # the sources are found
    with pytest.raises(TransientError):
        pipeline(config, str(tmp_path), until="ingest")
    assert FlakyHandler.request_count == 4 + 1 + 4


@pytest.mark.slow
def test_a_plan_retries(flaky_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry.retry_request, "wait", wait_none())
    FlakyHandler.replies[:] = [500, BREAK]
    config = PipelineConfig.load_preset("demo")
    config.data.train[:] = [flaky_url]
    (first, _) = plan(pipeline_stages, config, str(tmp_path), "ingest", ())
    assert first == ("ingest-train", "runs, 1 group")
    assert not FlakyHandler.replies


@pytest.fixture
def silent_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """Yield the connections to an S3 server that never answers. The read timeout is 0.2 s instead of 15."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 0.2)
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            try:
                while True:
                    connections.append(server.accept()[0])
            except OSError:  # closed
                pass

        threading.Thread(target=accept, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        yield connections
        server.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()
    s3fs.S3FileSystem.clear_instance_cache()


def test_an_object_store_that_never_answers_times_out(
    silent_s3: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TransientError, match="cannot be"):
        hash_source("s3://bucket/a.txt")
    assert len(silent_s3) == 2  # s3fs retries once, botocore does not
    monkeypatch.setattr(retry.retry_request, "stop", stop_after_delay(0.5))  # instead of 60 seconds
    with pytest.raises(TransientError, match="cannot be reached"):
        store.Store("s3://bucket/root").read_bytes("manifest.json")
    assert len(silent_s3) == 2 + 2 * 2  # some operations of s3fs retry in nested loops


def test_the_flow_does_not_retry_a_user_error(flaky_url: str, tmp_path: Path, no_retry_wait: None) -> None:
    FlakyHandler.replies[:] = [404] * 99
    config = PipelineConfig.load_preset("demo")
    config.data.train[:] = [flaky_url]
    with pytest.raises(UserError, match="does not exist"):
        pipeline(config, str(tmp_path), until="ingest")
    assert FlakyHandler.request_count == 1


def test_a_failed_request_is_retried_without_a_rerun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry.retry_request, "wait", wait_none())
    bodies: list[str] = []

    def body(out: Attempt, text: str) -> None:
        bodies.append(text)
        (out.directory / "text.txt").write_text(text)

    run = RunContext(f"memory://{tmp_path.name}", "run")
    failures: list[Exception] = []
    for name in ("put_file", "pipe_file", "cat_file", "info", "ls", "get_file"):
        monkeypatch.setattr(run.store.fs, name, failing_first(getattr(run.store.fs, name), failures))
    ref, _ = Stage("uploaded", body).materialize(run, {"text": "a"})
    output = read_output(run.store, ref)
    assert output.is_intact()
    assert output.path("text.txt").read_text() == "a"
    assert bodies == ["a"]
    assert len(failures) == 6


def failing_first(operation: Callable[..., Any], failures: list[Exception]) -> Callable[..., Any]:
    """Return ``operation`` with a first call that raises a network error, which is added to ``failures``."""
    errors: list[Exception] = [ConnectionResetError("gone")]

    def flaky(*arguments: Any, **options: Any) -> Any:
        if errors:
            failures.append(errors.pop())
            raise failures[-1]
        return operation(*arguments, **options)

    return flaky


@pytest.mark.parametrize(("error", "kind"), [(OSError(5, "EIO"), TransientError), (PermissionError("no"), UserError)])
def test_a_failing_root_is_not_treated_as_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    monkeypatch.setattr(retry.retry_request, "wait", wait_none())
    root = RunContext(f"memory://{tmp_path.name}", "run").store
    calls: list[str] = []

    def cat_file(path: str) -> bytes:
        calls.append(path)
        raise error

    monkeypatch.setattr(root.fs, "cat_file", cat_file)
    with pytest.raises(UserError) as caught:
        root.read_bytes("manifest.json")
    assert type(caught.value) is kind
    assert len(calls) == (4 if kind is TransientError else 1)
