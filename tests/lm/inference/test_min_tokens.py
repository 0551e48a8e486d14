"""No generation ends before ``min_tokens``: against one token after another without a cache, a batch or drafts."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.inference.completion import TextGeneration, TextStream
from lm.inference.config import SampleConfig
from lm.inference.constraints import Constraint, ConstraintCompiler
from lm.inference.engine import generate
from lm.inference.generation_request import Generation
from lm.inference.grammars import Grammar
from lm.inference.sampler import LogitEdits, Sampler
from lm.model.transformer import TransformerLM
from tests.helpers.examples import examples
from tests.helpers.generating import fixed_model, make_model
from tests.helpers.tokenizers import bytes_tokenizer

TOKENIZER = bytes_tokenizer(["<|endoftext|>"])
END = 256
REGEXES = ["(ab|c){2,6}x?", "a*", "abc", None]
SAMPLINGS = [SampleConfig(temperature=0), SampleConfig(temperature=1, top_p=1), SampleConfig(temperature=0.6, top_k=5)]
requests = st.fixed_dictionaries(
    {
        "regex": st.sampled_from(REGEXES),
        "sampling": st.sampled_from(SAMPLINGS),
        "prompt": st.lists(st.integers(0, 255), min_size=1, max_size=6),
        "max_tokens": st.integers(1, 20),
        "min_tokens": st.integers(0, 20),
        "stop_ids": st.sets(st.sampled_from([END, 33, 120]), max_size=3).map(frozenset),
        "seed": st.integers(0, 99),
        "bias": st.sampled_from([0.0, 8.0, 100.0]),  # of the end; the last one makes it certain
        "penalty": st.sampled_from([1.0, 0.7]),
    }
)


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    return ConstraintCompiler(TOKENIZER)


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    """A model in float64: rounding decides no token."""
    return make_model(TOKENIZER.size, 64).double().eval()


def make_constraint(compiler: ConstraintCompiler, request: dict[str, Any]) -> Constraint | None:
    return compiler.compile(Grammar.from_regex(request["regex"])) if request["regex"] else None


def make_edits(request: dict[str, Any]) -> LogitEdits:
    return LogitEdits(0.4, -0.2, {97: 3.0, END: request["bias"]}, request["min_tokens"])


def make_generation(compiler: ConstraintCompiler, request: dict[str, Any], speculative_tokens: int = 0) -> Generation:
    sampling = replace(
        request["sampling"], speculative_tokens=speculative_tokens, repetition_penalty=request["penalty"]
    )
    limit, stop_ids, constraint = request["max_tokens"], request["stop_ids"], make_constraint(compiler, request)
    edits = make_edits(request)
    return Generation(
        request["prompt"], limit, sampling, stop_ids, request["seed"], edits, constraint, wants_logprobs=True
    )


def edit_plainly(logits: list[float], request: dict[str, Any], ids: list[int]) -> list[float]:
    """Return the logits after the penalties and the biases."""
    edited = []
    for token_id, logit in enumerate(logits):
        if token_id in (*request["prompt"], *ids):
            logit = logit / request["penalty"] if logit > 0 else logit * request["penalty"]
        count = ids.count(token_id)
        logit -= count * 0.4 + (count > 0) * -0.2
        edited.append(logit + {97: 3.0, END: request["bias"]}.get(token_id, 0.0))
    return edited


def generate_plainly(
    model: TransformerLM, compiler: ConstraintCompiler, request: dict[str, Any]
) -> tuple[list[int], str, list[float]]:
    """Return ids, finish reason and log-probabilities."""
    ids, logprobs, constraint = list[int](), list[float](), make_constraint(compiler, request)
    source, stop_ids = Generation(request["prompt"], 1, seed=request["seed"]), request["stop_ids"]
    while len(ids) < request["max_tokens"]:
        with torch.no_grad():
            logits = model(torch.tensor([[*request["prompt"], *ids]]))[0, -1]
        mask = [True] * TOKENIZER.size if constraint is None else constraint.mask(stop_ids).tolist()
        possible = {token_id for token_id, is_possible in enumerate(mask) if is_possible}
        if len(ids) < request["min_tokens"]:
            possible = possible - stop_ids or possible
        edited = edit_plainly(logits.tolist(), request, ids)
        allowed = [logit if token_id in possible else -math.inf for token_id, logit in enumerate(edited)]
        sampler = Sampler([request["sampling"]], logits.device)
        new_id = int(sampler.sample(torch.tensor([allowed]), torch.tensor([source.next_uniform()])))
        if new_id in stop_ids:
            return ids, "stop", logprobs
        ids.append(new_id)
        logprobs.append(float(logits.float().log_softmax(-1)[new_id]))
        if constraint:
            constraint.advance(new_id)
            if not request["stop_ids"] and constraint.is_complete:
                return ids, "stop", logprobs
    return ids, "length", logprobs


@examples(40)
@given(batch=st.lists(requests, min_size=1, max_size=4), rows=st.integers(1, 3), speculative_tokens=st.integers(0, 5))
def test_generations_equal_the_reference(
    model: TransformerLM,
    compiler: ConstraintCompiler,
    batch: list[dict[str, Any]],
    rows: int,
    speculative_tokens: int,
) -> None:
    generations = [make_generation(compiler, request, speculative_tokens) for request in batch]
    generate(model, generations, rows)
    for generation, request in zip(generations, batch, strict=True):
        ids, finish_reason, logprobs = generate_plainly(model, compiler, request)
        assert (generation.ids, generation.finish_reason) == (ids, finish_reason)
        assert generation.logprobs == pytest.approx(logprobs, abs=1e-4)
        if request["regex"] is None:
            assert finish_reason == "length" or len(ids) >= request["min_tokens"]


def test_the_grammar_has_the_last_word(model: TransformerLM, compiler: ConstraintCompiler) -> None:
    request = {"regex": "abc", "sampling": SAMPLINGS[1], "prompt": [1], "max_tokens": 9, "min_tokens": 7}
    for stop_ids in (frozenset({END}), frozenset[int]()):
        generation = make_generation(
            compiler, {**request, "stop_ids": stop_ids, "seed": 1, "bias": 0.0, "penalty": 1.0}
        )
        generate(model, [generation])
        assert (bytes(generation.ids), generation.finish_reason) == (b"abc", "stop")


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_broken_model_does_not_end_early(odd: float, temperature: float) -> None:
    model = make_model(4, 16).eval()
    with torch.no_grad():
        model.get_parameter("lm_head.weight").fill_(odd)
    generation = Generation(
        [1], 9, SampleConfig(temperature=temperature), frozenset({0, 3}), edits=LogitEdits(min_tokens=6)
    )
    generate(model, [generation])
    assert len(generation.ids) >= 6


def test_a_vocabulary_of_ends_only_ends() -> None:
    generation = Generation([1], 9, stop_ids=frozenset(range(4)), edits=LogitEdits(min_tokens=6))
    generate(make_model(4, 16).eval(), [generation])
    assert (generation.ids, generation.finish_reason) == ([], "stop")


texts = st.text(st.sampled_from("abé漢"), max_size=12)


@examples(300)
@given(
    text=texts,
    stops=st.lists(st.text("abé漢", max_size=3), max_size=3),
    min_tokens=st.integers(0, 8),
    data=st.data(),
)
def test_a_stop_text_ends_the_text_only_if_a_late_token_completes_it(
    text: str, stops: list[str], min_tokens: int, data: st.DataObject
) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=10)) | {0, len(raw)})
    parts = {number: raw[start:end] for number, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False))}
    expected, is_stopped = text, False
    for end in range(1, len(text) + 1):
        size = len(text[:end].encode())
        num_tokens = next(number for number in range(1, len(parts) + 1) if cuts[number] >= size)
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete and num_tokens >= min_tokens:
            expected, is_stopped = text[: end - max(map(len, complete))], True
            break
    stream = TextStream(parts, stops, min_tokens)
    assert "".join(map(stream.add, parts)) + stream.finish() == expected
    assert stream.is_stopped == is_stopped


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 2), (2, 2), (3, 3), (7, 7), (9, 9)])
def test_a_stop_text_ends_the_generation_when_enough_tokens_are_there(min_tokens: int, num_tokens: int) -> None:
    logits = [0.0] * TOKENIZER.size
    logits[97] = 50.0
    config = SampleConfig(temperature=0, max_new_tokens=9, stop=["aa"])
    text = TextGeneration(TOKENIZER, [1], config, 0, edits=LogitEdits(min_tokens=min_tokens))
    generate(fixed_model(logits, 16), [text.generation])
    assert (len(text.generation.ids), text.generation.finish_reason) == (num_tokens, "stop")
    assert text.finish() == "a" * (num_tokens - 2)
