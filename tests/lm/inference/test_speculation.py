"""Speculative decoding has the same results as plain decoding, in fewer steps."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.inference.completion import complete
from lm.inference.config import SampleConfig
from lm.inference.engine import Engine, generate, stream
from lm.inference.generation_request import Generation
from lm.inference.runners.runner import prepare_for_inference
from lm.inference.sampler import LogitEdits
from lm.inference.speculation import PromptLookup
from lm.model.transformer import TransformerLM
from tests.helpers.examples import examples
from tests.helpers.generating import fixed_model, make_model
from tests.helpers.tokenizers import bytes_tokenizer

CONTEXT, VOCAB_SIZE = 40, 7
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_heads": 4, "num_kv_heads": 2, "qk_norm": True},
    "variants": {"feed_forward": "relu2", "logit_softcap": 5.0, "norm_placement": "post", "position_encoding": "none"},
}
SAMPLINGS = [
    SampleConfig(temperature=0),
    SampleConfig(temperature=1.5, top_p=1),
    SampleConfig(temperature=0.5, top_k=3, repetition_penalty=0.8),
    SampleConfig(temperature=0.3, min_p=0.1, top_p=0.9),
]


def make_models(**options: Any) -> list[TransformerLM]:
    """Return models of several random weights, in float64: rounding decides no token."""
    models = []
    for seed in range(3):
        model = make_model(VOCAB_SIZE, CONTEXT, **options).double().eval()
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        models.append(model)
    return models


MODELS = {name: make_models(**options) for name, options in VARIANTS.items()}

# A prompt is one or two texts with a period, so that drafts are often accepted and often rejected.
periodic = st.tuples(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5), st.integers(1, 12))
prompts = st.lists(periodic, min_size=1, max_size=2).map(
    lambda parts: [token for period, length in parts for token in itertools.islice(itertools.cycle(period), length)]
)
requests = st.tuples(
    prompts, st.integers(1, 24), st.sampled_from(SAMPLINGS), st.integers(0, 3), st.integers(1, 6), st.booleans()
)


def make_generations(batch: list[Any], is_speculative: bool) -> list[Generation]:
    generations = []
    for prompt, count, sampling, seed, speculative_tokens, is_edited in batch:
        generations.append(
            Generation(
                prompt,
                count,
                replace(sampling, speculative_tokens=speculative_tokens if is_speculative else 0),
                frozenset({6}) if seed == 3 else frozenset(),
                seed,
                LogitEdits(0.5, -0.2, {1: 0.7}) if is_edited else LogitEdits(),
                wants_logprobs=is_edited,
                num_alternatives=2,
                on_token=(lambda token_id: token_id == 5) if seed == 2 else (lambda token_id: False),
            )
        )
    return generations


@pytest.mark.parametrize("variant", VARIANTS)
@examples(12)
@given(batch=st.lists(requests, min_size=1, max_size=3), number=st.integers(0, 2), rows=st.integers(1, 3))
def test_the_text_is_that_of_plain_decoding(variant: str, batch: list[Any], number: int, rows: int) -> None:
    """All ids are equal, of sampled texts too: a random number decides each token, whether it was drafted or not."""
    model = MODELS[variant][number]
    plain, drafted = make_generations(batch, is_speculative=False), make_generations(batch, is_speculative=True)
    generate(model, plain)
    generate(model, drafted, rows)
    for expected, generation in zip(plain, drafted, strict=True):
        assert generation.ids == expected.ids
        assert generation.finish_reason == expected.finish_reason
        assert generation.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert [[i for i, _ in row] for row in generation.alternatives] == [
            [i for i, _ in row] for row in expected.alternatives
        ]
        assert (generation.end_score is None) == (expected.end_score is None)
        assert generation.num_accepted_tokens <= generation.num_draft_tokens
        assert expected.num_draft_tokens == 0


def count_steps(engine: Engine, generation: Generation) -> int:
    engine.add([generation])
    steps = 0
    while engine.active:
        engine.step()
        steps += 1
    return steps


def draft_plainly(tokens: list[int], count: int) -> list[int]:
    """Return the draft of :class:`PromptLookup`, by reading the whole text for each n-gram."""
    for size in (4, 3, 2):
        for start in reversed(range(size, len(tokens))):
            if tokens[start - size : start] == tokens[-size:]:
                text = list(tokens)
                for place in range(count):
                    text.append(text[start + place])
                return text[len(tokens) :]
    return []


@examples(200)
@given(tokens=st.lists(st.integers(0, 2), max_size=30), cuts=st.lists(st.integers(0, 30)), count=st.integers(0, 9))
def test_drafts_follow_the_latest_occurrence_of_the_longest_ngram(
    tokens: list[int], cuts: list[int], count: int
) -> None:
    first, *others = sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)})
    lookup = PromptLookup(tokens[:first], 9)
    for end in (first, *others):
        assert lookup.draft(tokens[first:end], count) == draft_plainly(tokens[:end], count)


def test_the_length_of_drafts_follows_their_acceptance() -> None:
    lookup = PromptLookup([1, 2] * 9, 8)
    lengths = []
    for num_accepted in (8, 3, 0, 1, 2, 4, 8):
        draft = lookup.draft([], 99)
        assert draft == [1, 2, 1, 2, 1, 2, 1, 2][: len(draft)]
        lengths.append(len(draft))
        lookup.record(len(draft), num_accepted)
    assert lengths == [8, 8, 3, 1, 2, 4, 8]


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_text_that_repeats_takes_fewer_steps(is_packed: bool) -> None:
    """The prefix cache is filled as without drafts, and the counts are those of the steps that were saved."""
    model = make_model(VOCAB_SIZE, CONTEXT).eval()
    if is_packed:
        prepare_for_inference(model)
    greedy = SampleConfig(temperature=0)
    engine = Engine(model, 1, prefix_cache_bytes=10**6)
    plain = Generation([1, 2, 3, 1, 2, 3], 34, greedy)
    assert count_steps(engine, plain) == 33
    drafted = Generation(plain.prompt, 34, replace(greedy, speculative_tokens=8))
    assert count_steps(engine, drafted) == 33 - drafted.num_accepted_tokens < 33
    assert drafted.ids == plain.ids
    longer = Generation([*plain.prompt, *plain.ids[:28]], 6, greedy)
    engine.add([longer])
    assert longer.num_cached_tokens == 32
    while engine.active:
        engine.step()
    assert longer.ids == plain.ids[28:]
    assert list(stream(model, Generation(plain.prompt, 34, drafted.sampling))) == plain.ids


def test_the_switch_is_no_part_of_the_cache_key_and_completions_count_draft_tokens() -> None:
    config = SampleConfig(temperature=0, prompts=["aaaaaaaa"], max_new_tokens=30)
    drafting = replace(config, speculative_tokens=4)
    assert (
        drafting.identity == config.identity == {k: v for k, v in asdict(config).items() if k != "speculative_tokens"}
    )
    tokenizer, model = bytes_tokenizer(), make_model(256, 48).eval()
    [plain], [drafted] = (complete(model, tokenizer, each) for each in (config, drafting))
    assert drafted.text == plain.text
    assert plain.num_draft_tokens == 0 < drafted.num_accepted_tokens <= drafted.num_draft_tokens


def test_sampled_texts_have_the_exact_distribution() -> None:
    """All random numbers on a grid: each text of three tokens occurs as often as the product of its probabilities."""
    eighths = [4, 2, 1, 1]
    model = fixed_model(torch.tensor(eighths).log().tolist(), context_length=16)
    grid = [(step + 0.5) / 8 for step in range(8)]

    class GridGeneration(Generation):
        uniforms: Iterator[float]

        def next_uniform(self) -> float:
            return next(self.uniforms)

    sampling = SampleConfig(temperature=1, top_p=1, speculative_tokens=4)
    # After the first token, 2 or 3 with probability 1/8, there is one draft token: 0 or 3, accepted in 4/8 and 1/8.
    for prompt, num_accepted in (([0, 1, 2, 0, 1], 32), ([3, 3, 3], 8)):
        generations = []
        for uniforms in itertools.product(grid, repeat=3):
            generation = GridGeneration(prompt, 3, sampling)
            generation.uniforms = iter(uniforms)
            generations.append(generation)
        generate(model, generations)
        counts = Counter(tuple(generation.ids) for generation in generations)
        texts = itertools.product(range(4), repeat=3)
        assert counts == {text: eighths[text[0]] * eighths[text[1]] * eighths[text[2]] for text in texts}
        assert sum(generation.num_draft_tokens for generation in generations) == 64
        assert sum(generation.num_accepted_tokens for generation in generations) == num_accepted
