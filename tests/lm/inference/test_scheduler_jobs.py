"""Other computations with the model take turns with the scheduler's batch."""

import threading
from collections.abc import Generator, Iterator

import pytest

from lm.inference.config import SampleConfig
from lm.inference.engine import generate
from lm.inference.generation_request import Generation
from lm.inference.scheduler import QueueFull, Scheduler, SchedulerClosed
from tests.helpers.generating import make_model

MODEL = make_model(11, 64).eval()
LIMIT_SECONDS = 60


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler(MODEL, max_batch_size=2, max_waiting=1)
    yield scheduler
    scheduler.close()


def job(
    events: list[str], name: str, num_steps: int, gate: threading.Event | None = None
) -> Generator[None, None, str]:
    """Record each step; the first one waits for the gate."""
    for _ in range(num_steps):
        if gate:
            gate.wait(LIMIT_SECONDS)
        events.append(name)
        yield
    return name.upper()


def test_jobs_and_decoding_steps_take_turns(scheduler: Scheduler) -> None:
    events, gate = list[str](), threading.Event()
    futures = [scheduler.submit_job(job(events, "a", 6, gate)), scheduler.submit_job(job(events, "b", 4, gate))]

    def on_token(token_id: int) -> bool:
        events.append("token")
        return False

    generation = Generation([1], 8, SampleConfig(temperature=0), on_token=on_token)
    scheduler.submit([generation], lambda *_: None)
    gate.set()
    assert [future.result(LIMIT_SECONDS) for future in futures] == ["A", "B"]
    while not generation.finish_reason:
        pass
    jobs = [event for event in events if event != "token"]
    assert "".join(jobs) == "ababababaa"
    text = "".join("." if event == "token" else "j" for event in events)
    assert "jj" not in text.lstrip("j").rstrip("j"), "the generation waits for one step of a job at a time"
    assert ".j." in text, "a job does not wait for the end of the generation"
    alone = Generation([1], 8, SampleConfig(temperature=0))
    generate(MODEL, [alone])
    assert generation.ids == alone.ids


def test_a_failing_job_fails_alone(scheduler: Scheduler) -> None:
    def failing() -> Generator[None, None, str]:
        yield
        raise ValueError("broken")

    bad, good = scheduler.submit_job(failing()), scheduler.submit_job(job([], "a", 3))
    with pytest.raises(ValueError, match="broken"):
        bad.result(LIMIT_SECONDS)
    assert good.result(LIMIT_SECONDS) == "A"


def test_a_cancelled_job_ends(scheduler: Scheduler) -> None:
    events, gate = list[str](), threading.Event()
    future = scheduler.submit_job(job(events, "a", 10**9, gate))
    other = scheduler.submit_job(job(events, "b", 3))
    assert future.cancel()
    gate.set()
    assert other.result(LIMIT_SECONDS) == "B"
    assert events.count("a") <= 1


def test_too_many_jobs_are_refused_and_closing_ends_them() -> None:
    scheduler, gate = Scheduler(MODEL, max_batch_size=2, max_waiting=1), threading.Event()
    futures = [scheduler.submit_job(job([], "a", 10**9, gate)) for _ in range(3)]
    with pytest.raises(QueueFull, match="3 jobs"):
        scheduler.submit_job(job([], "a", 1))
    gate.set()
    scheduler.close()
    for future in futures:
        with pytest.raises(SchedulerClosed):
            future.result(LIMIT_SECONDS)
    with pytest.raises(SchedulerClosed):
        scheduler.submit_job(job([], "a", 1))
