"""Answers fit their grammars, whatever the model finds likely, in batches and with speculative decoding."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.inference.completion import TextGeneration
from lm.inference.config import SampleConfig
from lm.inference.constraints import ConstraintCompiler, ConstraintError
from lm.inference.engine import Engine, generate
from lm.inference.generation_request import Generation
from lm.inference.grammars import Grammar
from lm.inference.sampler import LogitEdits
from lm.inference.scheduler import Scheduler
from lm.model.transformer import TransformerLM
from tests.helpers.constrained import is_valid_json, make_constraint, schemas, words_tokenizer
from tests.helpers.examples import examples
from tests.helpers.generating import fixed_model, make_model
from tests.helpers.tokenizers import bytes_tokenizer

pytest.importorskip("llguidance", reason="llguidance is not installed")

GRAMMARS = [
    Grammar.from_regex("(ab|c){2,6}x?"),
    Grammar.from_choices(["yes", "no", "é日"]),
    Grammar.from_json_schema({"type": "array", "items": {"enum": ["aa", "bb"]}, "minItems": 6, "maxItems": 8}),
    None,
]
SAMPLINGS = [SampleConfig(temperature=0), SampleConfig(temperature=1, top_p=1), SampleConfig(temperature=0.6, top_k=5)]
requests = st.tuples(
    st.sampled_from(GRAMMARS),
    st.sampled_from(SAMPLINGS),
    st.lists(st.integers(256, 600), min_size=1, max_size=6),
    st.integers(1, 30),
    st.integers(0, 99),
    st.sampled_from([LogitEdits(), LogitEdits(0.4, -0.2, {97: 3.0, 300: 50.0})]),
    st.sampled_from([1.0, 0.7]),
)


def float64_model() -> TransformerLM:
    """Return a model in float64: rounding decides no token. A large vocabulary needs large logits to differ."""
    model = make_model(words_tokenizer().size, 64).double().eval()
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(8)
    return model


def make_generation(request: Any, speculative_tokens: int) -> Generation:
    grammar, sampling, prompt, max_new_tokens, seed, edits, penalty = request
    return Generation(
        prompt,
        max_new_tokens,
        replace(sampling, speculative_tokens=speculative_tokens, repetition_penalty=penalty),
        frozenset(words_tokenizer().special_ids.values()),
        seed,
        edits,
        make_constraint(grammar) if grammar else None,
        wants_logprobs=True,
        num_alternatives=1,
    )


@examples(20)
@given(batch=st.lists(requests, min_size=1, max_size=4), rows=st.integers(1, 3), speculative_tokens=st.integers(1, 5))
def test_batches_and_drafts_change_no_answer(batch: list[Any], rows: int, speculative_tokens: int) -> None:
    model = float64_model()
    alone = [make_generation(request, 0) for request in batch]
    for generation in alone:
        generate(model, [generation])
    together = [make_generation(request, 0) for request in batch]
    generate(model, together, rows)
    drafted = [make_generation(request, speculative_tokens) for request in batch]
    generate(model, drafted)
    for expected, *others in zip(alone, together, drafted, strict=True):
        for generation in others:
            assert (generation.ids, generation.finish_reason) == (expected.ids, expected.finish_reason)
            assert generation.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_drafts_of_a_constrained_answer_are_accepted() -> None:
    constraint = make_constraint(Grammar.from_regex("(ab){20}c"))
    sampling = SampleConfig(temperature=0, speculative_tokens=6)
    stop_ids = frozenset(words_tokenizer().special_ids.values())
    generation = Generation([300], 60, sampling, stop_ids, constraint=constraint)
    generate(float64_model(), [generation])
    assert words_tokenizer().decode(generation.ids) == "ab" * 20 + "c"
    assert generation.num_accepted_tokens > 0


def check_answers(schema: dict[str, Any], model: TransformerLM, num_answers: int, speculative_tokens: int) -> int:
    """Check some answers, and return how many ended."""
    constraint = make_constraint(Grammar.from_json_schema(schema))
    config = SampleConfig(temperature=1, top_p=1, max_new_tokens=150, speculative_tokens=speculative_tokens)
    texts = [
        TextGeneration(words_tokenizer(), [300], config, seed, constraint=constraint.copy())
        for seed in range(num_answers)
    ]
    generate(model, [text.generation for text in texts])
    for text in texts:
        answer, generation = text.finish(), text.generation
        assert generation.error is None
        if generation.finish_reason == "stop":
            assert is_valid_json(answer, schema), answer
        else:
            assert (generation.finish_reason, len(generation.ids)) == ("length", 150)
    return sum(text.generation.finish_reason == "stop" for text in texts)


@examples(20)
@given(schema=schemas, speculative_tokens=st.sampled_from([0, 4]))
def test_an_answer_that_ends_is_valid(schema: dict[str, Any], speculative_tokens: int) -> None:
    check_answers(schema, make_model(words_tokenizer().size, 256).eval(), 2, speculative_tokens)


@pytest.mark.slow
def test_two_hundred_random_schemas_are_answered() -> None:
    model = make_model(words_tokenizer().size, 256).eval()
    ended = []

    @examples(200)
    @given(schema=schemas)
    def answer(schema: dict[str, Any]) -> None:
        ended.append(check_answers(schema, model, 1, 0))

    answer()
    assert sum(ended) >= 0.95 * len(ended) > 0


def test_a_cut_answer_says_length() -> None:
    constraint = make_constraint(Grammar.from_regex("a{50}"))
    generation = Generation([300], 5, stop_ids=frozenset(words_tokenizer().special_ids.values()), constraint=constraint)
    generate(float64_model(), [generation])
    assert (generation.finish_reason, len(generation.ids)) == ("length", 5)


def test_logprobs_are_those_of_the_model_without_the_constraint() -> None:
    tokenizer = bytes_tokenizer(["<|endoftext|>"])
    compiler = ConstraintCompiler(tokenizer)
    logits = [0.1 * (token_id % 7) for token_id in range(tokenizer.size)]
    model = fixed_model(logits, 16)
    stop_ids = frozenset(tokenizer.special_ids.values())
    constraint = compiler.compile(Grammar.from_choices(["ab"]))
    generation = Generation([1], 9, stop_ids=stop_ids, constraint=constraint, wants_logprobs=True, num_alternatives=1)
    generate(model, [generation])
    expected = torch.tensor(logits).log_softmax(-1)
    assert generation.ids == [97, 98] and generation.finish_reason == "stop"
    assert generation.logprobs == pytest.approx(expected[[97, 98]].tolist(), abs=1e-4)
    assert generation.alternatives[0][0][1] == pytest.approx(float(expected.max()), abs=1e-4)
    assert generation.end_score is not None and generation.end_score[0] == 256


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_broken_model_keeps_to_the_grammar(odd: float, temperature: float) -> None:
    tokenizer = bytes_tokenizer(["<|endoftext|>"])
    model = make_model(tokenizer.size, 16).eval()
    with torch.no_grad():
        model.get_parameter("lm_head.weight")[97:99].fill_(odd)
    constraint = ConstraintCompiler(tokenizer).compile(Grammar.from_regex("ab|a"))
    sampling = SampleConfig(temperature=temperature)
    generation = Generation([1], 9, sampling, frozenset({256}), constraint=constraint)
    generate(model, [generation])
    assert tokenizer.decode(generation.ids) in ("a", "ab") and generation.finish_reason == "stop"


def test_without_stop_ids_the_answer_ends_when_nothing_can_follow() -> None:
    tokenizer = bytes_tokenizer()
    constraint = ConstraintCompiler(tokenizer).compile(Grammar.from_regex("abc?d"))
    generation = Generation([1], 99, constraint=constraint)
    generate(make_model(256, 16).eval(), [generation])
    assert tokenizer.decode(generation.ids) in ("abd", "abcd") and generation.finish_reason == "stop"


def test_the_prefix_cache_changes_no_answer() -> None:
    model, prompt = float64_model(), list(range(260, 300))
    engine = Engine(model, 1, prefix_cache_bytes=10**6)
    answers = []
    for _ in range(2):
        generation = make_generation((GRAMMARS[2], SAMPLINGS[1], prompt, 24, 3, LogitEdits(), 1.0), 0)
        engine.add([generation])
        while engine.active:
            engine.step()
        answers.append(generation.ids)
    assert generation.num_cached_tokens == 32 and answers[0] == answers[1]


def test_a_constraint_that_fails_ends_its_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = bytes_tokenizer(["<|endoftext|>"])
    compiler = ConstraintCompiler(tokenizer)
    model = make_model(tokenizer.size, 32).eval()
    scheduler = Scheduler(model, 4, 4)
    failing, fine = (compiler.compile(Grammar.from_regex("ab{9}c")) for _ in range(2))

    def advance(token_id: int) -> None:
        raise ConstraintError("too complex")

    monkeypatch.setattr(failing, "advance", advance)
    generations = [
        Generation([1], 20, stop_ids=frozenset({256}), constraint=constraint) for constraint in (failing, fine, None)
    ]
    errors: list[Exception | None] = []
    scheduler.submit(generations, lambda generation, error: errors.append(error))
    while len(scheduler):
        pass
    scheduler.close()
    assert sorted(map(repr, errors)) == ["ConstraintError('too complex')", "None", "None"]
    assert tokenizer.decode(generations[1].ids) == "abbbbbbbbbc"
    assert generations[0].ids == []
