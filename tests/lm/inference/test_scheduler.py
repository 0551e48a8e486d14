"""The scheduler: queueing, cancellation and failures with many clients."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.inference.config import SampleConfig
from lm.inference.engine import generate, stream
from lm.inference.generation_request import Generation
from lm.inference.scheduler import QueueFull, Scheduler
from lm.model.transformer import TransformerLM
from tests.helpers.generating import make_model

GREEDY = SampleConfig(temperature=0)


@dataclass
class FinishRecorder:
    """An ``on_finish`` callback that records the error of each finished generation."""

    errors: dict[Generation, Exception | None] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, generation: Generation, error: Exception | None) -> None:
        with self.changed:
            self.errors[generation] = error
            self.changed.notify_all()

    def wait(self, *generations: Generation) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: all(generation in self.errors for generation in generations), 20)


@pytest.fixture
def model() -> TransformerLM:
    return make_model(11, 64).eval()


@pytest.fixture
def scheduler(model: TransformerLM) -> Iterator[Scheduler]:
    scheduler = Scheduler(model, max_batch_size=2, max_waiting=3)
    yield scheduler
    scheduler.close()


def make_generation(
    prompt: list[int], tokens: int = 9, on_token: Callable[[int], bool] = lambda token_id: False
) -> Generation:
    return Generation(prompt, tokens, GREEDY, on_token=on_token)


class Gate:
    """An ``on_token`` callback that blocks the engine at the first token until ``opened`` is set."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, token_id: int) -> bool:
        self.reached.set()
        assert self.opened.wait(20)
        return False


def test_concurrent_generations_equal_single_ones(model: TransformerLM, scheduler: Scheduler) -> None:
    generations = [make_generation([1 + number % 5, number % 3], 5 + number) for number in range(5)]
    finished = FinishRecorder()
    threads = [threading.Thread(target=scheduler.submit, args=([generation], finished)) for generation in generations]
    for thread in threads:
        thread.start()
    finished.wait(*generations)
    for generation in generations:
        alone = make_generation(list(generation.prompt), generation.max_new_tokens)
        generate(model, [alone])
        assert (generation.ids, generation.finish_reason) == (alone.ids, "length")
    assert set(finished.errors.values()) == {None}
    assert len(scheduler) == 0


def test_full_queue_refuses_all_of_a_request(scheduler: Scheduler) -> None:
    gate, finished = Gate(), FinishRecorder()
    first = make_generation([1], on_token=gate)
    scheduler.submit([first], finished)
    assert gate.reached.wait(20)
    others = [make_generation([2]) for _ in range(4)]
    with pytest.raises(QueueFull, match="1 of 5 places are taken"):
        scheduler.submit([*others, make_generation([3])], finished)
    scheduler.submit(others, finished)
    with pytest.raises(QueueFull):
        scheduler.submit([make_generation([3])], finished)
    gate.opened.set()
    finished.wait(first, *others)
    scheduler.submit([last := make_generation([3])], finished)
    finished.wait(last)


def test_requests_take_turns_in_free_rows(scheduler: Scheduler) -> None:
    gate, finished, started = Gate(), FinishRecorder(), list[str]()

    def record(name: str) -> Callable[[int], bool]:
        def on_token(token_id: int) -> bool:
            started.append(name)
            return False

        return on_token

    scheduler.submit([first := make_generation([1], on_token=gate)], finished)
    assert gate.reached.wait(20)
    large = [make_generation([2], 1, record(f"large {number}")) for number in range(3)]
    scheduler.submit(large, finished)
    scheduler.submit([small := make_generation([3], 1, record("small"))], finished)
    assert scheduler.waiting_count == 4
    gate.opened.set()
    finished.wait(first, *large, small)
    assert started == ["large 0", "small", "large 1", "large 2"]
    assert scheduler.waiting_count == 0


def test_cancelled_generations_free_their_rows(scheduler: Scheduler) -> None:
    gate, finished = Gate(), FinishRecorder()
    active = [make_generation([1], 10**9, gate), make_generation([2], 10**9)]
    waiting = [make_generation([3]), make_generation([4])]
    scheduler.submit([*active, *waiting], finished)
    assert gate.reached.wait(20)
    for generation in (active[0], waiting[0]):
        scheduler.cancel(generation)
    gate.opened.set()
    finished.wait(active[0], *waiting)
    assert waiting[0].ids == [] and len(waiting[1].ids) == 9
    assert active[1] not in finished.errors
    scheduler.cancel(active[1])
    finished.wait(active[1])
    assert len(scheduler) == 0


def test_a_cancelled_generation_leaves_the_queue_while_all_rows_are_taken(scheduler: Scheduler) -> None:
    finished = FinishRecorder()
    active = [make_generation([1], 10**9), make_generation([2], 10**9)]
    waiting = [make_generation([3]), make_generation([4])]
    scheduler.submit(active, finished)
    scheduler.submit(waiting, finished)
    scheduler.cancel(waiting[0])
    finished.wait(waiting[0])
    assert [[*request] for request in scheduler._waiting] == [[waiting[1]]]
    scheduler.cancel(waiting[1])
    finished.wait(waiting[1])
    assert not scheduler._waiting and not {*active} & {*finished.errors}
    for generation in active:
        scheduler.cancel(generation)
    finished.wait(*active)


def test_a_failing_callback_for_tokens_ends_its_generation_only(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(token_id: int) -> bool:
        raise MemoryError("no room")

    finished = FinishRecorder()
    failing, beside, waiting = make_generation([1], on_token=fail), make_generation([2]), make_generation([3])
    scheduler.submit([failing, beside, waiting], finished)
    finished.wait(failing, beside, waiting)
    assert isinstance(finished.errors[failing], MemoryError) and "MemoryError: no room" in caplog.text
    for generation in (beside, waiting):
        assert finished.errors[generation] is None and len(generation.ids) == 9


def run_with_failures(
    model: TransformerLM, monkeypatch: pytest.MonkeyPatch, name: str, fails: Callable[..., bool]
) -> tuple[list[Generation], FinishRecorder]:
    """Run a short, a long and a short prompt at once, while ``name`` of the engine runs out of memory if ``fails``."""
    prompts = [[1], list(range(10)), [2, 3]]
    generations = [Generation(prompt, 9, SampleConfig(temperature=1), seed=7) for prompt in prompts]
    for generation in generations:
        generation.wants_logprobs = generation.wants_prompt_logprobs = True
    scheduler = Scheduler(model, max_batch_size=3, max_waiting=3)
    engine = scheduler._engine
    owner = {"decode": engine._runner, "extend": engine._runner, "_score": engine._prefill}.get(name, engine)
    compute = getattr(owner, name)

    def fail(*arguments: Any) -> Any:
        result = compute(*arguments)
        if fails(*arguments):
            raise MemoryError("no room")
        return result

    monkeypatch.setattr(owner, name, fail)
    finished = FinishRecorder()
    scheduler.submit(generations, finished)
    finished.wait(*generations)
    scheduler.close()
    return generations, finished


def assert_same_as_alone(model: TransformerLM, generation: Generation) -> None:
    alone = Generation(generation.prompt, 9, generation.sampling, seed=7)
    alone.wants_logprobs = alone.wants_prompt_logprobs = True
    generate(model, [alone])
    assert generation.ids == alone.ids
    assert generation.prompt_logprobs == pytest.approx(alone.prompt_logprobs, abs=1e-5)
    assert generation.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "fails"),
    [
        ("extend", lambda rows, suffixes, starts: any(len(suffix) > 9 for suffix in suffixes)),
        ("_score", lambda job, hidden: len(job.tokens) > 9),
        ("decode", lambda inputs, last: inputs.shape[1] == 3),
        ("_sample", lambda logits, generations: False),
    ],
    ids=["prefill", "scores of a prompt", "decoding", "none"],
)
def test_one_generation_without_memory_ends_alone(
    model: TransformerLM, monkeypatch: pytest.MonkeyPatch, name: str, fails: Callable[..., bool]
) -> None:
    generations, finished = run_with_failures(model, monkeypatch, name, fails)
    errors = [finished.errors[generation] for generation in generations]
    assert errors[0] is errors[2] is None
    assert isinstance(errors[1], MemoryError) == (name != "_sample")
    for generation in (generations[0], generations[2]):
        assert_same_as_alone(model, generation)


def test_a_refill_without_memory_is_repeated_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences outgrow the context in one step; the first refill fails."""
    model, failures = make_model(11, 12).eval(), iter([True])
    generations, finished = run_with_failures(
        model,
        monkeypatch,
        "extend",
        lambda rows, suffixes, starts: {len(suffix) for suffix in suffixes} == {6} and next(failures, False),
    )
    assert sum(error is not None for error in finished.errors.values()) == 1
    for generation in generations:
        if not generation.error:
            assert_same_as_alone(model, generation)


def test_a_failure_of_every_step_ends_each_generation(model: TransformerLM, monkeypatch: pytest.MonkeyPatch) -> None:
    _, finished = run_with_failures(model, monkeypatch, "decode", lambda inputs, last: True)
    assert all(isinstance(error, MemoryError) for error in finished.errors.values())


def test_generate_raises_the_error_of_a_generation(model: TransformerLM) -> None:
    def fail(token_id: int) -> bool:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        generate(model, [make_generation([1]), make_generation([2], on_token=fail)])
    with pytest.raises(MemoryError, match="no room"):
        list(stream(model, make_generation([2], on_token=fail)))


def test_generation_that_finished_before_a_failure_has_no_error(scheduler: Scheduler) -> None:
    def fail(token_id: int) -> bool:
        if len(failing.ids) < 2:
            return False
        raise MemoryError("no room")

    finished = FinishRecorder()
    failing, short = make_generation([1], on_token=fail), Generation([1], 1, GREEDY)
    scheduler.submit([short, failing], finished)
    finished.wait(failing, short)
    assert isinstance(finished.errors[failing], MemoryError)
    assert finished.errors[short] is None and len(short.ids) == 1 and short.finish_reason == "length"


def test_failing_callback_does_not_affect_others(scheduler: Scheduler) -> None:
    def fail(generation: Generation, error: Exception | None) -> None:
        raise RuntimeError("gone")

    finished = FinishRecorder()
    scheduler.submit([make_generation([1])], fail)
    scheduler.submit([generation := make_generation([2])], finished)
    finished.wait(generation)


def test_bad_prompt_is_refused_by_submit(scheduler: Scheduler) -> None:
    for bad in ([], [11], [-1]):
        with pytest.raises(UserError):
            scheduler.submit([make_generation([1]), make_generation(bad)], FinishRecorder())
    assert len(scheduler) == 0


def test_each_distinct_prompt_is_checked_once(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Sequence[int]] = []
    monkeypatch.setattr(scheduler._engine, "check_prompt", lambda generation: checked.append(generation.prompt))
    prompts, finished = ([1, 2], [3]), FinishRecorder()
    gate = Gate()
    generations = [make_generation(prompt, on_token=gate) for prompt in prompts for _ in range(2)]
    scheduler.submit(generations, finished)
    assert checked[:2] == [*prompts] and len(checked) <= 4
    gate.opened.set()
    finished.wait(*generations)


def test_close_ends_unfinished_generations(model: TransformerLM) -> None:
    scheduler, finished = Scheduler(model, 1, 1), FinishRecorder()
    generations = [make_generation([1], 10**9), make_generation([2])]
    scheduler.submit(generations, finished)
    scheduler.close()
    assert all(isinstance(finished.errors[generation], RuntimeError) for generation in generations)
    with pytest.raises(RuntimeError, match="closed"):
        scheduler.submit([make_generation([1])], finished)
