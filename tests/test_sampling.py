"""How a token is drawn: the exact distribution, and draws that follow it."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lm.sampling
from lm.errors import UserError
from lm.sampling import Drawing, SampleConfig, log_probabilities


def probabilities(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0, **more: float) -> Tensor:
    """The probabilities of one row of logits, or of several with the same settings."""
    rows = logits.reshape(-1, logits.shape[-1])
    sampling = SampleConfig(temperature=temperature, top_p=top_p, **more)  # type: ignore[arg-type]
    return Drawing([sampling] * len(rows), logits.device).probabilities(rows).view(logits.shape)


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
    found = probabilities(torch.tensor(logits), temperature, top_p).tolist()
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
    whole = probabilities(torch.tensor(logits), temperature, 1.0)
    assert whole.tolist() == pytest.approx(exact(logits, temperature), rel=1e-4, abs=1e-6)
    one = probabilities(torch.tensor(logits), temperature, 0.0)
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
    found = probabilities(logits, 1.0, top_p).tolist()
    if top_p == 0.8:  # either of two equals
        assert sorted(found) == pytest.approx(sorted(expected))
    else:
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("top_p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-42, 1e-30, 1e-5])
def test_low_temperature_is_the_likeliest_token(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[1.0, 30.0, 2.0], [-5.0, -math.inf, -90.0]])
    assert probabilities(logits, temperature, top_p).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_equal_logits_share_evenly() -> None:
    assert probabilities(torch.full((8,), 3.0), 0.7, 1.0).tolist() == pytest.approx([1 / 8] * 8)
    half = probabilities(torch.full((8,), 3.0), 0.7, 0.5)
    assert sorted(half.tolist()) == pytest.approx([0] * 4 + [1 / 4] * 4)
    assert sorted(probabilities(torch.full((8,), 3.0), 0.0, 1.0).tolist()) == [0] * 7 + [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [0.0, 0.9, 1.0])
def test_one_token_vocabulary(temperature: float, top_p: float) -> None:
    assert probabilities(torch.tensor([-3.0]), temperature, top_p).tolist() == [1.0]


def test_rows_are_independent_and_input_is_left_alone() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    together = probabilities(logits, 0.8, 0.9)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(together[i, j], probabilities(logits[i, j], 0.8, 0.9))
    assert torch.equal(logits, before)


def test_probabilities_of_half_precision_logits() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    halves: Tensor = probabilities(logits.bfloat16(), 1.0, 0.9)
    torch.testing.assert_close(halves, probabilities(logits, 1.0, 0.9))


def by_definition(logits: list[float], sampling: SampleConfig) -> list[float]:
    """The probabilities token by token, in double precision, with ties going to the lower id."""
    weights = exact(logits, sampling.temperature)
    ranked = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total = math.fsum(weights[i] for i in ranked)
    kept: list[int] = []
    for i in ranked:
        if kept and sampling.top_p < 1 and math.fsum(weights[j] for j in kept) >= sampling.top_p * total:
            break
        kept.append(i)
    kept = [i for i in kept if weights[i] >= sampling.min_p * weights[ranked[0]]]
    total = math.fsum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


settings_of_a_row = st.builds(
    SampleConfig,
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.05, 0.37, 0.71, 0.93]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
)


@settings(deadline=None, max_examples=200)
@given(rows=st.lists(st.tuples(st.permutations(range(13)), settings_of_a_row), min_size=1, max_size=4))
def test_rows_with_settings_of_their_own_are_as_defined(rows: list[tuple[list[int], SampleConfig]]) -> None:
    logits = [[0.37 * x - 1 for x in order] for order, _ in rows]
    found = Drawing([sampling for _, sampling in rows], torch.device("cpu")).probabilities(torch.tensor(logits))
    for ours, row, (_, sampling) in zip(found.tolist(), logits, rows, strict=True):
        assert ours == pytest.approx(by_definition(row, sampling), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("top_k", [0, 3, 40])
@pytest.mark.parametrize("top_p", [0.3, 0.999, 1.0])
def test_few_of_the_likeliest_are_as_good_as_all(monkeypatch: pytest.MonkeyPatch, top_k: int, top_p: float) -> None:
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(0)) * 4
    all_sorted = probabilities(logits, 0.7, top_p, top_k=top_k)
    monkeypatch.setattr(lm.sampling, "_FEW", 30)
    torch.testing.assert_close(probabilities(logits, 0.7, top_p, top_k=top_k), all_sorted)


@pytest.mark.parametrize(("top_k", "top_p"), [(40, 1.0), (0, 0.9), (40, 0.9), (8, 0.5)])
def test_among_equals_the_lower_id_is_kept_whoever_is_beside(top_k: int, top_p: float) -> None:
    """bfloat16 has few values, and so many ties; how many of the likeliest are looked at depends on the batch."""
    generator = torch.Generator().manual_seed(0)
    wanted = SampleConfig(1.0, top_k, top_p)
    for _ in range(40):
        logits = torch.randn(1, 5000, generator=generator).mul(3).bfloat16().float()
        alone = Drawing([wanted], logits.device).probabilities(logits)
        beside = Drawing([wanted, SampleConfig(1.0, 0, 1.0)], logits.device).probabilities(logits.expand(2, -1))
        assert alone[0].equal(beside[0])
        kept = alone[0] > 0
        least = logits[0][kept].min()
        ties = (logits[0] == least).nonzero().flatten()
        assert kept[ties].int().diff().le(0).all(), "of equals the first ones"


@pytest.mark.parametrize(
    "logits", [[math.inf, 0.0, 1.0], [math.nan, 0.0, 1.0], [math.inf] * 3, [math.nan] * 3, [-math.inf, math.nan, 0.0]]
)
@pytest.mark.parametrize("penalty", [1.0, 1e-39])
def test_what_is_no_number_is_no_id_outside(logits: list[float], penalty: float) -> None:
    seen = torch.ones(1, 3, dtype=torch.bool)
    for uniform in (1e-9, 0.5, 1.0):
        drawing = Drawing([SampleConfig(1.0, 0, 1.0, 0.0, penalty)], torch.device("cpu"))
        drawn = drawing.draw(torch.tensor([logits]), torch.tensor([uniform]), seen)
        assert 0 <= int(drawn) < 3


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.3, 1.2, -0.4, 0.9, -1.5])
    generator = torch.Generator().manual_seed(0)
    for sampling in (
        SampleConfig(1.0, 0, 1.0),
        SampleConfig(0.5, 4, 1.0),
        SampleConfig(1.0, 0, 0.8),
        SampleConfig(2.0, 0, 1.0, 0.3),
    ):
        draws = 20_000
        drawing = Drawing([sampling] * draws, logits.device)
        ids = drawing.draw(logits.expand(draws, -1), 1 - torch.rand(draws, generator=generator))
        expected, counts = by_definition(logits.tolist(), sampling), Counter(ids.tolist())
        assert all(expected[token_id] > 0 for token_id in counts)
        chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in enumerate(expected) if p > 0)
        assert chi_square < 18.5, "99.9 % of fair draws over five tokens are below"


def test_no_draw_is_of_a_token_without_probability() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    drawing = Drawing([SampleConfig(1.0, 0, 1.0)], logits.device)
    for uniform, wanted in ((1e-30, 1), (0.5, 1), (0.51, 3), (1.0, 3)):
        assert drawing.draw(logits, torch.tensor([uniform])).item() == wanted


@pytest.mark.parametrize(
    "sampling", [SampleConfig(), SampleConfig(0), SampleConfig(1.0, 2, 0.5, 0.1), SampleConfig(1.0, 0, 0.0)]
)
def test_impossible_tokens_alone_are_as_likely_as_each_other(sampling: SampleConfig) -> None:
    logits = torch.full((1, 6), -math.inf)
    found = Drawing([sampling], logits.device).probabilities(logits)
    assert found.sum().item() == pytest.approx(1) and not found.isnan().any()


def test_a_repetition_costs_what_it_says() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.5, 0.0]])
    seen = torch.tensor([[True, True, False, False]])
    drawing = Drawing([SampleConfig(0, repetition_penalty=1.4)], logits.device)
    assert drawing.draw(logits, torch.ones(1)).item() == 0
    assert drawing.draw(logits, torch.ones(1), seen).item() == 2  # 2 / 1.4 < 1.5
    negative = torch.tensor([[-1.0, -1.2]])
    assert drawing.draw(negative, torch.ones(1), torch.tensor([[True, False]])).item() == 1  # -1 · 1.4 < -1.2


def test_log_probabilities_are_the_models() -> None:
    logits = torch.randn(3, 5, 9)
    ids = torch.randint(9, (3, 5))
    expected = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(log_probabilities(logits, ids), expected)


@pytest.mark.parametrize(
    "bad", [{"top_k": -1}, {"min_p": 1.1}, {"min_p": math.nan}, {"repetition_penalty": 0}], ids=str
)
def test_bad_sampling_is_a_user_error(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"sample.{next(iter(bad))} is"):
        SampleConfig(**bad)  # type: ignore[arg-type]
