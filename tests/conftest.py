"""Fixtures that several test files share."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from lm.pretokens import END_OF_TEXT
from lm.tokenizer import Tokenizer
from tests.tokenizers_made import CUSTOM_PATTERN, make_tokenizer

if TYPE_CHECKING:
    from lm.trainer import Trainer
    from tests.deployed import Deployed

# Read when Prefect is imported, which the tests of ``lm`` alone never do.
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")


@pytest.fixture(autouse=True)
def _logs_are_heard() -> None:
    """The commands keep the project's lines from the root logger, where pytest listens; each test starts anew."""
    for name in ("lm", "tasks", "flows"):
        logging.getLogger(name).propagate = True
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture(autouse=True, scope="session")
def _cache_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tests leave the user's cache alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text and GPT-2's vocabulary beside the checkout; tests that need it skip without it."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not (folder / "gpt2_vocab.json").exists():
        pytest.skip("the text and vocabulary of ../shared/data are not here")
    return folder


@pytest.fixture(scope="session")
def gpt2(shared_data: Path) -> Tokenizer:
    """GPT-2's tokenizer."""
    return Tokenizer.from_files(shared_data / "gpt2_vocab.json", shared_data / "gpt2_merges.txt", [END_OF_TEXT])


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A small tokenizer of GPT-2's pattern, with overlapping special tokens."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def custom_tokenizer() -> Tokenizer:
    """One of another pattern."""
    return make_tokenizer(CUSTOM_PATTERN)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server and database of the tests' own."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture(scope="session")
def prefect_deployed(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Deployed]":
    """A server, the deployments and a worker, with a Prefect home of their own."""
    from tests.deployed import deployed

    with deployed(tmp_path_factory.mktemp("up")) as found:
        yield found


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An s3fs file system with a bucket named ``corpus``, on a local server."""
    server_module = pytest.importorskip("moto.server", reason="moto, which plays S3, is not installed")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    s3fs.S3FileSystem.clear_instance_cache()
    fs = fsspec.filesystem("s3")
    fs.mkdir("corpus")
    yield fs
    fs.rm("corpus", recursive=True)  # the server's memory outlives it
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> "Trainer":
    """A run of 20 steps that nothing interrupted; tests only read it."""
    from tests.training import make

    trainer = make(tmp_path_factory.mktemp("finished"))
    trainer.run()
    return trainer
