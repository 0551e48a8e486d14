"""Batches of ids: as each prompt alone, as without the cache, and where they end."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.errors import UserError
from lm.generate import Engine, Generation, generate, stream
from lm.model import TransformerLM
from lm.sampling import SampleConfig
from tests.generating import fixed_model, make_model

GREEDY = SampleConfig(temperature=0)
EVEN = SampleConfig(temperature=1, top_p=1)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_heads": 4, "num_kv_heads": 2},
    "one key": {"num_heads": 4, "num_kv_heads": 1},
    "variants": {"qk_norm": True, "feed_forward": "relu2", "logit_softcap": 5.0, "tied_embeddings": True},
    "post": {"norm": "post", "positions": "none"},
}


def ids_of(
    model: TransformerLM, prompt: list[int], count: int, sampling: SampleConfig = EVEN, **more: Any
) -> list[int]:
    generation = Generation(prompt, count, sampling, **more)
    generate(model, [generation])
    return generation.ids


def naive(model: TransformerLM, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """The likeliest ids, each after a pass over all that came before, and the log-probabilities of prompt and ids."""
    ids, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids[-model.config.context_length :]]))[0, -1].argmax()))
        for end in range(1, len(ids)):
            before = torch.tensor([ids[max(0, end - model.config.context_length) : end]])
            logprobs.append(float(model(before)[0, -1].log_softmax(-1)[ids[end]]))
    return ids[len(prompt) :], logprobs


def test_any_whole_number_is_a_seed() -> None:
    model = make_model()
    assert ids_of(model, [1], 3, seed=10**30) == ids_of(model, [1], 3, seed=10**30 % (1 << 63))


@pytest.mark.parametrize("variant", VARIANTS)
@settings(deadline=None, max_examples=12)
@given(
    prompts=st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=9), min_size=1, max_size=6),
    rows=st.integers(1, 6),
)
def test_a_ragged_batch_is_each_prompt_alone_without_a_cache(variant: str, prompts: list[list[int]], rows: int) -> None:
    model = make_model(context_length=24, **VARIANTS[variant])
    found = [Generation(prompt, 3 + 2 * n, GREEDY, wants_logprobs=True) for n, prompt in enumerate(prompts)]
    generate(model, found, rows)
    for generation in found:
        expected, logprobs = naive(model, list(generation.prompt), generation.max_new_tokens)
        assert generation.ids == expected
        assert [*generation.prompt_logprobs, *generation.logprobs] == pytest.approx(logprobs, abs=1e-5)
        assert generation.ended == "length"


@pytest.mark.parametrize("prompt", [[3], [1, 2, 3, 4], [5, 4, 3, 2, 1, 0, 7, 8]], ids=["short", "full", "longer"])
@pytest.mark.parametrize("sampling", [GREEDY, SampleConfig(temperature=1, top_p=0)], ids=["temperature", "top-p"])
def test_past_the_context_the_last_tokens_count(prompt: list[int], sampling: SampleConfig) -> None:
    model = make_model()
    companion = Generation([1], 25, EVEN)
    found = Generation(prompt, 20, sampling)
    generate(model, [companion, found])
    assert found.ids == naive(model, prompt, 20)[0]
    assert companion.ids == ids_of(model, [1], 25)


def test_the_seed_decides_the_ids_whatever_the_batch() -> None:
    model = make_model(context_length=40)
    first = ids_of(model, [1, 2], 30, seed=5)
    torch.manual_seed(99)  # the global generator has no say
    assert ids_of(model, [1, 2], 30, seed=5) == first
    assert ids_of(model, [1, 2], 30, seed=6) != first
    others = [Generation([n], 7 * n, SampleConfig(0.3 * n), seed=n) for n in range(1, 5)]
    again = Generation([1, 2], 30, EVEN, seed=5)
    generate(model, [*others, again], max_batch_size=3)
    assert again.ids == first


def test_equal_prompts_are_computed_once() -> None:
    model = make_model(context_length=40)
    seen: list[torch.Size] = []
    model.token_embeddings.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    found = [Generation(prompt, 5, EVEN, seed=seed) for seed in range(3) for prompt in ([1, 2, 3], [4, 5])]
    generate(model, found)
    assert seen[0] == (2, 3)
    assert [one.ids for one in found] == [ids_of(model, list(one.prompt), 5, seed=one.seed) for one in found]


def test_sequences_join_and_leave_between_steps() -> None:
    model = make_model(context_length=40)
    engine = Engine(model, 2)
    first, second, third = (Generation([n], 12, EVEN, seed=n) for n in range(3))
    engine.add([first, second])
    for _ in range(4):
        engine.step()
    first.ended = "stop"  # someone gave up
    engine.step()
    assert engine.live == [second] and len(first.ids) == 5
    engine.add([third])
    with pytest.raises(ValueError, match="more than 2"):
        engine.add([Generation([1], 1)])
    while engine.live:
        engine.step()
    for one in (second, third):
        assert one.ids == ids_of(model, list(one.prompt), 12, seed=one.seed)
    engine.step()  # nothing to do


def test_stops_before_a_stop_id() -> None:
    model = make_model()
    whole = ids_of(model, [1], 40, seed=3)
    for stops in [{stop} for stop in set(whole)] + [{whole[10], whole[20]}]:
        found = Generation([1], 40, EVEN, frozenset(stops), seed=3)
        generate(model, [found])
        assert found.ids == whole[: min(map(whole.index, stops))]
        assert found.ended == "stop"
    absent = frozenset(set(range(11)) - set(whole))
    assert ids_of(model, [1], 40, stop_ids=absent, seed=3) == whole


def test_ends_with_the_id_that_its_listener_says() -> None:
    heard: list[int] = []

    def on_token(token_id: int) -> bool:
        heard.append(token_id)
        return len(heard) == 4

    found = Generation([1], 40, EVEN, on_token=on_token)
    generate(make_model(), [found])
    assert found.ids == heard and len(heard) == 4 and found.ended == "stop"


def test_a_stop_id_in_the_prompt_does_not_stop() -> None:
    assert ids_of(fixed_model([0.0, 9.0]), [0, 0], 3, GREEDY, stop_ids=frozenset({0})) == [1, 1, 1]


def test_a_repetition_penalty_sees_prompt_and_new_ids() -> None:
    model = fixed_model([3.0, 2.9, 2.8, 2.7], context_length=8)
    penalized = SampleConfig(temperature=0, repetition_penalty=2.0)
    found = [Generation([1], 4, GREEDY), Generation([1], 3, penalized), Generation([0, 3], 2, penalized)]
    generate(model, found)
    assert [one.ids for one in found] == [[0, 0, 0, 0], [0, 2, 3], [1, 2]]
    rows = [Generation([1], 1, GREEDY), Generation([1], 3, penalized), Generation([0, 3], 2, penalized)]
    generate(model, rows, max_batch_size=2)  # the last takes the place of the first
    assert [one.ids for one in rows] == [[0], [0, 2, 3], [1, 2]]


def test_no_new_tokens_but_the_prompts_log_probabilities() -> None:
    model = make_model()
    assert ids_of(model, [1], 0) == []
    scored = Generation([1, 2, 3], 0, wants_logprobs=True)
    generate(model, [scored])
    assert scored.ids == [] and scored.ended == "length"
    assert scored.prompt_logprobs == pytest.approx(naive(model, [1, 2, 3], 0)[1], abs=1e-5)


def test_nothing_asked_is_nothing_done() -> None:
    generate(make_model(), [])


def test_a_stream_is_lazy_and_keeps_no_gradients() -> None:
    model = make_model()
    ids = stream(model, Generation([1], 10**12, EVEN))
    assert [next(ids), next(ids)] == ids_of(model, [1], 2)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), "between two ids the caller is outside"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert list(stream(model, Generation([1], 7, EVEN))) == ids_of(model, [1], 7)


@pytest.mark.parametrize(("prompt", "message"), [([], "empty"), ([3, 11], "11"), ([-1], "-1"), ([2**40], "outside")])
def test_bad_prompt_is_a_user_error_before_anything_is_computed(prompt: list[int], message: str) -> None:
    good = Generation([1], 3)
    with pytest.raises(UserError, match=message):
        generate(make_model(), [good, Generation(prompt, 3)], 1)
    assert good.ids == []
