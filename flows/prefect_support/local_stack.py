"""``textmill up``: start Prefect's server, a work pool, the deployments and a worker on this machine."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock, Timeout

from flows.prefect_support.settings_errors import find_prefect_home
from flows.prefect_support.temporary_server import end_watcher, start_watcher
from lm.common.errors import UserError
from lm.common.processes import import_environment

WORK_POOL = "local"
_WORK_POOLS = (WORK_POOL, "gpu")  # of the deployments in prefect.yaml; the worker here is of the first
_START_SECONDS = 180
_STOP_SECONDS = 45  # a worker gives its runs 30 s
_POLL_SECONDS = 0.3
_LOCK_SECONDS = 1  # find_local_stack holds the lock for an instant
_STOPS_ALL = "Ctrl-C stops everything here."
_MAX_HEALTH_BYTES = 100  # a server of Prefect answers with true


def start_local_stack(port: int) -> None:
    """Start the parts that do not run yet, print how to use them, and wait for Ctrl-C. Then stop the started parts."""
    if not Path("prefect.yaml").exists():
        raise UserError("There is no prefect.yaml here; run textmill up in a checkout of the project.")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process of a shell ignores it by default
    url = f"http://127.0.0.1:{port}"
    environment = {
        "PREFECT_WORKER_QUERY_SECONDS": "2",  # how often the worker looks for new runs
        **os.environ,
        **import_environment(),
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "NOTSET",  # the other commands of textmill set CRITICAL
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PWD": str(Path.cwd()),  # the working directory of runs in prefect.yaml
    }
    with ExitStack() as stack:
        stack.enter_context(_hold_lock())
        processes = []
        has_server = is_server_healthy(url)
        if not has_server:
            command = ["server", "start", "--host", "127.0.0.1", "--port", str(port)]
            processes.append(stack.enter_context(_background_process(command, environment)))
            _wait_for_server(url, processes[0])
        url_file = _lock_files()[1]
        url_file.write_text(url, encoding="utf-8")  # runs use the server from now on
        create_work_pools(url)
        _run_prefect(["deploy", "--all"], environment)
        worker = ["worker", "start", "--pool", WORK_POOL]
        processes.append(stack.enter_context(_background_process(worker, environment)))
        stack.callback(url_file.unlink, missing_ok=True)  # before the processes are stopped
        ending = "Ctrl-C stops the worker. The server ran before and goes on." if has_server else _STOPS_ALL
        print(
            f"The UI is at {url}. In another terminal:\n"
            f"  export PREFECT_API_URL={url}/api\n"
            "  prefect deployment run 'pipeline/full' --watch\n"
            f"{ending}",
            flush=True,
        )
        while all(process.poll() is None for process in processes):
            time.sleep(_POLL_SECONDS)
        raise UserError("A Prefect process has ended; see its output above.")


def _lock_files() -> tuple[FileLock, Path]:
    """Return the lock that ``textmill up`` holds in Prefect's directory, and the file with the URL of its server."""
    home = find_prefect_home()
    return FileLock(home / "textmill-up.lock"), home / "textmill-up.url"


@contextmanager
def _hold_lock() -> Iterator[None]:
    """Hold the lock of ``textmill up``. Raise UserError if another one holds it."""
    lock, url_file = _lock_files()
    try:
        url_file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_LOCK_SECONDS)
    except Timeout:
        place = f" at {url_file.read_text(encoding='utf-8')}" if url_file.exists() else ""
        raise UserError(
            f"Another textmill up runs{place}. Stop it first, or set PREFECT_HOME to another directory: two servers "
            "must not write the same database."
        ) from None
    except OSError as error:
        raise UserError(
            f"Prefect's directory {url_file.parent} cannot be written: {error.strerror}. Set PREFECT_HOME to another "
            "directory."
        ) from None
    try:
        yield
    finally:
        lock.release()


def find_local_stack() -> str:
    """Return the URL of the server of a ``textmill up`` with the same Prefect directory; empty if none runs."""
    lock, url_file = _lock_files()
    with suppress(OSError):  # the directory is not writable, or that textmill up just ended
        url = url_file.read_text(encoding="utf-8")
        try:
            lock.acquire(timeout=0).lock.release()  # that textmill up was killed
        except Timeout:
            return url if is_server_healthy(url) else ""
    return ""


def _prefect_command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "prefect", "--no-prompt", *arguments]


def _run_prefect(arguments: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(_prefect_command(arguments), env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"prefect {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def create_work_pools(url: str) -> None:
    """Create the work pools of the deployments that the server at ``url`` does not have."""
    from httpx import HTTPError
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    try:
        with temporary_settings({PREFECT_API_URL: f"{url}/api"}), get_client(sync_client=True) as client:
            for name in _WORK_POOLS:
                with suppress(ObjectAlreadyExists):
                    client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
    except HTTPError as error:
        raise UserError(f"Prefect's server at {url} cannot make its work pools: {error}") from error


@contextmanager
def _background_process(arguments: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    # A new session: Ctrl-C reaches only this process, which then stops the others in the right order.
    process = subprocess.Popen(_prefect_command(arguments), env=environment, start_new_session=True)
    watcher = start_watcher(process.pid)
    try:
        yield process
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal sends it twice: the shell, then the kernel
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
        end_watcher(watcher)


def is_server_healthy(url: str) -> bool:
    """Return whether a Prefect server answers at ``url``."""
    try:
        with urllib.request.urlopen(f"{url}/api/health", timeout=5) as response:  # nosec B310 # always http://127.0.0.1
            return bool(response.read(_MAX_HEALTH_BYTES).strip() == b"true")
    except (OSError, HTTPException):  # HTTPException: the port belongs to a service that is no web server
        return False


def _wait_for_server(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not is_server_healthy(url):
        if server.poll() is not None or time.monotonic() > deadline:
            raise UserError(f"Prefect's server did not start at {url}; see its output above. Is the port free?")
        time.sleep(_POLL_SECONDS)
