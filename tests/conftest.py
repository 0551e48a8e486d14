"""Fixtures of several test files, and the options of the whole test run."""

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from xml.etree import ElementTree

import certifi
import fsspec
import pytest
from hypothesis import settings

from tests.helpers.figures import save_tiny_image
from tests.helpers.kernel_cache import cache_with_kernels
from tests.helpers.limits import TIMEOUT_SCALE

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

    from lm.tokenizer.tokenizer import Tokenizer
    from lm.train.trainer import Trainer
    from tests.helpers.deployed import Deployed

# Prefect reads these when it is imported. The tests of ``lm`` never import it.
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
for _service in (
    "EVENT_PERSISTER",
    "TRIGGERS",
    "SCHEDULER",
    "LATE_RUNS",
    "FOREMAN",
    "REPOSSESSOR",
    "PAUSE_EXPIRATIONS",
):
    os.environ.setdefault(f"PREFECT_SERVER_SERVICES_{_service}_ENABLED", "false")  # a third of the server's work
# Triton reads this when it is imported, which torch.compile does too. Its interpreter needs no GPU.
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidiactl").exists() else "1")
os.environ.setdefault("TORCH_WARM_POOL", "0")  # no process that waits for Triton kernels to compile

# Torch reads this when it is imported. One thread in each process of pytest-xdist: more threads than cores wait for one
# another. A training or a test that needs more asks for them.
_IS_XDIST_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if _IS_XDIST_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else waiting threads take the cores from other tests

settings.register_profile("developer", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=100, deadline=None)
settings.load_profile("developer")

_SERVER_FIXTURES = {"prefect_deployed", "over_postgres"}
_FILES_OF_ONE_SERVER = {
    f"tests/end_to_end/test_{name}.py" for name in ("cancelled_runs", "deployments", "events", "ui")
}
_TESTS_OF_FIGURES = {f"test_{name}.py" for name in ("plot", "pages", "sweep_page", "profile", "compare_tokenizers")}
if not _IS_XDIST_WORKER:  # pytest-xdist's workers inherit the variables
    _cache = Path(tempfile.mkdtemp(prefix="textmill-tests-"))
    os.environ["XDG_CACHE_HOME"] = cache_with_kernels(_cache)
    # Each of Prefect's clients reads all certificates, also for a server at http://: one takes less time than 120.
    _certificate, _end, _ = Path(certifi.where()).read_text(encoding="utf-8").partition("-----END CERTIFICATE-----\n")
    (_cache / "certificate.pem").write_text(_certificate + _end, encoding="utf-8")
    os.environ.setdefault("PREFECT_API_SSL_CERT_FILE", str(_cache / "certificate.pem"))


def pytest_unconfigure() -> None:
    """Remove the cache of this test run, but not the kernels."""
    if not _IS_XDIST_WORKER:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--not-passed-in", metavar="XML", help="leave out the tests that passed in a run's --junitxml")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the files whose tests use ``prefect_deployed`` to one process, so that one server starts and not three."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            path: str = super()._split_scope(nodeid)
            return "prefect_deployed" if path in _FILES_OF_ONE_SERVER else path

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests whose fixtures start a Prefect server and a worker. Leave out those of ``--not-passed-in``."""
    for item in items:
        if _SERVER_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.server)
    if path := config.getoption("--not-passed-in"):
        cases = ElementTree.parse(path).iter("testcase")  # a test that did not pass has an element with the reason
        passed = {(case.get("classname"), case.get("name")) for case in cases if not len(case)}
        left_out = [item for item in items if (_junit_class(item), item.name) in passed]
        items[:] = [item for item in items if (_junit_class(item), item.name) not in passed]
        config.hook.pytest_deselected(items=left_out)


def _junit_class(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0].removesuffix(".py").replace("/", ".")


@pytest.fixture(autouse=True, scope="session")
def _guard_processes() -> None:
    """Kill the servers, workers and browsers of the tests when this process ends, however it ends."""
    from tests.helpers.processes import start_process_guard

    start_process_guard()


@pytest.fixture(autouse=True)
def _torch_has_one_thread() -> None:
    """Take back the threads that a training in this process gave to torch, if other processes run tests too."""
    if _IS_XDIST_WORKER and (torch := sys.modules.get("torch")):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _draw_no_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a tiny image for each figure that matplotlib would take a quarter of a second to draw."""
    if figure := sys.modules.get("matplotlib.figure") if request.path.name not in _TESTS_OF_FIGURES else None:
        monkeypatch.setattr(figure.Figure, "savefig", save_tiny_image)


@pytest.fixture(autouse=True)
def _propagate_logs() -> None:
    """Undo what a command does to the project's loggers and Prefect to the root logger, at which pytest captures."""
    logging.getLogger().setLevel(logging.WARNING)
    for name in ("lm", "tasks", "flows", "textmill"):
        logging.getLogger(name).propagate = True
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text and GPT-2's vocabulary beside the checkout. A test that needs it skips without it."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not (folder / "gpt2_vocab.json").exists():
        pytest.skip("the text and vocabulary of ../shared/data are not here")
    return folder


@pytest.fixture(scope="session")
def gpt2(shared_data: Path) -> "Tokenizer":
    """GPT-2's tokenizer."""
    from lm.text.pretokenize import END_OF_TEXT
    from lm.tokenizer.tokenizer import Tokenizer

    return Tokenizer.from_files(shared_data / "gpt2_vocab.json", shared_data / "gpt2_merges.txt", [END_OF_TEXT])


@pytest.fixture(scope="session")
def tokenizer() -> "Tokenizer":
    """A small tokenizer with GPT-2's pattern and overlapping special tokens."""
    from tests.helpers.tokenizers import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="session")
def custom_tokenizer() -> "Tokenizer":
    """A small tokenizer with another pattern."""
    from tests.helpers.tokenizers import CUSTOM_PATTERN, make_tokenizer

    return make_tokenizer(CUSTOM_PATTERN)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server with its own database, one a session."""
    from prefect.events.worker import EventsWorker
    from prefect.testing.utilities import prefect_test_harness

    from tests.helpers.prefect_database import place_database

    home = tempfile.mkdtemp()  # the harness deletes it
    place_database(Path(home, "prefect-test.db"))
    with (
        # At its end the harness waits for events, and has waited without end: a worker's thread had ended before.
        patch.object(EventsWorker, "drain_all", partial(EventsWorker.drain_all, timeout=60.0)),
        patch("prefect.testing.utilities.mkdtemp", return_value=home),
        prefect_test_harness(server_startup_timeout=int(240 * TIMEOUT_SCALE)),
    ):
        yield


@pytest.fixture(scope="session")
def prefect_deployed(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Deployed]":
    """A Prefect server, the deployments and a worker, in their own Prefect home, one a session."""
    from tests.helpers.deployed import deployed

    services = {f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "true" for name in ("TRIGGERS", "EVENT_PERSISTER")}
    with deployed(tmp_path_factory.mktemp("up"), **services) as stack:
        yield stack


@pytest.fixture(scope="session")
def deployed_run(prefect_deployed: "Deployed", tmp_path_factory: pytest.TempPathFactory) -> "FlowRun":
    """A finished run of all stages by the command of Prefect, read only."""
    from tests.helpers.deployed import TINY

    done = prefect_deployed.run("full", root=str(tmp_path_factory.mktemp("deployed") / "root"), config=TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    return prefect_deployed.latest()


@pytest.fixture(scope="session")
def _s3_url() -> Iterator[str]:
    """The address of a local S3 server, one a session."""
    server_module = pytest.importorskip("moto.server", reason="moto, which plays S3, is not installed")
    from botocore.loaders import JSONFileLoader  # each new file system would parse the same megabytes of JSON

    load = cache(partial(JSONFileLoader.load_file, JSONFileLoader()))
    JSONFileLoader.load_file = lambda _, path: load(path)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, _s3_url: str) -> Iterator[Any]:
    """An s3fs file system with a bucket ``corpus``, on a local S3 server."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", _s3_url)
    s3fs.S3FileSystem.clear_instance_cache()
    fs = fsspec.filesystem("s3")
    fs.mkdir("corpus")
    yield fs
    fs.rm("corpus", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> "Trainer":
    """A finished training of 20 steps, read only."""
    from tests.helpers.training import small_trainer

    trainer = small_trainer(tmp_path_factory.mktemp("finished"))
    trainer.run()
    return trainer


@pytest.fixture
def process_group_of_one(tmp_path: Path) -> Iterator[None]:
    """Join a process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
