"""SIGINT, SIGTERM and SIGHUP: they stop a run, never inside Prefect's code, and end a process that hangs."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from prefect import flow
from prefect.exceptions import TerminationSignal

from flows.prefect_support import signals
from flows.prefect_support.signals import (
    STOPPED_MESSAGE,
    GracefulShutdown,
    Terminated,
    find_interrupt,
    handle_termination,
    reinstall_sigterm_handler,
    signal_number,
)
from lm.common.errors import UserError
from lm.train.graceful_stop import stop_on_signals
from tests.helpers.limits import TIMEOUT_SCALE, wait_for

Error = TypeVar("Error", bound=BaseException)
SIGNALS = [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated), (signal.SIGHUP, Terminated)]


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Handle SIGINT, which a shell's background jobs ignore, and SIGHUP, which nohup ignores; restore both later."""
    before = {number: signal.getsignal(number) for number, _ in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def graceful_shutdown() -> GracefulShutdown:
    """Return a GracefulShutdown that never ends pytest."""
    return GracefulShutdown(exit_seconds=1e6)


def function_of_module(module_name: str, body: str, **variables: Any) -> Callable[[], Any]:
    """Return a function whose module has the given name."""
    module = {"__name__": module_name, **variables}
    exec("def function():\n" + "".join(f"    {line}\n" for line in body.splitlines()), module)
    function: Callable[[], Any] = module["function"]
    return function


def spin(seconds: float) -> None:
    """Keep the CPU busy, as library code does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass


@pytest.mark.parametrize(("number", "exception"), SIGNALS)
def test_project_code_is_interrupted_at_once(number: int, exception: type[BaseException]) -> None:
    steps: list[str] = []
    body = "steps.append('before')\nkill(number)\nsteps.append('after')"
    project_code = function_of_module("lm.train", body, kill=signal.raise_signal, number=number, steps=steps)
    with pytest.raises(KeyboardInterrupt) as raised, graceful_shutdown():
        function_of_module("prefect.task_engine", "project_code()", project_code=project_code)()
    assert raised.type is exception
    assert signal_number(raised.value) == number
    assert steps == ["before"]


@pytest.mark.parametrize(("number", "exception"), SIGNALS)
def test_prefects_code_is_interrupted_after_it_returned_to_project_code(
    number: int, exception: type[BaseException]
) -> None:
    steps: list[str] = []
    body = "kill()\nspin(0.3)\nsteps.append('prefect')\nproject_code()\nsteps.append('never')"
    variables = {"kill": lambda: signal.raise_signal(number), "spin": spin, "steps": steps}
    project_code = function_of_module("tasks.runtime.stage", "steps.append('project')\nwhile True: pass", steps=steps)
    with pytest.raises(KeyboardInterrupt) as raised, graceful_shutdown():
        function_of_module("prefect.task_engine", body, project_code=project_code, **variables)()
    assert raised.type is exception
    assert steps == ["prefect", "project"]


def test_a_long_wait_in_prefect_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_LIBRARY_GRACE_SECONDS", 0.2)
    seconds = 600.0
    wait = function_of_module(
        "prefect.futures", f"kill()\nwait({seconds})", kill=send_sigint_from_thread, wait=threading.Event().wait
    )
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), graceful_shutdown():
        wait()
    assert time.monotonic() - started < seconds


def send_sigint_from_thread() -> None:
    main = threading.main_thread().ident
    assert main is not None
    threading.Thread(target=signal.pthread_kill, args=(main, signal.SIGINT)).start()


class CallsOnDelete:
    """Calls a function in its destructor, where Python ignores exceptions."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __del__(self) -> None:
        self.function()


def test_an_exception_that_a_destructor_lost_is_raised_again() -> None:
    project_code = function_of_module("lm.text.sources", "kill(2)", kill=signal.raise_signal)
    loop = function_of_module("lm.train", "while True: pass")
    with pytest.raises(KeyboardInterrupt), graceful_shutdown():
        CallsOnDelete(project_code)
        loop()


def test_an_error_after_a_signal_counts_as_stopped() -> None:
    body = "kill()\nraise ValueError('Task run is not set')"
    with pytest.raises(Terminated) as raised, graceful_shutdown():
        function_of_module("prefect.task_engine", body, kill=lambda: signal.raise_signal(signal.SIGTERM))()
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_the_sigterm_handler_is_reinstalled_in_a_flow() -> None:
    def body() -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        reinstall_sigterm_handler()
        handlers.append(signal.getsignal(signal.SIGTERM))

    handlers: list[Any] = []
    flow(body)()
    assert handlers[0] == handlers[1], (
        "without GracefulShutdown, Prefect's handler stays: a worker cancels runs with it"
    )
    with graceful_shutdown():
        own_handler = signal.getsignal(signal.SIGTERM)
        flow(body)()
        assert signal.getsignal(signal.SIGTERM) == own_handler
    assert handlers[2] == handlers[0]
    assert handlers[3] == own_handler


def test_an_error_caused_by_prefects_sigterm_handler_counts_as_stopped() -> None:
    with pytest.raises(Terminated), graceful_shutdown():
        try:
            raise TerminationSignal(signal.SIGTERM)
        except TerminationSignal:
            raise ValueError("Task run is not set")  # noqa: B904


def caused_by(error: Error, cause: BaseException) -> Error:
    error.__cause__ = cause
    return error


def raised_after(error: Error, context: BaseException) -> Error:
    """Return an error as ``raise … from None`` makes it while ``context`` is handled."""
    error.__context__, error.__suppress_context__ = context, True
    return error


WRAPPERS: dict[str, Callable[[BaseException], BaseException]] = {
    "itself": lambda interrupt: interrupt,
    "cause": lambda interrupt: caused_by(ValueError("a"), caused_by(OSError("b"), interrupt)),
    "context": lambda interrupt: raised_after(UserError("a"), interrupt),
    "context beside a cause": lambda interrupt: raised_after(caused_by(ValueError("a"), OSError("b")), interrupt),
    "group": lambda interrupt: BaseExceptionGroup("a", [ValueError("b"), BaseExceptionGroup("c", [interrupt])]),
    "cause in a group": lambda interrupt: ExceptionGroup("a", [OSError("b"), raised_after(ValueError("c"), interrupt)]),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("interrupt", "number"),
    [
        (KeyboardInterrupt(), signal.SIGINT),
        (Terminated(), signal.SIGTERM),
        (Terminated(signal.SIGHUP), signal.SIGHUP),
        (TerminationSignal(15), signal.SIGTERM),
    ],
)
def test_a_wrapped_interrupt_is_found(interrupt: BaseException, number: int, wrapper: str) -> None:
    error = WRAPPERS[wrapper](interrupt)
    assert find_interrupt(error) is interrupt
    assert signal_number(interrupt) == number
    with pytest.raises(KeyboardInterrupt) as raised, graceful_shutdown():
        raise error
    assert raised.type is (KeyboardInterrupt if number == signal.SIGINT else Terminated)
    assert signal_number(raised.value) == number


def test_causes_in_a_cycle_without_an_interrupt() -> None:
    first, second = ValueError("a"), OSError("b")
    group = ExceptionGroup("c", [caused_by(first, second)])
    caused_by(second, group)
    assert find_interrupt(group) is None
    assert find_interrupt(None) is None
    second.__context__ = interrupt = KeyboardInterrupt()
    assert find_interrupt(group) is interrupt


@pytest.mark.parametrize("error", [ValueError("no signal"), UserError("a mistake")])
def test_an_error_without_a_signal_propagates(error: Exception) -> None:
    with pytest.raises(type(error)), graceful_shutdown():
        raise error


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_earlier_handlers_are_restored_and_files_are_closed() -> None:
    before = [signal.getsignal(number) for number, _ in SIGNALS]
    files = open_files()
    with graceful_shutdown():
        assert [signal.getsignal(number) for number, _ in SIGNALS] != before
    assert [signal.getsignal(number) for number, _ in SIGNALS] == before
    wait_for(lambda: open_files() <= files, 30, "closed pipe")


@pytest.mark.parametrize("number", [number for number, _ in SIGNALS])
def test_an_ignored_signal_stays_ignored(number: int) -> None:
    """As SIGINT in a background process of a script, and SIGHUP with nohup."""
    signal.signal(number, signal.SIG_IGN)
    handle_termination()
    stop_event = threading.Event()
    with graceful_shutdown(), stop_on_signals(stop_event) as received:
        signal.raise_signal(number)
        spin(0.1)
    assert not received and not stop_event.is_set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_outside_of_a_run_raises(number: int) -> None:
    handle_termination()
    with pytest.raises(Terminated) as raised:
        signal.raise_signal(number)
    assert signal_number(raised.value) == number


@pytest.mark.parametrize("number", [number for number, _ in SIGNALS])
def test_a_training_saves_and_then_raises(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog does not send the signal again while the training handles it, and does not end the process."""
    stop_event, exits = threading.Event(), list[float]()
    # The watchdog ends the process after the block, which is here that of all tests.
    monkeypatch.setattr(
        GracefulShutdown, "_exit", lambda _: exits.append(time.monotonic())
    )  # it ends the process later
    with pytest.raises(KeyboardInterrupt) as raised, GracefulShutdown(exit_seconds=0.1):
        with stop_on_signals(stop_event) as received:
            signal.raise_signal(number)
            time.sleep(0.3)
        assert received == [number] and stop_event.is_set() and not exits
        function_of_module("tasks.runtime.training_process", "kill(number)", kill=signal.raise_signal, number=number)()
    assert signal_number(raised.value) == number
    time.sleep(0.5)  # the watchdog of this test ends before the next one
    assert exits


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240 * TIMEOUT_SCALE, check=False
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("where", ["within", "after"])
def test_a_process_that_hangs_after_a_signal_is_ended(number: int, code: int, where: str) -> None:
    script = f"""
import signal, threading
from contextlib import suppress
from flows.prefect_support import signals
def hang():
    while True:
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
with suppress(KeyboardInterrupt), signals.GracefulShutdown(exit_seconds=0.5):
    with suppress(KeyboardInterrupt):
        signal.raise_signal({int(number)})
    if "{where}" == "within":
        hang()
hang()
"""
    done = run_script(script)
    assert (done.returncode, done.stderr) == (code, f"{STOPPED_MESSAGE}\n")


@pytest.mark.parametrize("stderr", ["closed terminal", "closed pipe", "closed"])
def test_a_process_that_hangs_is_ended_if_nobody_reads_its_messages(stderr: str) -> None:
    script = f"""
import os, signal, threading
from flows.prefect_support import signals
if "{stderr}" == "closed terminal":
    reader, writer = os.openpty()
else:
    reader, writer = os.pipe()
os.dup2(writer, 2)
os.close(reader)
if "{stderr}" == "closed":
    os.close(2)
with signals.GracefulShutdown(exit_seconds=0.5):
    try:
        signal.raise_signal(signal.SIGHUP)
    finally:
        threading.Event().wait(60)
"""
    assert run_script(script).returncode == 129


_KERNELS = {
    "numba": """
from numba import njit
@njit("int64(int64)", nogil=True)
def loop(count):
    total = 0
    for i in range(count):
        total ^= i * total + 1
    return total
call = lambda: loop(1 << 62)
""",
    "OpenSSL": """
import hashlib
call = lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("kernel", _KERNELS)
def test_a_signal_ends_a_process_whose_main_thread_is_inside_a_kernel(kernel: str, number: int) -> None:
    """Python calls no signal handler before such a call returns."""
    script = f"""
import os, signal, threading
from flows.prefect_support import signals
signal.signal(signal.SIGINT, signal.default_int_handler)
{_KERNELS[kernel]}
with signals.GracefulShutdown(exit_seconds=0.5):
    threading.Timer(0.3, os.kill, (os.getpid(), {int(number)})).start()
    call()
"""
    started = time.monotonic()
    done = run_script(script)
    assert (done.returncode, done.stderr) == (128 + number, f"{STOPPED_MESSAGE}\n")
    assert time.monotonic() - started < 30 * TIMEOUT_SCALE


def test_a_second_signal_after_the_run_ends_the_process() -> None:
    script = """
import signal, time
from contextlib import suppress
from flows.prefect_support import signals
with suppress(KeyboardInterrupt), signals.GracefulShutdown():
    signal.raise_signal(signal.SIGTERM)
signal.raise_signal(signal.SIGINT)
time.sleep(600)
"""
    done = run_script(script)
    assert (done.returncode, done.stderr) == (143, f"{STOPPED_MESSAGE}\n")
