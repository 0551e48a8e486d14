"""Batches: shapes, the shift by one, uniform starts, and data that is too short."""

import threading
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data import batch_starts, check_length, get_batch, prefetched, windows
from lm.errors import UserError

FEW = settings(deadline=None, max_examples=30)


@FEW
@given(
    extra=st.integers(1, 50),
    batch_size=st.integers(1, 9),
    context_length=st.integers(1, 20),
    dtype=st.sampled_from([np.uint16, np.uint32, np.int32, np.int64]),
    seed=st.integers(0, 10**6),
)
def test_batch_is_windows_of_the_data(
    extra: int, batch_size: int, context_length: int, dtype: type[np.generic], seed: int
) -> None:
    """The data are its own places, so that each row shows where it was taken from."""
    tokens = np.arange(context_length + extra).astype(dtype)
    x, y = get_batch(tokens, batch_size, context_length, "cpu", np.random.default_rng(seed))
    assert x.shape == y.shape == (batch_size, context_length)
    assert x.dtype == y.dtype == torch.int64
    assert x.device.type == y.device.type == "cpu"
    assert torch.equal(x, x[:, :1] + torch.arange(context_length))
    assert torch.equal(y, x + 1)
    assert x.min() >= 0 and y.max() < len(tokens)


def test_ids_past_int16_keep_their_value() -> None:
    tokens = np.array([65535, 40000, 1], dtype=np.uint16)
    x, y = get_batch(tokens, 1, 2, "cpu")
    assert x.tolist() == [[65535, 40000]] and y.tolist() == [[40000, 1]]


def test_every_start_comes_about_as_often() -> None:
    """Each count is binomial; five standard deviations hold for this seed with much room (CS336's own test)."""
    length, context_length, batch_size, rounds = 100, 7, 32, 1000
    generator = np.random.default_rng(0)
    starts: Counter[int] = Counter()
    for _ in range(rounds):
        x, _ = get_batch(np.arange(length), batch_size, context_length, "cpu", generator)
        starts.update(x[:, 0].tolist())
    possible = length - context_length
    assert set(starts) == set(range(possible)), "the first and the last start included, none past them"
    expected = rounds * batch_size / possible
    deviation = (rounds * batch_size * (1 / possible) * (1 - 1 / possible)) ** 0.5
    assert all(abs(count - expected) < 5 * deviation for count in starts.values())


def test_generator_makes_the_draw_repeatable() -> None:
    tokens = np.arange(1000)
    first, second = np.random.default_rng(5), np.random.default_rng(5)
    batches = [get_batch(tokens, 4, 8, "cpu", first) for _ in range(3)]
    for x, y in batches:
        again_x, again_y = get_batch(tokens, 4, 8, "cpu", second)
        assert torch.equal(x, again_x) and torch.equal(y, again_y)
    assert not torch.equal(batches[0][0], batches[1][0])


def test_without_generator_draws_differ() -> None:
    tokens = np.arange(100_000)
    assert not torch.equal(get_batch(tokens, 8, 4, "cpu")[0], get_batch(tokens, 8, 4, "cpu")[0])


def test_memmap_gives_the_same_batches(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 2**16, 500).astype(np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    ours = get_batch(mapped, 6, 16, "cpu", np.random.default_rng(1))
    expected = get_batch(tokens, 6, 16, "cpu", np.random.default_rng(1))
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])


def test_batch_does_not_share_memory_with_the_data() -> None:
    tokens = np.arange(50)
    x, y = get_batch(tokens, 2, 8, "cpu")
    x.fill_(-1)
    assert torch.equal(y[:, 1:], y[:, :-1] + 1) and np.array_equal(tokens, np.arange(50))


def test_exactly_one_window() -> None:
    x, y = get_batch(np.arange(9), 3, 8, "cpu")
    assert x.tolist() == [list(range(8))] * 3
    assert y.tolist() == [list(range(1, 9))] * 3


@pytest.mark.parametrize("length", [0, 1, 7, 8])
def test_too_few_tokens_is_a_user_error(length: int) -> None:
    with pytest.raises(UserError, match=rf"{length} tokens.*8.*context_length"):
        get_batch(np.arange(length), 3, 8, "cpu")


def test_length_check_names_the_data() -> None:
    check_length(np.arange(9), 8)
    with pytest.raises(UserError, match="validation split has 8 tokens"):
        check_length(np.arange(8), 8, "validation split")


def test_windows_at_given_starts() -> None:
    x, y = windows(np.arange(10) * 10, [4, 0, 4], 3, "cpu")
    assert x.tolist() == [[40, 50, 60], [0, 10, 20], [40, 50, 60]]
    assert y.tolist() == [[50, 60, 70], [10, 20, 30], [50, 60, 70]]


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here"))]
)
def test_batch_on_an_accelerator(device: str) -> None:
    tokens = np.arange(100)
    x, y = get_batch(tokens, 4, 8, device, np.random.default_rng(0))
    expected = get_batch(tokens, 4, 8, "cpu", np.random.default_rng(0))
    assert x.device.type == device
    assert torch.equal(x.cpu(), expected[0]) and torch.equal(y.cpu(), expected[1])


# The order of a training's data


@FEW
@given(
    windows_=st.integers(1, 12), batch_size=st.integers(1, 9), context_length=st.integers(1, 5), seed=st.integers(0, 99)
)
def test_every_window_once_an_epoch(windows_: int, batch_size: int, context_length: int, seed: int) -> None:
    length = windows_ * context_length + 1 + seed % context_length  # what is left over is no window
    steps = -(-3 * windows_ // batch_size)
    starts = [batch_starts(length, batch_size, context_length, "epochs", seed, step) for step in range(steps)]
    drawn = [start for batch in starts for start in batch]
    whole = [i * context_length for i in range(windows_)]
    epochs = [drawn[i * windows_ : (i + 1) * windows_] for i in range(3)]
    assert all(sorted(epoch) == whole for epoch in epochs)
    if windows_ > 8:
        assert not epochs[0] == epochs[1] == epochs[2], "another order each epoch"
    assert starts[-1] == batch_starts(length, batch_size, context_length, "epochs", seed, steps - 1), (
        "of the step alone"
    )


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_order_is_of_the_seed(order: Literal["random", "epochs"]) -> None:
    batches = [batch_starts(10_001, 64, 10, order, seed, 3) for seed in (0, 0, 1)]
    assert batches[0] == batches[1] != batches[2]


def test_random_order_reaches_every_start() -> None:
    drawn = {start for step in range(200) for start in batch_starts(30, 8, 10, "random", 0, step)}
    assert drawn == set(range(20))


def test_batches_are_made_ahead_by_another_thread() -> None:
    made: list[tuple[int, bool]] = []
    ready = threading.Event()

    def make(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        made.append((step, threading.current_thread() is threading.main_thread()))
        if step == 6:
            ready.set()
        return torch.tensor([step]), torch.tensor([step + 1])

    with prefetched(make, 5) as batch:
        assert batch(5)[0].item() == 5
        assert ready.wait(10), "the next one is made before it is asked for"
        assert batch(6)[0].item() == 6
    assert made == [(5, False), (6, False), (7, False)]


def test_an_error_in_making_a_batch_comes_out() -> None:
    def fail(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise UserError("the shards hold id 70000")

    with prefetched(fail, 0) as batch, pytest.raises(UserError, match="70000"):
        batch(0)
