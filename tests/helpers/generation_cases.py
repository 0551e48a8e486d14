"""Random generations in an engine of little memory, compared with a model without a cache."""

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from lm.inference.config import SampleConfig
from lm.inference.engine import Engine
from lm.inference.generation_request import Generation
from lm.inference.kv_cache import PAGE_TOKENS, page_bytes
from lm.inference.runners.runner import prepare_for_inference
from lm.model.adapter import LowRank
from lm.model.transformer import TransformerLM
from tests.helpers.adapters import with_fused
from tests.helpers.generating import generate_without_cache


@dataclass(frozen=True)
class Case:
    """A greedy generation. Its prompt is pieces of a few texts, so that prompts share prefixes."""

    pieces: Sequence[tuple[int, int]]
    """Number of a text, and how many tokens of it."""
    count: int
    wants_prompt_logprobs: bool = False
    num_drafts: int = 0
    is_cancelled: bool = False
    adapter: int = 0

    def prompt(self, vocab_size: int) -> list[int]:
        """Return the ids of the prompt."""
        return [(text * 5 + i * i) % vocab_size for text, length in self.pieces for i in range(length)]


def make_engine(model: TransformerLM, num_pages: int, rows: int = 3, has_prefix_cache: bool = False) -> Engine:
    """Return an engine with a KV cache of ``num_pages`` pages."""
    size = page_bytes(model.config, model.token_embeddings.weight.dtype, has_prefix_cache)
    return Engine(model, rows, prefix_cache_bytes=has_prefix_cache * 40 * size, kv_bytes=num_pages * size)


def check_pages(engine: Engine) -> None:
    """Each page is free, idle, or in a row."""
    cache = engine._cache
    used = {page for row in range(len(engine.active)) for page in cache.pages(row)}
    assert 0 not in used
    assert len(used) + cache.num_free + cache.num_idle == cache.num_pages


def check_cases(
    model: TransformerLM,
    cases: Sequence[Case],
    num_pages: int,
    chunk: int,
    has_prefix_cache: bool,
    rows: int = 3,
    adapters: Sequence[Mapping[str, LowRank]] = (),
) -> int:
    """Run all cases in one engine, in chunks of ``chunk`` tokens; return the number that was compared.

    The model is one of float64, so that ids are equal but for ties. A case is cancelled in the third step or later. A
    case with an adapter is compared with the model into which the adapter is fused.
    """
    served = prepare_for_inference(copy.deepcopy(model), adapters=adapters)
    references = [model, *(with_fused(model, adapter) for adapter in adapters)]
    engine, vocab_size = make_engine(served, num_pages, rows, has_prefix_cache), model.config.vocab_size or 1
    generations = [
        Generation(
            case.prompt(vocab_size),
            case.count,
            SampleConfig(temperature=0, speculative_tokens=case.num_drafts),
            wants_logprobs=True,
            wants_prompt_logprobs=case.wants_prompt_logprobs,
            adapter=case.adapter,
        )
        for case in cases
    ]
    waiting, steps = deque(generations), 0
    while waiting or engine.active:
        while waiting and engine.admit(waiting[0]):
            waiting.popleft()
        engine.decode()
        before = engine.num_prefilled_tokens
        engine.prefill(chunk)
        assert engine.num_prefilled_tokens - before <= max(chunk, PAGE_TOKENS)
        check_pages(engine)
        steps += 1
        for number, (case, generation) in enumerate(zip(cases, generations, strict=True)):
            if case.is_cancelled and steps == 3 + number:
                generation.finish_reason = generation.finish_reason or "stop"
                waiting = deque(one for one in waiting if not one.finish_reason)
    compared = 0
    for case, generation in zip(cases, generations, strict=True):
        if case.is_cancelled or len(generation.prompt) > model.config.context_length:
            continue
        reference = references[case.adapter]
        ids, logprobs = generate_without_cache(reference, list(generation.prompt), generation.max_new_tokens)
        assert generation.ids == ids
        first = len(generation.prompt) - 1
        assert generation.logprobs == pytest.approx(logprobs[first:], abs=1e-5)
        expected = logprobs[:first] if generation.wants_prompt_logprobs else []
        assert generation.prompt_logprobs == pytest.approx(expected, abs=1e-5)
        compared += 1
    return compared
