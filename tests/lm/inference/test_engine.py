"""Batched generation equals generation of each prompt alone without a cache, and ends where it should."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.inference.config import SampleConfig
from lm.inference.engine import Engine, generate, stream
from lm.inference.generation_request import Generation
from lm.inference.sampler import LogitEdits
from lm.model.transformer import TransformerLM
from tests.helpers.examples import examples
from tests.helpers.generating import fixed_model, generate_without_cache, make_model

GREEDY = SampleConfig(temperature=0)
UNTRUNCATED = SampleConfig(temperature=1, top_p=1)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_heads": 4, "num_kv_heads": 2},
    "one key": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 6},
    "variants": {"qk_norm": True, "feed_forward": "relu2", "logit_softcap": 5.0, "tied_embeddings": True},
    "post": {"norm_placement": "post", "position_encoding": "none"},
}


def generate_ids(
    model: TransformerLM, prompt: list[int], count: int, sampling: SampleConfig = UNTRUNCATED, **more: Any
) -> list[int]:
    generation = Generation(prompt, count, sampling, **more)
    generate(model, [generation])
    return generation.ids


def assert_equals_uncached(
    model: TransformerLM, prompts: list[tuple[list[int], int]], rows: int, sampling: SampleConfig
) -> None:
    """Generate for prompts with their numbers of new tokens, ``rows`` at once; compare ids and log-probabilities."""
    generations = [
        Generation(prompt, count, sampling, wants_logprobs=True, wants_prompt_logprobs=True)
        for prompt, count in prompts
    ]
    generate(model, generations, rows)
    for generation in generations:
        expected, logprobs = generate_without_cache(model, list(generation.prompt), generation.max_new_tokens)
        assert generation.ids == expected
        assert [*generation.prompt_logprobs, *generation.logprobs] == pytest.approx(logprobs, abs=1e-5)
        assert generation.finish_reason == "length"


def test_any_integer_is_a_seed() -> None:
    model = make_model()
    assert generate_ids(model, [1], 3, seed=10**30) == generate_ids(model, [1], 3, seed=10**30 % (1 << 63))


@pytest.mark.parametrize("variant", VARIANTS)
@examples(12)
@given(
    prompts=st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=9), min_size=1, max_size=6),
    rows=st.integers(1, 6),
)
def test_ragged_batch_equals_uncached_generation(variant: str, prompts: list[list[int]], rows: int) -> None:
    model = make_model(context_length=24, **VARIANTS[variant])
    assert_equals_uncached(model, [(prompt, 3 + 2 * n) for n, prompt in enumerate(prompts)], rows, GREEDY)


@pytest.mark.parametrize("prompt", [[3], [1, 2, 3, 4], [5, 4, 3, 2, 1, 0, 7, 8]], ids=["short", "full", "longer"])
@pytest.mark.parametrize("sampling", [GREEDY, SampleConfig(temperature=1, top_p=0)], ids=["temperature", "top-p"])
def test_sequence_beyond_the_context_continues_from_its_last_tokens(prompt: list[int], sampling: SampleConfig) -> None:
    model = make_model()
    companion = Generation([1], 25, UNTRUNCATED)
    generation = Generation(prompt, 20, sampling)
    generate(model, [companion, generation])
    assert generation.ids == generate_without_cache(model, prompt, 20)[0]
    assert companion.ids == generate_ids(model, [1], 25)


@pytest.mark.parametrize("context_length", [1, 2, 5, 8])
@examples(8)
@given(
    prompts=st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=12), min_size=1, max_size=5),
    rows=st.integers(1, 5),
    drafts=st.integers(0, 3),
)
def test_batches_beyond_the_context_equal_uncached_generation(
    context_length: int, prompts: list[list[int]], rows: int, drafts: int
) -> None:
    model = make_model(context_length=context_length)
    sampling = SampleConfig(temperature=0, speculative_tokens=drafts)
    assert_equals_uncached(model, [(prompt, 13 + 4 * n) for n, prompt in enumerate(prompts)], rows, sampling)


def test_half_a_context_is_computed_again_when_it_is_full() -> None:
    engine, generation = Engine(make_model(context_length=16), 1), Generation([1, 2], 60, GREEDY)
    engine.add([generation])
    while engine.active:
        engine.step()
    # The 17th token and each ninth after it begin a window: tokens 17, 26, 35, 44, 53.
    assert engine.num_prefilled_tokens == 2 + 5 * 8
    assert generation.window_start == 53 - 8


def test_a_sequence_beyond_the_context_beside_others_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(make_model().bfloat16(), 2)
    decode = engine._runner.decode
    # The CPU runner returns logits in float32.
    monkeypatch.setattr(engine._runner, "decode", lambda inputs, last: decode(inputs, last).float())
    generations = [Generation([1, 2, 3], 6, GREEDY), Generation([2], 3, GREEDY)]
    engine.add(generations)
    while engine.active:
        engine.step()
    assert [len(generation.ids) for generation in generations] == [6, 3]


def test_ids_depend_on_the_seed_and_not_on_the_batch() -> None:
    model = make_model(context_length=40)
    first = generate_ids(model, [1, 2], 30, seed=5)
    torch.manual_seed(99)  # the global generator is not used
    assert generate_ids(model, [1, 2], 30, seed=5) == first
    assert generate_ids(model, [1, 2], 30, seed=6) != first
    others = [Generation([n], 7 * n, SampleConfig(0.3 * n), seed=n) for n in range(1, 5)]
    again = Generation([1, 2], 30, UNTRUNCATED, seed=5)
    generate(model, [*others, again], max_batch_size=3)
    assert again.ids == first


def test_equal_prompts_are_computed_once() -> None:
    model = make_model(context_length=40)
    seen: list[torch.Size] = []
    model.token_embeddings.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    generations = [Generation(prompt, 5, UNTRUNCATED, seed=seed) for seed in range(3) for prompt in ([1, 2, 3], [4, 5])]
    generate(model, generations)
    assert seen[0] == (2, 3)
    assert [generation.ids for generation in generations] == [
        generate_ids(model, list(generation.prompt), 5, seed=generation.seed) for generation in generations
    ]


def test_sequences_join_and_leave_the_batch_between_steps() -> None:
    model = make_model(context_length=40)
    engine = Engine(model, 2)
    first, second, third = (Generation([n], 12, UNTRUNCATED, seed=n) for n in range(3))
    engine.add([first, second])
    for _ in range(4):
        engine.step()
    first.finish_reason = "stop"  # cancelled
    engine.step()
    assert engine.active == [second] and len(first.ids) == 5
    engine.add([third])
    with pytest.raises(ValueError, match="more than 2"):
        engine.add([Generation([1], 1)])
    while engine.active:
        engine.step()
    for generation in (second, third):
        assert generation.ids == generate_ids(model, list(generation.prompt), 12, seed=generation.seed)
    engine.step()  # no active generation


def test_stop_id_ends_the_generation_and_is_excluded() -> None:
    model = make_model()
    whole = generate_ids(model, [1], 40, seed=3)
    for stops in [{stop} for stop in set(whole)] + [{whole[10], whole[20]}]:
        generation = Generation([1], 40, UNTRUNCATED, frozenset(stops), seed=3)
        generate(model, [generation])
        assert generation.ids == whole[: min(map(whole.index, stops))]
        assert generation.finish_reason == "stop"
    absent = frozenset(set(range(11)) - set(whole))
    assert generate_ids(model, [1], 40, stop_ids=absent, seed=3) == whole


def test_on_token_ends_the_generation() -> None:
    received_ids: list[int] = []

    def on_token(token_id: int) -> bool:
        received_ids.append(token_id)
        return len(received_ids) == 4

    generation = Generation([1], 40, UNTRUNCATED, on_token=on_token)
    generate(make_model(), [generation])
    assert generation.ids == received_ids and len(received_ids) == 4 and generation.finish_reason == "stop"


def test_stop_id_in_the_prompt_is_ignored() -> None:
    assert generate_ids(fixed_model([0.0, 9.0]), [0, 0], 3, GREEDY, stop_ids=frozenset({0})) == [1, 1, 1]


def test_repetition_penalty_applies_to_prompt_and_new_ids() -> None:
    model = fixed_model([3.0, 2.9, 2.8, 2.7], context_length=8)
    penalized = SampleConfig(temperature=0, repetition_penalty=2.0)
    generations = [Generation([1], 4, GREEDY), Generation([1], 3, penalized), Generation([0, 3], 2, penalized)]
    generate(model, generations)
    assert [generation.ids for generation in generations] == [[0, 0, 0, 0], [0, 2, 3], [1, 2]]
    rows = [Generation([1], 1, GREEDY), Generation([1], 3, penalized), Generation([0, 3], 2, penalized)]
    generate(model, rows, max_batch_size=2)  # the last one reuses the row of the first
    assert [generation.ids for generation in rows] == [[0], [0, 2, 3], [1, 2]]


def test_only_rows_that_want_them_have_scores_and_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(context_length=40)
    plain = Generation([1, 2], 12, UNTRUNCATED, seed=3)
    others = [
        Generation([3], 5, GREEDY, wants_logprobs=True, num_alternatives=2),
        Generation([1], 7, GREEDY, edits=LogitEdits(logit_bias={4: 100.0})),
        Generation([5, 6], 9, GREEDY, wants_logprobs=True, wants_prompt_logprobs=True, num_alternatives=20),
    ]
    generate(model, [others[0], plain, *others[1:]], 3)
    assert plain.ids == generate_ids(model, [1, 2], 12, seed=3)
    assert (plain.logprobs, plain.alternatives, plain.prompt_logprobs) == ([], [], [])
    assert others[1].ids == [4] * 7
    assert [len(ranked) for ranked in others[0].alternatives] == [2] * 5
    assert [len(ranked) for ranked in others[2].alternatives] == [11] * 9, "the whole vocabulary"
    assert [len(ranked) for ranked in others[2].prompt_alternatives] == [11]
    for generation in (others[0], others[2]):
        assert [ranked[0] for ranked in generation.alternatives] == [
            *zip(generation.ids, generation.logprobs, strict=True)
        ], "greedy"

    def fail(*arguments: Any) -> None:
        raise AssertionError("no row asked for it")

    for name in ("score_tokens", "LogitEditor.edit"):
        monkeypatch.setattr(f"lm.inference.engine.{name}", fail)
    assert generate_ids(model, [1, 2], 12, seed=3) == plain.ids


def test_prompt_logprobs_without_new_tokens() -> None:
    model = make_model()
    assert generate_ids(model, [1], 0) == []
    scored = Generation([1, 2, 3], 0, wants_prompt_logprobs=True)
    generate(model, [scored])
    assert scored.ids == [] and scored.finish_reason == "length"
    assert scored.prompt_logprobs == pytest.approx(generate_without_cache(model, [1, 2, 3], 0)[1], abs=1e-5)


def test_empty_list_of_generations() -> None:
    generate(make_model(), [])


def test_stream_is_lazy_and_computes_no_gradients() -> None:
    model = make_model()
    ids = stream(model, Generation([1], 10**12, UNTRUNCATED))
    assert [next(ids), next(ids)] == generate_ids(model, [1], 2)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), (
        "inference mode must not leak to the caller"
    )
    assert all(parameter.grad is None for parameter in model.parameters())
    assert list(stream(model, Generation([1], 7, UNTRUNCATED))) == generate_ids(model, [1], 7)


@pytest.mark.parametrize(("prompt", "message"), [([], "empty"), ([3, 11], "11"), ([-1], "-1"), ([2**40], "outside")])
def test_bad_prompt_is_refused_before_anything_is_computed(prompt: list[int], message: str) -> None:
    good = Generation([1], 3)
    with pytest.raises(UserError, match=message):
        generate(make_model(), [good, Generation(prompt, 3)], 1)
    assert good.ids == []
