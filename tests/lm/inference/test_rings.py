"""Layers with a sliding window keep only the tokens of their windows, in rings, where that saves memory."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.inference import cache_size
from lm.inference.cache_size import plan_cache
from lm.inference.config import SampleConfig
from lm.inference.engine import Engine, generate
from lm.inference.generation_request import Generation
from lm.inference.kv_cache import KVCache, page_bytes
from lm.inference.runners.runner import make_runner, prepare_for_inference
from lm.model.config import ModelConfig
from tests.helpers.examples import examples
from tests.helpers.generating import make_model
from tests.helpers.generation_cases import check_cases, make_engine
from tests.lm.inference.test_prefill import cases

GREEDY = SampleConfig(temperature=0)
CONTEXT = 130
WINDOWS: list[dict[str, Any]] = [
    {"sliding_window": 1},
    {"sliding_window": 17, "num_layers": 3},
    {"sliding_window": 30, "num_layers": 4, "global_interval": 3},
]
MODELS = [
    make_model(context_length=CONTEXT, num_heads=4, num_kv_heads=2, **options).double().eval() for options in WINDOWS
]
# As Gemma 3: five of six layers have a window.
GEMMA = ModelConfig(100, 32_768, 64, 12, 4, 1, d_ff=64, sliding_window=1024, global_interval=6, local_rope_theta=1e4)


@examples(12)
@given(
    number=st.integers(0, len(MODELS) - 1),
    cases=st.lists(cases, min_size=1, max_size=7),
    num_pages=st.integers(15, 30),
    chunk=st.sampled_from([1, 16, 50, 200]),
)
def test_results_are_those_without_a_cache(number: int, cases: Any, num_pages: int, chunk: int) -> None:
    """With chunks, drafts, equal prompts, cancelled ones, and a limit of memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_size, "MIN_CHUNK_TOKENS", 16)
        assert len(make_engine(MODELS[number], num_pages)._cache.tables) == 2
        check_cases(MODELS[number], cases, num_pages, chunk, has_prefix_cache=False)


def test_equal_prompts_are_computed_once() -> None:
    """The rings of those that wait are copies."""
    model = make_model(context_length=1200, sliding_window=8).double().eval()
    prompt = [i * i % 11 for i in range(60)]
    expected, *equal = (Generation(prompt, 40, GREEDY, wants_logprobs=True) for _ in range(4))
    engine = Engine(model, 3)
    assert len(engine._cache.tables) == 2
    engine.add(equal)
    assert engine.num_prefilled_tokens == len(prompt)
    while engine.active:
        engine.step()
    generate(model, [expected])  # 100 tokens need no ring
    for generation in equal:
        assert generation.ids == expected.ids and generation.logprobs == pytest.approx(expected.logprobs, abs=1e-9)


def test_drafts_fit_into_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size, "MIN_CHUNK_TOKENS", 16)
    model = MODELS[0]
    drafted, expected = (
        Generation([1, 2, 3, 4] * 10, 30, SampleConfig(temperature=0, speculative_tokens=drafts)) for drafts in (60, 0)
    )
    for generation in (drafted, expected):
        engine = Engine(model, 1)
        assert engine._cache.max_chunk_tokens < 40
        engine.add([generation])
        while engine.active:
            engine.step()
    assert drafted.num_draft_tokens and drafted.ids == expected.ids


def test_a_ring_takes_the_memory_of_a_window() -> None:
    """Of 32,768 tokens, ten of twelve layers keep 1,024 and what is computed at once."""
    whole = plan_cache(GEMMA, torch.bfloat16, 4, 32_768, 1 << 20, None)
    ring = plan_cache(GEMMA, torch.bfloat16, 4, 32_768, 0, None)
    assert (whole.ring_pages, ring.ring_pages) == (0, (1024 + 512) // 16 + 1)
    token = page_bytes(GEMMA, torch.bfloat16, False) // 16
    assert ring.num_bytes == 4 * token * (32_768 * 2 + 97 * 16 * 10) // 12
    cache = ring.make(torch.device("cpu"))
    stored = (cache.keys, cache.values, cache.ring_keys, cache.ring_values)
    page_zero = page_bytes(GEMMA, torch.bfloat16, False)
    assert sum(tensor.nbytes for tensor in stored) == ring.num_bytes + page_zero


@pytest.mark.parametrize(
    ("config", "length", "kv_tokens", "has_rings", "tokens"),
    [
        (GEMMA, 32_768, 40_000, True, 4 * 32_768),
        (GEMMA, 32_768, 8000, True, 16_960),
        (GEMMA, 32_768, 1000, False, 992),  # less than the rings: short texts share what there is
        (GEMMA, 3000, 12_000, False, 12_000),  # a ring would be half as long as the texts
        (replace(GEMMA, global_interval=None, local_rope_theta=None), 32_768, 9000, True, 4 * 32_768),
        (replace(GEMMA, sliding_window=None, local_rope_theta=1e4), 32_768, 9000, False, 8992),
    ],
)
def test_rings_are_used_where_more_tokens_fit(
    config: ModelConfig, length: int, kv_tokens: int, has_rings: bool, tokens: int
) -> None:
    token = page_bytes(config, torch.float32, False) // 16
    size = plan_cache(config, torch.float32, 4, length, 0, kv_tokens * token)
    assert (bool(size.ring_pages), size.num_pages * 16) == (has_rings, tokens)
    assert size.num_bytes <= kv_tokens * token
    assert size.length == min(length, tokens)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_more_new_tokens_than_a_ring_allows_are_refused(is_prepared: bool) -> None:
    model = make_model(context_length=200, sliding_window=10).eval()
    model = prepare_for_inference(copy.deepcopy(model)) if is_prepared else model
    runner = make_runner(model, KVCache(model.config, 1, 200, torch.device("cpu"), ring_pages=3))
    with torch.inference_mode():
        assert runner.extend([0], [(1,) * 22], [0])[0].shape == (22, model.config.d_model)
        with pytest.raises(ValueError, match="23 new tokens of a row are more than 22"):
            runner.extend([0], [(1,) * 23], [0])
