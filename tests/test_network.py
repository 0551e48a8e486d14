"""Networks that fail: what is tried again, and what is not."""

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

from flows.config import load_preset
from flows.pipeline import pipeline
from flows.plan import plan
from lm.corpus import fingerprint
from lm.demo_corpus import demo_stories
from lm.errors import Unreachable, UserError
from tasks import store
from tasks.ingest import find_sources, ingest
from tasks.output import Ref, read_output
from tasks.stage import Draft, Run, Stage
from tests.corpora import read, serving

TEXT = "".join(demo_stories(50)).encode()
BREAK = "break"


class Moody(http.server.BaseHTTPRequestHandler):
    """Answers each GET with the next of ``answers``: a status, or BREAK for half a body; and when they are used up,
    with the text."""

    answers: ClassVar[list[Any]] = []
    asked = 0

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(TEXT)))
        self.end_headers()

    def do_GET(self) -> None:
        type(self).asked += 1
        answer = self.answers.pop(0) if self.answers else 200
        self.send_response(200 if answer == BREAK else answer)
        self.send_header("Content-Length", str(len(TEXT)))
        self.end_headers()
        self.wfile.write(TEXT[: len(TEXT) // 2] if answer == BREAK else TEXT)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def moody() -> Iterator[str]:
    Moody.answers[:], Moody.asked = [], 0
    with serving(Moody) as url:
        yield f"{url}/a.txt"


@pytest.mark.parametrize("answer", [500, 503, 429, BREAK])
def test_a_failing_server_is_told_from_a_missing_file(moody: str, answer: Any) -> None:
    for reader in (fingerprint, read):
        Moody.answers[:] = [answer]
        with pytest.raises(Unreachable, match=moody):
            reader(moody)
    assert fingerprint(moody).bytes == len(TEXT)


@pytest.mark.parametrize("answer", [401, 403, 404, 410])
def test_a_refusal_is_no_failure_of_the_network(moody: str, answer: int) -> None:
    Moody.answers[:] = [answer]
    with pytest.raises(UserError, match=moody) as caught:
        fingerprint(moody)
    assert not isinstance(caught.value, Unreachable)


def test_a_server_that_is_not_there(moody: str) -> None:
    with pytest.raises(Unreachable, match="cannot be"):
        fingerprint("http://127.0.0.1:9/a.txt")


class Broken(io.FileIO):
    """A file whose connection has broken, as a file system on a network tells it: by an OSError."""

    def read(self, size: int | None = -1, /) -> bytes:
        raise ConnectionResetError("reset by peer")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.zst", "a.jsonl", "a.parquet"])
def test_a_broken_connection_is_no_corrupt_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).write_bytes(bytes(100))
    monkeypatch.setattr(LocalFileSystem, "open", lambda fs, path, mode: Broken(path))
    with pytest.raises(Unreachable, match="the connection broke"):
        read(str(tmp_path / name))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, prefect_server: None) -> None:
    for task in (find_sources, ingest.task):
        monkeypatch.setattr(task, "retry_delay_seconds", [0.01, 0.01, 0.01])


@pytest.mark.parametrize("answers", [[500, 503], [BREAK], [200, 500, BREAK, 429]])
def test_the_flow_tries_again(moody: str, tmp_path: Path, impatient: None, answers: list[Any]) -> None:
    Moody.answers[:] = answers
    config = load_preset("demo")
    config.data.train[:] = [moody]
    record = pipeline(config, str(tmp_path), until="ingest")
    assert not Moody.answers
    key = record["stages"]["ingest"]["key"]
    texts = read_output(Run(str(tmp_path), "").store, Ref("ingest", key))
    both = texts.path("train.txt").read_text() + texts.path("valid.txt").read_text()
    assert sorted(both.split("\n")) == sorted(TEXT.decode().split("\n"))


def test_the_flow_gives_up_after_three_more(moody: str, tmp_path: Path, impatient: None) -> None:
    Moody.answers[:] = [500] * 99
    config = load_preset("demo")
    config.data.train[:] = [moody]
    with pytest.raises(Unreachable):
        pipeline(config, str(tmp_path), until="ingest")
    assert Moody.asked == 4


def test_a_plan_tries_again(moody: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.patiently, "wait", wait_none())
    Moody.answers[:] = [500, BREAK]
    config = load_preset("demo")
    config.data.train[:] = [moody]
    assert plan(config, str(tmp_path), "ingest", ()) == [("ingest", "runs: it has no result yet")]
    assert not Moody.answers


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """The connections to an S3 that takes them and never answers, for which 15 seconds are one fifth of one."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 0.2)
    found: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            try:
                while True:
                    found.append(server.accept()[0])
            except OSError:  # closed
                pass

        threading.Thread(target=take, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        yield found
        server.shutdown(socket.SHUT_RDWR)
        for connection in found:
            connection.close()
    s3fs.S3FileSystem.clear_instance_cache()


def test_an_object_store_that_never_answers_is_given_up(
    silent: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unreachable, match="cannot be"):
        fingerprint("s3://bucket/a.txt")
    assert len(silent) == 2  # the tries of s3fs, and not those of botocore for each
    monkeypatch.setattr(store.patiently, "stop", stop_after_delay(0.5))  # instead of 60 seconds
    with pytest.raises(Unreachable, match="cannot be reached"):
        store.Store("s3://bucket/root").read_bytes("manifest.json")
    assert len(silent) == 2 + 2 * 2  # some of its operations try twice what tries twice


def test_the_flow_does_not_repeat_a_users_mistake(moody: str, tmp_path: Path, impatient: None) -> None:
    Moody.answers[:] = [404] * 99
    config = load_preset("demo")
    config.data.train[:] = [moody]
    with pytest.raises(UserError, match="does not exist"):
        pipeline(config, str(tmp_path), until="ingest")
    assert Moody.asked == 1


def test_an_upload_that_fails_is_tried_again_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.patiently, "wait", wait_none())
    bodies: list[str] = []

    def body(out: Draft, text: str) -> None:
        bodies.append(text)
        (out.directory / "text.txt").write_text(text)

    run = Run(f"memory://{tmp_path.name}", "run")
    failures: list[Exception] = []
    for name in ("put_file", "pipe_file", "cat_file", "info", "ls", "get_file"):
        monkeypatch.setattr(run.store.fs, name, failing_first(getattr(run.store.fs, name), failures))
    ref = Stage("uploaded", body).make(run, {"text": "a"})
    output = read_output(run.store, ref)
    assert output.is_intact()
    assert output.path("text.txt").read_text() == "a"
    assert bodies == ["a"]
    assert len(failures) == 6


def failing_first(operation: Callable[..., Any], failures: list[Exception]) -> Callable[..., Any]:
    """The operation, whose first call fails as a network does."""
    left: list[Exception] = [ConnectionResetError("gone")]

    def moody(*arguments: Any, **options: Any) -> Any:
        if left:
            failures.append(left.pop())
            raise failures[-1]
        return operation(*arguments, **options)

    return moody


@pytest.mark.parametrize(("error", "kind"), [(OSError(5, "EIO"), Unreachable), (PermissionError("no"), UserError)])
def test_a_root_in_trouble_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    monkeypatch.setattr(store.patiently, "wait", wait_none())
    found = Run(f"memory://{tmp_path.name}", "run").store
    calls: list[str] = []

    def cat_file(path: str) -> bytes:
        calls.append(path)
        raise error

    monkeypatch.setattr(found.fs, "cat_file", cat_file)
    with pytest.raises(UserError) as caught:
        found.read_bytes("manifest.json")
    assert type(caught.value) is kind
    assert len(calls) == (4 if kind is Unreachable else 1)
