"""Many clients of one model: who waits, who leaves, and what a failure does."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from lm.errors import UserError
from lm.generate import Generation, generate
from lm.model import TransformerLM
from lm.sampling import SampleConfig
from lm.scheduler import Busy, Scheduler
from tests.generating import make_model

GREEDY = SampleConfig(temperature=0)


@dataclass
class Ends:
    """The ends that a scheduler has told of."""

    errors: dict[Generation, Exception | None] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, generation: Generation, error: Exception | None) -> None:
        with self.changed:
            self.errors[generation] = error
            self.changed.notify_all()

    def wait(self, *generations: Generation) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: all(one in self.errors for one in generations), 20)


@pytest.fixture
def model() -> TransformerLM:
    return make_model(11, 64).eval()


@pytest.fixture
def scheduler(model: TransformerLM) -> Iterator[Scheduler]:
    made = Scheduler(model, max_batch_size=2, max_waiting=3)
    yield made
    made.close()


def wish(prompt: list[int], tokens: int = 9, on_token: Callable[[int], bool] = lambda token_id: False) -> Generation:
    return Generation(prompt, tokens, GREEDY, on_token=on_token)


class Gate:
    """An ``on_token`` that holds the engine after the first token until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, token_id: int) -> bool:
        self.reached.set()
        assert self.opened.wait(20)
        return False


def test_all_get_what_they_get_alone(model: TransformerLM, scheduler: Scheduler) -> None:
    wishes = [wish([1 + number % 5, number % 3], 5 + number) for number in range(5)]
    ends = Ends()
    threads = [threading.Thread(target=scheduler.submit, args=([one], ends)) for one in wishes]
    for thread in threads:
        thread.start()
    ends.wait(*wishes)
    for one in wishes:
        alone = wish(list(one.prompt), one.max_new_tokens)
        generate(model, [alone])
        assert (one.ids, one.ended) == (alone.ids, "length")
    assert set(ends.errors.values()) == {None}
    assert len(scheduler) == 0


def test_too_many_are_refused_together(scheduler: Scheduler) -> None:
    gate, ends = Gate(), Ends()
    first = wish([1], on_token=gate)
    scheduler.submit([first], ends)
    assert gate.reached.wait(20)
    others = [wish([2]) for _ in range(4)]
    with pytest.raises(Busy, match=r"1 completions .* of at most 5"):
        scheduler.submit([*others, wish([3])], ends)
    scheduler.submit(others, ends)
    with pytest.raises(Busy):
        scheduler.submit([wish([3])], ends)
    gate.opened.set()
    ends.wait(first, *others)
    scheduler.submit([last := wish([3])], ends)
    ends.wait(last)


def test_the_cancelled_make_room(scheduler: Scheduler) -> None:
    gate, ends = Gate(), Ends()
    live, waiting = [wish([1], 10**9, gate), wish([2], 10**9)], [wish([3]), wish([4])]
    scheduler.submit([*live, *waiting], ends)
    assert gate.reached.wait(20)
    for one in (live[0], waiting[0]):
        scheduler.cancel(one)
    gate.opened.set()
    ends.wait(live[0], *waiting)
    assert waiting[0].ids == [] and len(waiting[1].ids) == 9
    assert live[1] not in ends.errors
    scheduler.cancel(live[1])
    ends.wait(live[1])
    assert len(scheduler) == 0


def test_a_failure_reaches_those_it_is_of_and_the_next_go_on(scheduler: Scheduler) -> None:
    def fail(token_id: int) -> bool:
        raise MemoryError("no room")

    ends = Ends()
    failing, beside, waiting = wish([1], on_token=fail), wish([2]), wish([3])
    scheduler.submit([failing, beside, waiting], ends)
    ends.wait(failing, beside, waiting)
    assert isinstance(ends.errors[failing], MemoryError) and isinstance(ends.errors[beside], MemoryError)
    assert ends.errors[waiting] is None and len(waiting.ids) == 9


def test_what_ended_before_a_failure_is_whole(scheduler: Scheduler) -> None:
    def fail(token_id: int) -> bool:
        if len(failing.ids) < 2:
            return False
        raise MemoryError("no room")

    ends = Ends()
    failing, short = wish([1], on_token=fail), Generation([1], 1, GREEDY)
    scheduler.submit([short, failing], ends)
    ends.wait(failing, short)
    assert isinstance(ends.errors[failing], MemoryError)
    assert ends.errors[short] is None and len(short.ids) == 1 and short.ended == "length"


def test_a_client_that_cannot_be_told_harms_nobody(scheduler: Scheduler) -> None:
    def fail(generation: Generation, error: Exception | None) -> None:
        raise RuntimeError("gone")

    ends = Ends()
    scheduler.submit([wish([1])], fail)
    scheduler.submit([one := wish([2])], ends)
    ends.wait(one)


def test_bad_prompts_are_told_at_once(scheduler: Scheduler) -> None:
    for bad in ([], [11], [-1]):
        with pytest.raises(UserError):
            scheduler.submit([wish([1]), wish(bad)], Ends())
    assert len(scheduler) == 0


def test_closing_ends_what_is_under_way(model: TransformerLM) -> None:
    scheduler, ends = Scheduler(model, 1, 1), Ends()
    wishes = [wish([1], 10**9), wish([2])]
    scheduler.submit(wishes, ends)
    scheduler.close()
    assert all(isinstance(ends.errors[one], RuntimeError) for one in wishes)
    with pytest.raises(RuntimeError, match="closed"):
        scheduler.submit([wish([1])], ends)
