"""Generation with the KV cache equals forward passes without it, for each option of the model."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lm.inference import cache_size
from lm.inference.config import SampleConfig
from lm.inference.engine import Engine
from lm.inference.generation_request import Generation
from lm.inference.runners.runner import prepare_for_inference
from lm.model.config import MoEConfig
from lm.model.transformer import TransformerLM
from tests.helpers.generating import generate_without_cache
from tests.helpers.reference_model import MODEL_VARIANTS, SMALL_CONFIG

_VARIANTS = [
    *MODEL_VARIANTS,
    {"moe": MoEConfig(4, 2, num_shared_experts=1, shared_gate=True)},
    {"sliding_window": 17, "qk_norm": True, "num_heads": 6, "num_kv_heads": 2},
    {"sliding_window": 40, "global_interval": 2, "global_rope": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("variant", _VARIANTS, ids=str)
def test_greedy_texts_equal_those_without_a_cache(
    variant: dict[str, Any], is_prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three prompts in one batch, computed in chunks: in one, in several, and past the end of the context.

    Layers with a sliding window have rings.
    """
    torch.manual_seed(0)
    monkeypatch.setattr(cache_size, "MIN_CHUNK_TOKENS", 16)
    model = TransformerLM(replace(SMALL_CONFIG, context_length=160, **variant)).eval()
    prompts, count = [[3, 1, 4], [*range(1, 50)] * 3, [5] * 20], 30
    expected = [generate_without_cache(model, prompt, count) for prompt in prompts]
    engine = Engine(prepare_for_inference(model) if is_prepared else model, len(prompts))
    assert (len(engine._cache.tables) == 2) == bool(model.config.sliding_window)
    generations = [
        Generation(prompt, count, SampleConfig(temperature=0), wants_logprobs=True, wants_prompt_logprobs=True)
        for prompt in prompts
    ]
    for generation in generations:
        assert engine.admit(generation)
    while engine.active:
        engine.prefill(16)
        engine.decode()
    for generation, (ids, logprobs) in zip(generations, expected, strict=True):
        assert generation.ids == ids
        assert [*generation.prompt_logprobs, *generation.logprobs] == pytest.approx(logprobs, abs=1e-4)
