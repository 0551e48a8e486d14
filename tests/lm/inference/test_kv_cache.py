"""With the prefix cache, generation computes less and has the same results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.inference.config import SampleConfig
from lm.inference.engine import Engine, generate
from lm.inference.generation_request import Generation
from lm.inference.kv_cache import PAGE_TOKENS, page_bytes
from lm.inference.prefix_cache import PrefixCache
from lm.inference.runners.runner import prepare_for_inference
from lm.model.transformer import TransformerLM
from tests.helpers.examples import examples
from tests.helpers.generating import generate_without_cache, make_model

GREEDY = SampleConfig(temperature=0)
CONTEXT = 96
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6},
    "variants": {"qk_norm": True, "feed_forward": "relu2", "logit_softcap": 5.0, "tied_embeddings": True},
    "post": {"norm_placement": "post", "position_encoding": "none"},
}
_MODELS = {name: make_model(context_length=CONTEXT, **options).eval() for name, options in VARIANTS.items()}


def block_bytes(model: TransformerLM) -> int:
    return page_bytes(model.config, torch.float32, has_hidden=True)


def test_a_cache_that_is_too_small_is_refused() -> None:
    model = _MODELS["plain"]
    size = block_bytes(model)
    with pytest.raises(
        UserError, match=f"A prefix cache of 1 bytes is too small: 16 tokens of this model take {size:,}"
    ):
        Engine(model, 1, prefix_cache_bytes=1)
    with pytest.raises(UserError, match=r"A KV cache of 99 bytes is too small.*Give it more\."):
        Engine(model, 1, kv_bytes=99)


def make_engine(model: TransformerLM, rows: int = 3, blocks: int = 64) -> Engine:
    return Engine(model, rows, prefix_cache_bytes=blocks * block_bytes(model))


def run(engine: Engine, generations: list[Generation]) -> None:
    engine.add(generations)
    while engine.active:
        engine.step()


def cached(engine: Engine) -> PrefixCache:
    assert engine._prefix_cache is not None
    return engine._prefix_cache


# A prompt is pieces of a few texts, so that prompts share prefixes of all lengths. None: the text generated last.
pieces = st.tuples(st.sampled_from([0, 0, 1, 2, None]), st.integers(1, 40))
prompts = st.lists(pieces, min_size=1, max_size=3)


def build_prompt(parts: list[tuple[int | None, int]], last: list[int]) -> list[int]:
    prompt: list[int] = []
    for number, length in parts:
        source = last if number is None else [(number * 5 + i * i) % 11 for i in range(length)]
        prompt += source[:length]
    return prompt[: CONTEXT - 10] or [1]


def test_long_and_many_prompts_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _MODELS["grouped"]
    long = [(i * i) % 11 for i in range(80)]

    def make() -> list[Generation]:
        ends = [Generation([*long[:start], 5, *long[: 70 - start]], 3, GREEDY) for start in (0, 16, 33, 40, 48)]
        return [*ends, Generation([7], 3, GREEDY), Generation(long[:20], 3, GREEDY)]

    expected, ours = make(), make()
    generate(model, expected)
    monkeypatch.setattr("lm.inference.runners.torch_runner._QUERY_BLOCK", 7)
    monkeypatch.setattr("lm.inference.prefill._MAX_BATCH_TOKENS", 50)
    batches: list[int] = []
    forward = model.hidden_states

    def record(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        batches.append(ids.numel())
        return forward(ids, *rest)

    monkeypatch.setattr(model, "hidden_states", record)
    engine = make_engine(model, rows=7)
    run(engine, [Generation(long, 1, GREEDY)])
    run(engine, ours)
    assert [generation.ids for generation in ours] == [generation.ids for generation in expected]
    assert sum(generation.num_cached_tokens > 0 for generation in ours) >= 4
    assert max(batches) <= 50, "tokens of a chunk"


@pytest.mark.parametrize("variant", VARIANTS)
@examples(12)
@given(
    batches=st.lists(
        st.lists(st.tuples(prompts, st.booleans(), st.integers(0, 9)), min_size=1, max_size=3), max_size=5
    ),
    blocks=st.integers(1, 12),
)
def test_results_are_those_without_it(variant: str, batches: Any, blocks: int) -> None:
    model = _MODELS[variant]
    engine = make_engine(model, blocks=blocks)
    last: list[int] = []
    for batch in batches:
        built = [(build_prompt(parts, last), has_scores, count) for parts, has_scores, count in batch]

        def make(built: Any = built) -> list[Generation]:
            return [
                Generation(prompt, count, GREEDY, wants_logprobs=True, wants_prompt_logprobs=scored, num_alternatives=2)
                for prompt, scored, count in built
            ]

        ours, expected = make(), make()
        run(engine, ours)
        generate(model, expected)
        for generation, plain in zip(ours, expected, strict=True):
            assert generation.ids == plain.ids
            assert generation.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
            assert generation.prompt_logprobs == pytest.approx(plain.prompt_logprobs, abs=1e-5)
            assert len(generation.prompt_logprobs) == (len(plain.prompt) - 1 if plain.wants_prompt_logprobs else 0)
            assert generation.num_cached_tokens < len(plain.prompt)
            last = [*plain.prompt, *plain.ids]
        assert len(cached(engine)) <= blocks


def longest_shared_beginning(tokens: list[int], earlier: list[list[int]]) -> int:
    """Return the number of tokens in whole blocks that ``tokens``, without its last, shares with an earlier text."""
    best = 0
    for other in earlier:
        count = 0
        while tokens[: count + PAGE_TOKENS] == other[: count + PAGE_TOKENS] and count + PAGE_TOKENS < len(tokens):
            count += PAGE_TOKENS
        best = max(best, count)
    return best


@examples(20)
@given(sequence=st.lists(st.tuples(prompts, st.integers(0, 9)), max_size=8))
def test_all_that_fits_is_reused(sequence: Any) -> None:
    model = _MODELS["plain"]
    engine = make_engine(model, blocks=100)
    earlier: list[list[int]] = []
    for parts, count in sequence:
        prompt = build_prompt(parts, earlier[-1] if earlier else [])
        generation = Generation(prompt, count, GREEDY)
        before = engine.num_prefilled_tokens
        run(engine, [generation])
        assert generation.num_cached_tokens == longest_shared_beginning(prompt, earlier)
        assert engine.num_prefilled_tokens - before == len(prompt) - generation.num_cached_tokens
        earlier.append([*prompt, *generation.ids][: -1 if generation.ids else None])


def test_prompts_that_arrive_together_share_their_beginning() -> None:
    """As the choices of a question of an evaluation do, whose log-probabilities are wanted."""
    model = _MODELS["plain"]
    shared = [i % 11 for i in range(50)]
    generations = [Generation([*shared, n, n], 0, wants_prompt_logprobs=True) for n in range(4)]
    engine = make_engine(model, rows=4)
    run(engine, generations)
    assert engine.num_prefilled_tokens == 52 + 3 * (52 - 48)
    assert [generation.num_cached_tokens for generation in generations] == [0, 48, 48, 48]
    expected = [Generation([*shared, n, n], 0, wants_prompt_logprobs=True) for n in range(4)]
    generate(model, expected)
    for generation, plain in zip(generations, expected, strict=True):
        assert generation.prompt_logprobs == pytest.approx(plain.prompt_logprobs, abs=1e-5)


def test_the_least_recently_used_blocks_make_room() -> None:
    engine = make_engine(_MODELS["plain"], rows=1, blocks=4)
    texts = {name: [n, *range(10)] * 3 for n, name in enumerate("abc")}  # 33 tokens: two blocks

    def count_cached(name: str) -> int:
        generation = Generation(texts[name], 0)
        run(engine, [generation])
        return generation.num_cached_tokens

    assert [count_cached(name) for name in "abab"] == [0, 0, 32, 32]
    assert [count_cached(name) for name in "cb"] == [0, 32], "a is gone"
    assert [count_cached(name) for name in "a"] == [0]
    assert len(cached(engine)) == 4
    long = Generation([3] * 90, 0)
    run(engine, [long])  # five blocks, of which four fit
    again = Generation([3] * 90, 0)
    run(engine, [again])
    assert (again.num_cached_tokens, len(cached(engine))) == (64, 4)


def test_generated_tokens_have_no_scores_until_a_prompt_has_them() -> None:
    model = _MODELS["plain"]
    engine = make_engine(model, rows=1)
    first = Generation([1, 2, 3], 60, GREEDY)
    run(engine, [first])
    tokens = [*first.prompt, *first.ids]
    counts = []
    for wants_scores in (False, True, True):
        generation = Generation(tokens, 0, wants_prompt_logprobs=wants_scores)
        run(engine, [generation])
        counts.append(generation.num_cached_tokens)
    assert counts == [48, 0, 48]


def test_a_failed_computation_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(context_length=CONTEXT).eval()
    engine = make_engine(model)
    running = Generation([5] * 20, 60, GREEDY)
    engine.add([running])
    for _ in range(30):
        engine.step()

    def fail(*arguments: Any, **options: Any) -> None:
        raise MemoryError

    failing = Generation([6] * 40, 5)
    for action in (lambda: engine.add([failing]), engine.step):
        with monkeypatch.context() as patch:
            patch.setattr(model.layers[1], "forward", fail)  # after the first layer has written its keys
            with pytest.raises(MemoryError):
                action()
        failing.finish_reason = "stop"  # as the scheduler does
    running.finish_reason = "stop"
    text = [*running.prompt, *running.ids]
    expected = Generation([*text, 1], 5, GREEDY, wants_logprobs=True)
    again = Generation([*text, 1], 5, GREEDY, wants_logprobs=True)
    other = Generation([6] * 40, 5, GREEDY)
    run(engine, [again, other])
    generate(model, [expected])
    assert other.num_cached_tokens == 0 and again.num_cached_tokens == 48
    assert again.ids == expected.ids and again.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_sequences_beyond_the_context_are_not_stored() -> None:
    model = _MODELS["plain"]
    engine = make_engine(model, rows=1)
    long = Generation([1] * 90, 20, GREEDY)
    run(engine, [long])
    plain = Generation([1] * 90, 20, GREEDY)
    generate(model, [plain])
    assert long.ids == plain.ids
    assert len(cached(engine)) == 90 // PAGE_TOKENS


@pytest.mark.parametrize("prepare", [TransformerLM.eval, prepare_for_inference], ids=["plain", "prepared"])
def test_sequences_beyond_the_context_equal_uncached_generation(
    prepare: Callable[[TransformerLM], TransformerLM],
) -> None:
    model = make_model(context_length=40, num_heads=4, num_kv_heads=2).eval()
    text = [i * i % 11 for i in range(90)]
    expected = {length: generate_without_cache(model, text[:length], 45) for length in (20, 40, 90)}
    prepared = prepare(model)
    for num_draft_tokens in (0, 3):
        engine, sampling = make_engine(prepared), SampleConfig(temperature=0, speculative_tokens=num_draft_tokens)
        for num_cached in (0, 16):
            generations = [Generation(text[:length], 45, sampling, wants_logprobs=True) for length in expected]
            run(engine, generations)
            for generation, (ids, logprobs) in zip(generations, expected.values(), strict=True):
                assert generation.ids == ids
                assert generation.logprobs == pytest.approx(logprobs[-45:], abs=1e-5)
            assert min(generation.num_cached_tokens for generation in generations) >= num_cached
            assert any(generation.num_accepted_tokens for generation in generations) == bool(num_draft_tokens)


def test_the_prepared_model_has_the_same_results() -> None:
    model = prepare_for_inference(make_model(context_length=CONTEXT, num_heads=4, num_kv_heads=2))
    engine = Engine(model, 2, prefix_cache_bytes=1 << 20)
    text = [i * i % 11 for i in range(40)]
    for length, count in ((40, 0), (60, 32)):
        ours, plain = (Generation([*text, *text][:length], 9, GREEDY, wants_logprobs=True) for _ in range(2))
        run(engine, [ours])
        generate(model, [plain])
        assert ours.ids == plain.ids and ours.num_cached_tokens == count
        assert ours.logprobs == pytest.approx(plain.logprobs, abs=1e-5)


def test_blocks_whose_copy_failed_are_not_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(context_length=CONTEXT).eval()
    engine = make_engine(model)

    class FullMemory:
        def __setitem__(self, place: Any, value: Any) -> None:
            raise torch.OutOfMemoryError

    first, again, expected = (Generation([5] * 40, count, GREEDY) for count in (4, 9, 9))
    scored = Generation([5] * 40, 9, GREEDY, wants_prompt_logprobs=True)
    with monkeypatch.context() as patch:
        patch.setattr(engine._cache, "hidden", FullMemory())
        run(engine, [first])
    assert "failed to store a sequence" in caplog.text
    run(engine, [scored])
    run(engine, [again])
    generate(model, [expected])
    assert (scored.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    assert scored.ids == again.ids == expected.ids and first.ids == expected.ids[:4]
