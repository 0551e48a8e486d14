"""SIGINT and SIGTERM: a run ends by them, never in the midst of Prefect's code, and in the end however it hangs."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.exceptions import TerminationSignal

from flows import stop
from flows.stop import STOPPED, Terminated, stoppable, take_back
from lm.errors import UserError


@pytest.fixture(autouse=True)
def _stopped_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stop, "_LIMIT", 1e6)
    before = {number: signal.getsignal(number) for number, _ in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


SIGNALS = [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]


def in_module(name: str, body: str, **known: Any) -> Callable[[], Any]:
    """A function of a module of that name."""
    module = {"__name__": name, **known}
    exec("def function():\n" + "".join(f"    {line}\n" for line in body.splitlines()), module)
    function: Callable[[], Any] = module["function"]
    return function


def busy(seconds: float) -> None:
    """Some library's function, at work for a time."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass


@pytest.mark.parametrize(("number", "exception"), SIGNALS)
def test_our_own_code_is_interrupted_at_once(number: int, exception: type[BaseException]) -> None:
    done: list[str] = []
    body = "done.append('before')\nkill(number)\ndone.append('after')"
    ours = in_module("lm.train", body, kill=signal.raise_signal, number=number, done=done)
    with pytest.raises(KeyboardInterrupt) as raised, stoppable():
        in_module("prefect.task_engine", "ours()", ours=ours)()
    assert raised.type is exception
    assert done == ["before"]


@pytest.mark.parametrize(("number", "exception"), SIGNALS)
def test_prefects_code_is_interrupted_when_it_has_come_back_to_ours(
    number: int, exception: type[BaseException]
) -> None:
    done: list[str] = []
    body = "kill()\nbusy(0.3)\ndone.append('booked')\nours()\ndone.append('never')"
    known = {"kill": lambda: signal.raise_signal(number), "busy": busy, "done": done}
    ours = in_module("tasks.stage", "done.append('ours')\nwhile True: pass", done=done)
    with pytest.raises(KeyboardInterrupt) as raised, stoppable():
        in_module("prefect.task_engine", body, ours=ours, **known)()
    assert raised.type is exception
    assert done == ["booked", "ours"]


def test_prefects_long_wait_for_tasks_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "_PATIENCE", 0.2)
    wait = in_module("prefect.futures", "kill()\nwait(30)", kill=lambda: raise_in(0.0), wait=threading.Event().wait)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), stoppable():
        wait()
    assert time.monotonic() - started < 20


def raise_in(seconds: float) -> None:
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT)).start()


class Dying:
    """What is struck in its destructor, where exceptions come to nothing."""

    def __init__(self, die: Callable[[], Any]) -> None:
        self.die = die

    def __del__(self) -> None:
        self.die()


def test_a_stop_that_came_to_nothing_is_asked_for_again() -> None:
    ours = in_module("lm.corpus", "kill(2)", kill=signal.raise_signal)
    loop = in_module("lm.train", "while True: pass")
    with pytest.raises(KeyboardInterrupt), stoppable():
        Dying(ours)
        loop()


def test_another_failure_after_a_signal_is_its_aftermath(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "kill()\nraise ValueError('Task run is not set')"
    with pytest.raises(Terminated) as raised, stoppable():
        in_module("prefect.task_engine", body, kill=lambda: signal.raise_signal(signal.SIGTERM))()
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.usefixtures("prefect_server")
def test_sigterm_in_a_flow_of_prefect_is_ours_once_taken_back() -> None:
    def body() -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        take_back()
        handlers.append(signal.getsignal(signal.SIGTERM))

    handlers: list[Any] = []
    flow(body)()
    assert handlers[0] == handlers[1]  # Prefect's, by which a worker cancels a run
    with stoppable():
        ours = signal.getsignal(signal.SIGTERM)
        flow(body)()
        assert signal.getsignal(signal.SIGTERM) == ours
    assert handlers[2] == handlers[0]
    assert handlers[3] == ours


def test_what_comes_of_prefects_own_handler_is_a_stop_too() -> None:
    with pytest.raises(Terminated), stoppable():
        try:
            raise TerminationSignal(signal.SIGTERM)
        except TerminationSignal:
            raise ValueError("Task run is not set")  # noqa: B904


@pytest.mark.parametrize("error", [ValueError("no signal"), UserError("a mistake")])
def test_failures_without_a_signal_pass_on(error: Exception) -> None:
    with pytest.raises(type(error)), stoppable():
        raise error


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_what_handled_signals_before_does_so_again_and_nothing_is_left_open() -> None:
    before = [signal.getsignal(number) for number, _ in SIGNALS]
    files = open_files()
    with stoppable():
        assert [signal.getsignal(number) for number, _ in SIGNALS] != before
    assert [signal.getsignal(number) for number, _ in SIGNALS] == before
    for _ in range(200):
        if open_files() <= files:
            break
        time.sleep(0.05)
    assert open_files() <= files


def test_a_signal_that_is_ignored_stays_so() -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stoppable():
            signal.raise_signal(signal.SIGINT)
            busy(0.1)
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("where", ["within", "after"])
def test_a_process_that_hangs_after_a_signal_is_ended(number: int, code: int, where: str) -> None:
    script = f"""
import signal, threading
from contextlib import suppress
from flows import stop
stop._LIMIT = 0.5
def hang():
    while True:
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
with suppress(KeyboardInterrupt), stop.stoppable():
    with suppress(KeyboardInterrupt):
        signal.raise_signal({int(number)})
    if "{where}" == "within":
        hang()
hang()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (code, f"{STOPPED}\n")


def test_a_further_signal_ends_what_comes_after_the_run() -> None:
    script = """
import signal, time
from contextlib import suppress
from flows import stop
with suppress(KeyboardInterrupt), stop.stoppable():
    signal.raise_signal(signal.SIGTERM)
time.sleep(0.2)
signal.raise_signal(signal.SIGINT)
time.sleep(600)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (143, f"{STOPPED}\n")
