"""The sampler: its distribution equals a reference, and samples follow it."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lm.inference.sampler
from lm.common.errors import UserError
from lm.inference.config import SampleConfig
from lm.inference.sampler import LogitEditor, LogitEdits, Sampler, score_tokens
from tests.helpers.examples import examples


def probabilities(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0, **more: float) -> Tensor:
    """Return the sampler's probabilities for logits (..., V) with the same settings in all rows."""
    rows = logits.reshape(-1, logits.shape[-1])
    sampling = SampleConfig(temperature=temperature, top_p=top_p, **more)  # type: ignore[arg-type]
    return Sampler([sampling] * len(rows), logits.device).probabilities(rows).view(logits.shape)


def exact_softmax(logits: list[float], temperature: float) -> list[float]:
    """Return the softmax with a temperature, in double precision."""
    top = max(logits)
    weights = [math.exp((logit - top) / temperature) for logit in logits]
    return [weight / math.fsum(weights) for weight in weights]


finite = st.floats(-20, 20, width=32)
some_logits = st.tuples(finite, st.lists(finite | st.just(-math.inf), max_size=12)).map(
    lambda pair: [pair[0], *pair[1]]
)


@examples(200)
@given(logits=some_logits, temperature=st.floats(0.05, 20), top_p=st.floats(0, 1))
def test_top_p_keeps_the_smallest_nucleus(logits: list[float], temperature: float, top_p: float) -> None:
    expected = exact_softmax(logits, temperature)
    actual = probabilities(torch.tensor(logits), temperature, top_p).tolist()
    chosen = [i for i, p in enumerate(actual) if p > 0]
    assert chosen, "never empty"
    mass = math.fsum(expected[i] for i in chosen)
    assert actual == pytest.approx(
        [p / mass if i in chosen else 0.0 for i, p in enumerate(expected)], rel=1e-4, abs=1e-5
    )
    assert mass >= top_p - 1e-5
    if len(chosen) > 1:
        least = min(expected[i] for i in chosen)
        assert mass - least < top_p + 1e-5, "without its last token the nucleus is too small"
        assert least >= max((p for i, p in enumerate(expected) if i not in chosen), default=0) - 1e-6


@examples(50)
@given(logits=some_logits, temperature=st.floats(0.05, 20))
def test_top_p_1_keeps_all_tokens_and_0_the_most_likely(logits: list[float], temperature: float) -> None:
    whole = probabilities(torch.tensor(logits), temperature, 1.0)
    assert whole.tolist() == pytest.approx(exact_softmax(logits, temperature), rel=1e-4, abs=1e-6)
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
def test_nucleus_of_known_probabilities(top_p: float, expected: list[float]) -> None:
    logits = torch.tensor([1 / 8, 1 / 2, 1 / 8, 1 / 4]).log()
    actual = probabilities(logits, 1.0, top_p).tolist()
    if top_p == 0.8:  # either of the two equal tokens
        assert sorted(actual) == pytest.approx(sorted(expected))
    else:
        assert actual == pytest.approx(expected)


@pytest.mark.parametrize("top_p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-42, 1e-30, 1e-5])
def test_low_temperature_takes_the_most_likely_token(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[1.0, 30.0, 2.0], [-5.0, -math.inf, -90.0]])
    assert probabilities(logits, temperature, top_p).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_equal_logits_have_equal_probabilities() -> None:
    assert probabilities(torch.full((8,), 3.0), 0.7, 1.0).tolist() == pytest.approx([1 / 8] * 8)
    half = probabilities(torch.full((8,), 3.0), 0.7, 0.5)
    assert sorted(half.tolist()) == pytest.approx([0] * 4 + [1 / 4] * 4)
    assert sorted(probabilities(torch.full((8,), 3.0), 0.0, 1.0).tolist()) == [0] * 7 + [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [0.0, 0.9, 1.0])
def test_one_token_vocabulary(temperature: float, top_p: float) -> None:
    assert probabilities(torch.tensor([-3.0]), temperature, top_p).tolist() == [1.0]


def test_rows_are_independent_and_the_input_is_unchanged() -> None:
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


def reference_probabilities(logits: list[float], sampling: SampleConfig) -> list[float]:
    """Return the sampling distribution, token by token in double precision. Ties go to the lower id."""
    weights = exact_softmax(logits, sampling.temperature)
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


sample_configs = st.builds(
    SampleConfig,
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.05, 0.37, 0.71, 0.93]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
)


@examples(200)
@given(rows=st.lists(st.tuples(st.permutations(range(13)), sample_configs), min_size=1, max_size=4))
def test_rows_with_different_settings_equal_the_reference(rows: list[tuple[list[int], SampleConfig]]) -> None:
    logits = [[0.37 * x - 1 for x in order] for order, _ in rows]
    actual = Sampler([sampling for _, sampling in rows], torch.device("cpu")).probabilities(torch.tensor(logits))
    for ours, row, (_, sampling) in zip(actual.tolist(), logits, rows, strict=True):
        assert ours == pytest.approx(reference_probabilities(row, sampling), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("top_k", [0, 3, 40])
@pytest.mark.parametrize("top_p", [0.3, 0.999, 1.0])
def test_partial_sort_equals_full_sort(monkeypatch: pytest.MonkeyPatch, top_k: int, top_p: float) -> None:
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(0)) * 4
    all_sorted = probabilities(logits, 0.7, top_p, top_k=top_k)
    monkeypatch.setattr(lm.inference.sampler, "_PARTIAL_SORT_SIZE", 30)
    torch.testing.assert_close(probabilities(logits, 0.7, top_p, top_k=top_k), all_sorted)


@pytest.mark.parametrize(("top_k", "top_p"), [(40, 1.0), (0, 0.9), (40, 0.9), (8, 0.5)])
def test_ties_go_to_the_lower_id_whatever_the_batch(top_k: int, top_p: float) -> None:
    """Logits rounded to bfloat16 have many ties. The batch decides whether the sort is partial."""
    generator = torch.Generator().manual_seed(0)
    config = SampleConfig(1.0, top_k, top_p)
    for _ in range(40):
        logits = torch.randn(1, 5000, generator=generator).mul(3).bfloat16().float()
        alone = Sampler([config], logits.device).probabilities(logits)
        beside = Sampler([config, SampleConfig(1.0, 0, 1.0)], logits.device).probabilities(logits.expand(2, -1))
        assert alone[0].equal(beside[0])
        kept = alone[0] > 0
        least = logits[0][kept].min()
        ties = (logits[0] == least).nonzero().flatten()
        assert kept[ties].int().diff().le(0).all(), "the first of the tied tokens"


@pytest.mark.parametrize(
    "logits", [[math.inf, 0.0, 1.0], [math.nan, 0.0, 1.0], [math.inf] * 3, [math.nan] * 3, [-math.inf, math.nan, 0.0]]
)
@pytest.mark.parametrize("penalty", [1.0, 1e-39])
def test_infinite_and_nan_logits_give_valid_ids(logits: list[float], penalty: float) -> None:
    editor = LogitEditor(LogitEdits(2.0, 2.0, {0: 100.0}), penalty, [0, 1, 2], 3, torch.device("cpu"))
    editor.record(1)
    for uniform in (1e-9, 0.5, 1.0):
        sampler = Sampler([SampleConfig(1.0, 0, 1.0)], torch.device("cpu"))
        token_id = sampler.sample(editor.edit(torch.tensor(logits))[None], torch.tensor([uniform]))
        assert 0 <= int(token_id) < 3


def test_samples_follow_the_probabilities() -> None:
    logits = torch.tensor([0.3, 1.2, -0.4, 0.9, -1.5])
    generator = torch.Generator().manual_seed(0)
    for sampling in (
        SampleConfig(1.0, 0, 1.0),
        SampleConfig(0.5, 4, 1.0),
        SampleConfig(1.0, 0, 0.8),
        SampleConfig(2.0, 0, 1.0, 0.3),
    ):
        count = 20_000
        sampler = Sampler([sampling] * count, logits.device)
        ids = sampler.sample(logits.expand(count, -1), 1 - torch.rand(count, generator=generator))
        expected, counts = reference_probabilities(logits.tolist(), sampling), Counter(ids.tolist())
        assert all(expected[token_id] > 0 for token_id in counts)
        chi_square = sum((counts[i] - count * p) ** 2 / (count * p) for i, p in enumerate(expected) if p > 0)
        assert chi_square < 18.5, "the 99.9 % quantile for five tokens"


def test_tokens_of_probability_0_are_never_sampled() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    sampler = Sampler([SampleConfig(1.0, 0, 1.0)], logits.device)
    for uniform, config in ((1e-30, 1), (0.5, 1), (0.51, 3), (1.0, 3)):
        assert sampler.sample(logits, torch.tensor([uniform])).item() == config


@pytest.mark.parametrize(
    "sampling", [SampleConfig(), SampleConfig(0), SampleConfig(1.0, 2, 0.5, 0.1), SampleConfig(1.0, 0, 0.0)]
)
def test_row_of_minus_infinity_is_uniform(sampling: SampleConfig) -> None:
    logits = torch.full((1, 6), -math.inf)
    actual = Sampler([sampling], logits.device).probabilities(logits)
    assert actual.sum().item() == pytest.approx(1) and not actual.isnan().any()


@examples(40)
@given(rows=st.integers(1, 4), size=st.integers(1, 9), count=st.integers(0, 12))
def test_scores_equal_log_softmax(rows: int, size: int, count: int) -> None:
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    expected = logits.double().log_softmax(-1).tolist()
    ids = [row % size for row in range(rows)]
    for row, score in enumerate(score_tokens(logits, torch.tensor(ids), count)):
        assert score.logprob == pytest.approx(expected[row][ids[row]], abs=1e-5)
        ranked = sorted(range(size), key=lambda i: -expected[row][i])[:count]
        assert [token_id for token_id, _ in score.alternatives] == ranked
        assert [value for _, value in score.alternatives] == pytest.approx([expected[row][i] for i in ranked], abs=1e-5)
        assert score.logprob == dict(score.alternatives).get(ids[row], score.logprob), "bit for bit"


@pytest.mark.parametrize(
    "bad", [{"top_k": -1}, {"min_p": 1.1}, {"min_p": math.nan}, {"repetition_penalty": 0}], ids=str
)
def test_bad_sampling_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"sample.{next(iter(bad))} is"):
        SampleConfig(**bad)  # type: ignore[arg-type]
