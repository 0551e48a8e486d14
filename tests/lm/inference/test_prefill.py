"""Prompts in chunks, within a limit of memory: the results are those without a cache, and no page is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.inference.chunk_size import MAX_TOKENS, MIN_TOKENS, ChunkSize
from lm.inference.config import SampleConfig
from lm.inference.generation_request import Generation
from lm.inference.scheduler import Scheduler
from tests.helpers.examples import examples
from tests.helpers.generating import make_model
from tests.helpers.generation_cases import Case, check_cases, make_engine
from tests.lm.inference.test_scheduler import FinishRecorder, Gate

GREEDY = SampleConfig(temperature=0)
CONTEXT = 80
MODEL = make_model(context_length=CONTEXT, num_heads=4, num_kv_heads=2).double().eval()


cases = st.builds(
    Case,
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=3),
    st.integers(0, 12),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([False, False, False, True]),
)


@examples(12)
@given(
    cases=st.lists(cases, min_size=1, max_size=7),
    num_pages=st.integers(5, 20),
    chunk=st.sampled_from([1, 16, 32, 50, 200]),
    has_prefix_cache=st.booleans(),
)
def test_chunks_within_little_memory_equal_generation_without_a_cache(
    cases: list[Case], num_pages: int, chunk: int, has_prefix_cache: bool
) -> None:
    check_cases(MODEL, cases, num_pages, chunk, has_prefix_cache)


def test_a_generation_is_admitted_when_pages_are_free_for_all_its_tokens() -> None:
    engine = make_engine(MODEL, num_pages=5)
    first, second, third = (
        Generation([1] * 30, 19, GREEDY),
        Generation([2] * 20, 13, GREEDY),
        Generation([3], 1, GREEDY),
    )
    assert engine.admit(first), "48 tokens: three pages"
    assert engine.admit(second), "32 tokens: two pages"
    assert not engine.admit(third)
    while engine.active:
        engine.step()
    assert (len(first.ids), len(second.ids)) == (19, 13)
    assert engine.admit(third)


def test_stored_pages_make_room_and_those_of_the_prompt_stay() -> None:
    engine = make_engine(MODEL, num_pages=5, has_prefix_cache=True)
    text = [i % 11 for i in range(40)]
    for prompt in (text, [7] * 32):
        engine.add([Generation(prompt, 1, GREEDY)])
    assert (engine._cache.num_free, engine._cache.num_idle) == (1, 4)
    again = Generation(text, 41, GREEDY)  # 80 tokens: all pages
    engine.add([again])
    assert again.num_cached_tokens == 32


def test_the_limit_of_memory_is_one_of_a_sequence() -> None:
    assert make_engine(MODEL, num_pages=3).max_seq_len == 48
    assert make_engine(MODEL, num_pages=99).max_seq_len == CONTEXT
    assert make_engine(MODEL, num_pages=99, rows=2)._cache.num_pages == 10, "no more than all rows need"


def test_between_two_steps_of_a_stream_a_chunk_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a prompt beside it is."""
    scheduler, finished, gate = Scheduler(make_model(context_length=400), 2, 2), FinishRecorder(), Gate()
    monkeypatch.setattr(scheduler._chunk_size, "record_chunk", lambda *_: None)  # it stays
    computed: list[int] = []

    def on_token(token_id: int) -> bool:
        computed.append(scheduler.num_prefilled_tokens)
        return gate(token_id)

    stream = Generation([1], 20, GREEDY, on_token=on_token)
    scheduler.submit([stream], finished)
    assert gate.reached.wait(20)
    long = Generation([2] * 271, 1, GREEDY)
    scheduler.submit([long], finished)
    gate.opened.set()
    finished.wait(stream, long)
    scheduler.close()
    gaps = [after - before for before, after in zip(computed, computed[1:], strict=False)]
    assert sum(gaps) == 271 and max(gaps) == MIN_TOKENS


def test_the_chunk_size_follows_the_time_of_a_step() -> None:
    chunks = ChunkSize()
    chunks.record_chunk(MIN_TOKENS, 1.0)
    assert chunks.num_tokens == MIN_TOKENS, "no step was measured"
    chunks.record_step(0.1)
    sizes = []
    for _ in range(8):
        chunks.record_chunk(chunks.num_tokens, chunks.num_tokens * 0.001)  # 200 tokens in two steps
        sizes.append(chunks.num_tokens)
    assert sizes == [128, 200, 200, 200, 200, 200, 200, 200]
    chunks.record_chunk(3, 9.0)
    assert chunks.num_tokens == 200, "a short one does not count"
    chunks.record_chunk(200, 0.4)
    assert chunks.num_tokens == 100
    chunks.record_chunk(100, 2.0)
    assert chunks.num_tokens == MIN_TOKENS
    for _ in range(9):
        chunks.record_chunk(chunks.num_tokens, 0.0)
    assert chunks.num_tokens == MAX_TOKENS
