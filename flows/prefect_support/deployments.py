"""Run a deployment to its end; and ``textmill up``, which starts Prefect's server, the deployments and a worker.

Prefect is imported inside the functions: every command looks for a ``textmill up``, and most need no Prefect.
"""

import logging
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from flows.prefect_support.server import (
    end_watcher,
    explain_home_error,
    find_prefect_home,
    is_server_configured,
    start_watcher,
)
from lm.common.errors import UserError
from lm.common.processes import import_environment

log = logging.getLogger(__name__)

LOCAL_POOL = "local"
"""The work pool that the worker of ``textmill up`` serves."""

_POLL_SECONDS = 0.3
_RUN_POLL_SECONDS = 2.0
_PATIENCE_SECONDS = 300.0  # with a server that fails


def check_deployment(name: str) -> None:
    """Raise UserError if Prefect's server has no deployment ``flow/name``."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(name)
        except ObjectNotFound:
            raise UserError(
                f"execution.train_deployment names {name}, but there is no such deployment; see prefect deployment ls."
            ) from None


def run_deployment_to_end(name: str, parameters: dict[str, Any]) -> None:
    """Run a deployment ``flow/name`` with these parameters. The run is cancelled if this one is stopped.

    Call it in a Prefect flow. Prefect's own wait ends with the first failure of its server, and leaves the run.

    Raises UserError if there is no such deployment, or if the run does not complete.
    """
    from prefect.client.orchestration import get_client
    from prefect.deployments import run_deployment
    from prefect.states import Cancelling

    check_deployment(name)
    run: Any = run_deployment(name, parameters=parameters, timeout=0)
    log.info("Run %s of %s trains; it starts when a worker of its work pool is free.", run.name, name)
    with get_client(sync_client=True) as client:
        client.set_task_run_name(run.parent_task_run_id, name)  # it stands for the run in the graph of this one
        try:
            while not (state := _read_state(client, run.id)) or not state.is_final():
                time.sleep(_RUN_POLL_SECONDS)
        except BaseException:
            client.set_flow_run_state(run.id, Cancelling())
            raise
    if not state.is_completed():
        raise UserError(f"Run {run.name} of {name} ended in the state {state.name}: {state.message}")


def _read_state(client: Any, run_id: Any) -> Any:
    """Return the state of a run. A failure of the server, which may pass, does not end a training of hours."""
    import httpx

    retrying = Retrying(
        retry=retry_if_exception_type(httpx.HTTPError),
        stop=stop_after_delay(_PATIENCE_SECONDS),
        wait=wait_fixed(_RUN_POLL_SECONDS),
        before=lambda call: log.info("Prefect's server fails; the run goes on.") if call.attempt_number == 2 else None,
        reraise=True,
    )
    return retrying(client.read_flow_run, run_id).state


def start_local_stack(port: int, create_deployments: Callable[[str], None]) -> None:
    """Start the parts that do not run yet, print how to use them, and wait for Ctrl-C. Then stop the started parts.

    ``create_deployments`` creates the deployments and their work pools on the server with an API at this URL.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process of a shell ignores it by default
    url = f"http://127.0.0.1:{port}"
    environment = {
        "PREFECT_WORKER_QUERY_SECONDS": "2",  # how often the worker looks for new runs
        **os.environ,
        **import_environment(),
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "NOTSET",  # the other commands of textmill set CRITICAL
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    }
    with ExitStack() as stack:
        url_file = stack.enter_context(_hold_lock())
        processes = []
        has_server = is_server_healthy(url)
        if not has_server:
            command = ["server", "start", "--host", "127.0.0.1", "--port", str(port)]
            processes.append(stack.enter_context(_background_process(command, environment)))
            deadline = time.monotonic() + 180
            while not is_server_healthy(url):
                if processes[0].poll() is not None or time.monotonic() > deadline:
                    raise UserError(f"Prefect's server did not start at {url}; see its output above. Is the port free?")
                time.sleep(_POLL_SECONDS)
        url_file.write_text(url, encoding="utf-8")  # runs use the server from now on
        create_deployments(f"{url}/api")
        worker = ["worker", "start", "--pool", LOCAL_POOL]
        processes.append(stack.enter_context(_background_process(worker, environment)))
        stack.callback(url_file.unlink, missing_ok=True)  # before the processes are stopped
        stopped = "the worker. The server ran before and goes on" if has_server else "everything here"
        print(
            f"The UI is at {url}. In another terminal:\n"
            f"  export PREFECT_API_URL={url}/api\n"
            "  prefect deployment run 'pipeline/full' --watch\n"
            "  textmill deploy --name nightly --cron '0 3 * * *' --data.train PATH\n"
            f"Ctrl-C stops {stopped}.",
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
def _hold_lock() -> Iterator[Path]:
    """Hold the lock of ``textmill up``. Yield the file for the URL. Raise UserError if another one holds the lock."""
    lock, url_file = _lock_files()
    try:
        url_file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=1)  # find_local_stack holds the lock for an instant
    except Timeout:
        place = f" at {url_file.read_text(encoding='utf-8')}" if url_file.exists() else ""
        raise UserError(
            f"Another textmill up runs{place}. Stop it first, or set PREFECT_HOME to another directory: two servers "
            "must not write the same database."
        ) from None
    except OSError as error:
        raise explain_home_error(url_file.parent, error) from None
    try:
        yield url_file
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


def find_server_api() -> str:
    """Return the URL of the API of the server that Prefect's settings name, or else of a running ``textmill up``.

    Raises UserError if there is neither.
    """
    if is_server_configured():
        from prefect.settings import get_current_settings

        return str(get_current_settings().api.url)
    if url := find_local_stack():
        return f"{url}/api"
    raise UserError(
        "No Prefect server runs here. Start one in another terminal with textmill up, or set PREFECT_API_URL."
    )


def _prefect_command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "prefect", "--no-prompt", *arguments]


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
            process.wait(45)  # a worker gives its runs 30 s
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
        end_watcher(watcher)


def is_server_healthy(url: str) -> bool:
    """Return whether a Prefect server answers at ``url``."""
    try:
        with urllib.request.urlopen(f"{url}/api/health", timeout=5) as response:  # nosec B310 # always http://127.0.0.1
            return bool(response.read(100).strip() == b"true")  # the server of another program may answer with much
    except (OSError, HTTPException):  # HTTPException: the port belongs to a service that is no web server
        return False
