"""Sampling: the exact distribution, draws that follow it, where it stops, and prompts that users type."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lm.generate
from lm.errors import UserError
from lm.generate import SampleConfig, complete, generate, next_token_probabilities
from lm.model import ModelConfig, TransformerLM
from lm.tokenizer import Tokenizer

END = "<|endoftext|>"


def make_model(vocab_size: int = 11, context_length: int = 4) -> TransformerLM:
    """A model with random weights, large enough that its next token depends on what came before."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=vocab_size, context_length=context_length, d_model=16, num_layers=2, num_heads=2)
    return TransformerLM(config)


def fixed_model(logits: list[float], context_length: int = 2) -> TransformerLM:
    """A model whose next-token logits are ``logits``, whatever came before."""
    config = ModelConfig(len(logits), context_length, d_model=4, num_layers=1, num_heads=1, d_ff=4)
    model = TransformerLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.token_embeddings.weight.fill_(1000.0)
        model.ln_final.weight.fill_(0.25)
        model.lm_head.weight.copy_(torch.tensor(logits)[:, None].expand(-1, 4))
    return model


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Bytes, and one special token with the id 256."""
    return Tokenizer({byte: bytes([byte]) for byte in range(256)}, [], [END])


def exact(logits: list[float], temperature: float) -> list[float]:
    """Softmax of the logits over the temperature, in double precision."""
    top = max(logits)
    weights = [math.exp((logit - top) / temperature) for logit in logits]
    return [weight / math.fsum(weights) for weight in weights]


finite = st.floats(-20, 20, width=32)
some_logits = st.tuples(finite, st.lists(finite | st.just(-math.inf), max_size=12)).map(
    lambda pair: [pair[0], *pair[1]]
)


@settings(deadline=None, max_examples=200)
@given(logits=some_logits, temperature=st.floats(0.05, 20), top_p=st.floats(0, 1))
def test_probabilities_are_the_smallest_nucleus_of_the_softmax(
    logits: list[float], temperature: float, top_p: float
) -> None:
    expected = exact(logits, temperature)
    found = next_token_probabilities(torch.tensor(logits), temperature, top_p).tolist()
    chosen = [i for i, p in enumerate(found) if p > 0]
    assert chosen, "never empty"
    mass = math.fsum(expected[i] for i in chosen)
    assert found == pytest.approx(
        [p / mass if i in chosen else 0.0 for i, p in enumerate(expected)], rel=1e-4, abs=1e-5
    )
    assert mass >= top_p - 1e-5
    if len(chosen) > 1:
        least = min(expected[i] for i in chosen)
        assert mass - least < top_p + 1e-5, "one token fewer would not do"
        assert least >= max((p for i, p in enumerate(expected) if i not in chosen), default=0) - 1e-6


@settings(deadline=None, max_examples=50)
@given(logits=some_logits, temperature=st.floats(0.05, 20))
def test_top_p_one_is_the_whole_softmax_and_zero_the_likeliest(logits: list[float], temperature: float) -> None:
    whole = next_token_probabilities(torch.tensor(logits), temperature, 1.0)
    assert whole.tolist() == pytest.approx(exact(logits, temperature), rel=1e-4, abs=1e-6)
    one = next_token_probabilities(torch.tensor(logits), temperature, 0.0)
    assert sorted(one.tolist()) == [0.0] * (len(logits) - 1) + [1.0]
    assert whole[one.argmax()] == whole.max()


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.5, [0, 1, 0, 0]),
        (0.50001, [0, 2 / 3, 0, 1 / 3]),
        (0.75, [0, 2 / 3, 0, 1 / 3]),
        (0.8, [0, 4 / 7, 1 / 7, 2 / 7]),
        (0.9, [1 / 8, 1 / 2, 1 / 8, 1 / 4]),
    ],
)
def test_nucleus_by_hand(top_p: float, expected: list[float]) -> None:
    logits = torch.tensor([1 / 8, 1 / 2, 1 / 8, 1 / 4]).log()
    found = next_token_probabilities(logits, 1.0, top_p).tolist()
    if top_p == 0.8:  # either of two equals
        assert sorted(found) == pytest.approx(sorted(expected))
    else:
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("top_p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-42, 1e-30, 1e-5])
def test_low_temperature_is_the_likeliest_token(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[1.0, 30.0, 2.0], [-5.0, -math.inf, -90.0]])
    assert next_token_probabilities(logits, temperature, top_p).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_equal_logits_share_evenly() -> None:
    assert next_token_probabilities(torch.full((8,), 3.0), 0.7, 1.0).tolist() == pytest.approx([1 / 8] * 8)
    half = next_token_probabilities(torch.full((8,), 3.0), 0.7, 0.5)
    assert sorted(half.tolist()) == pytest.approx([0] * 4 + [1 / 4] * 4)
    assert sorted(next_token_probabilities(torch.full((8,), 3.0), 0.0, 1.0).tolist()) == [0] * 7 + [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [0.0, 0.9, 1.0])
def test_one_token_vocabulary(temperature: float, top_p: float) -> None:
    assert next_token_probabilities(torch.tensor([-3.0]), temperature, top_p).tolist() == [1.0]


def test_rows_are_independent_and_input_is_left_alone() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    together = next_token_probabilities(logits, 0.8, 0.9)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(together[i, j], next_token_probabilities(logits[i, j], 0.8, 0.9))
    assert torch.equal(logits, before)


# generate


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.8)])
def test_draws_follow_the_probabilities(temperature: float, top_p: float) -> None:
    logits = [0.3, 1.2, -0.4, 0.9, -1.5]
    expected = next_token_probabilities(torch.tensor(logits), temperature, top_p).tolist()
    draws = 1500
    counts = Counter(generate(fixed_model(logits), [0], draws, temperature, top_p, seed=7))
    assert sum(counts.values()) == draws
    assert all(expected[token_id] > 0 for token_id in counts)
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in enumerate(expected) if p > 0)
    assert chi_square < 18.5, "99.9 % of fair draws over five tokens are below"


def test_seed_decides_the_ids() -> None:
    model = make_model()
    first = list(generate(model, [1, 2], 30, seed=5))
    torch.manual_seed(99)  # the global generator has no say
    assert list(generate(model, [1, 2], 30, seed=5)) == first
    assert list(generate(model, [1, 2], 30, seed=6)) != first


def naive_greedy(model: TransformerLM, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids[-model.config.context_length :]]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("prompt", [[3], [1, 2, 3, 4], [5, 4, 3, 2, 1, 0, 7, 8]], ids=["short", "full", "longer"])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 0.0)])
def test_greedy_is_argmax_past_the_context_too(prompt: list[int], temperature: float, top_p: float) -> None:
    model = make_model()
    found = list(generate(model, prompt, 20, temperature, top_p))
    assert found == naive_greedy(model, prompt, 20)


def test_only_the_last_context_length_tokens_count() -> None:
    model = make_model()
    seen: list[list[int]] = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0].tolist()))
    found = list(generate(model, [1, 2, 3], 5, seed=1))
    ids = [1, 2, 3, *found]
    assert seen == [ids[max(0, end - 4) : end] for end in range(3, 8)]


def test_stops_before_a_stop_id() -> None:
    model = make_model()
    whole = list(generate(model, [1], 40, seed=3))
    for stop in set(whole):
        assert list(generate(model, [1], 40, stop_ids=[stop], seed=3)) == whole[: whole.index(stop)]
    stops = {whole[10], whole[20]}
    first = min(map(whole.index, stops))
    assert list(generate(model, [1], 40, stop_ids=stops, seed=3)) == whole[:first]
    absent = set(range(11)) - set(whole)
    assert list(generate(model, [1], 40, stop_ids=absent, seed=3)) == whole


def test_a_stop_id_in_the_prompt_does_not_stop() -> None:
    assert list(generate(fixed_model([0.0, 9.0]), [0, 0], 3, temperature=0, stop_ids=[0])) == [1, 1, 1]


def test_no_new_tokens() -> None:
    assert list(generate(make_model(), [1], 0)) == []


def test_is_lazy_and_keeps_no_gradients() -> None:
    model = make_model()
    ids = generate(model, [1], 10**12)
    assert [next(ids), next(ids)] == list(generate(model, [1], 2))
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), "between two ids the caller is outside"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("prompt", "message"), [([], "empty"), ([3, 11], "11"), ([-1], "-1"), ([2**40], "outside")])
def test_bad_prompt_is_a_user_error(prompt: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(generate(make_model(), prompt, 3))


# complete


def always(token_id: int, size: int = 257) -> TransformerLM:
    logits = [0.0] * size
    logits[token_id] = 50.0
    return fixed_model(logits)


def test_complete_gives_the_new_text_only(tokenizer: Tokenizer) -> None:
    config = SampleConfig(max_new_tokens=4, temperature=0)
    assert complete(always(ord("a")), tokenizer, "Once", config, seed=0) == "aaaa"


def test_complete_stops_at_a_special_token(tokenizer: Tokenizer) -> None:
    assert complete(always(256), tokenizer, "Once", SampleConfig(), seed=0) == ""


def test_complete_of_another_tokenizer_is_a_user_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"258.*257.*do not belong together"):
        complete(always(0, 258), tokenizer, "Once", SampleConfig(), seed=0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments that ``complete`` gives to ``generate``, without the model."""
    calls: list[tuple[Any, ...]] = []

    def record(model: TransformerLM, *arguments: Any) -> list[int]:
        calls.append(arguments)
        return [ord("x")]

    monkeypatch.setattr(lm.generate, "generate", record)
    return calls


def test_special_tokens_in_the_prompt_are_plain_text(tokenizer: Tokenizer, asked: list[tuple[Any, ...]]) -> None:
    assert complete(always(0), tokenizer, f"a{END}b", SampleConfig(), seed=0) == "x"
    assert asked[0][0] == list(f"a{END}b".encode())


def test_empty_prompt_begins_a_document(tokenizer: Tokenizer, asked: list[tuple[Any, ...]]) -> None:
    complete(always(0), tokenizer, "", SampleConfig(), seed=0)
    assert asked[0][0] == [256]


def test_complete_passes_the_config_on(tokenizer: Tokenizer, asked: list[tuple[Any, ...]]) -> None:
    config = SampleConfig(max_new_tokens=17, temperature=0.3, top_p=0.4, seed=1)
    complete(always(0), tokenizer, "a", config, seed=5)
    assert asked == [([97], 17, 0.3, 0.4, {256}, 5)]


def test_empty_prompt_without_special_tokens_is_a_user_error() -> None:
    plain = Tokenizer({byte: bytes([byte]) for byte in range(256)}, [])
    with pytest.raises(UserError, match="empty"):
        complete(always(0, 256), plain, "", SampleConfig(), seed=0)


def test_complete_of_broken_characters_replaces_them(tokenizer: Tokenizer) -> None:
    """A model may well draw half of a character."""
    text = complete(always(0xC3), tokenizer, "é", SampleConfig(max_new_tokens=2, temperature=0), seed=0)
    assert text == "\ufffd\ufffd"


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": -0.01},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"max_new_tokens": -1},
    ],
    ids=str,
)
def test_bad_sample_config_is_a_user_error(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"sample.{next(iter(bad))} is"):
        SampleConfig(**bad)


def test_probabilities_of_half_precision_logits() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    halves: Tensor = next_token_probabilities(logits.bfloat16(), 1.0, 0.9)
    torch.testing.assert_close(halves, next_token_probabilities(logits, 1.0, 0.9))
