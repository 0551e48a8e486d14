"""Batches: shapes, shifted targets, uniform starts, too little data, prefetching, shuffled order."""

import threading
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.data.batches import batch_starts, check_length, gather_batch, get_batch, prefetch_batches, shuffled_indices

FEW_EXAMPLES = settings(deadline=None, max_examples=30)


@FEW_EXAMPLES
@given(
    extra=st.integers(1, 50),
    batch_size=st.integers(1, 9),
    context_length=st.integers(1, 20),
    dtype=st.sampled_from([np.uint16, np.uint32, np.int32, np.int64]),
    seed=st.integers(0, 10**6),
)
def test_batch_rows_are_slices_of_the_tokens(
    extra: int, batch_size: int, context_length: int, dtype: type[np.generic], seed: int
) -> None:
    """Each token is its own position, so each row shows its start."""
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


def test_every_start_is_equally_likely() -> None:
    """Each count is binomial and within five standard deviations of its mean (from the tests of CS336)."""
    length, context_length, batch_size, rounds = 100, 7, 32, 1000
    generator = np.random.default_rng(0)
    starts: Counter[int] = Counter()
    for _ in range(rounds):
        x, _ = get_batch(np.arange(length), batch_size, context_length, "cpu", generator)
        starts.update(x[:, 0].tolist())
    num_starts = length - context_length
    assert set(starts) == set(range(num_starts))
    expected = rounds * batch_size / num_starts
    deviation = (rounds * batch_size * (1 / num_starts) * (1 - 1 / num_starts)) ** 0.5
    assert all(abs(count - expected) < 5 * deviation for count in starts.values())


def test_a_generator_makes_batches_repeatable() -> None:
    tokens = np.arange(1000)
    first, second = np.random.default_rng(5), np.random.default_rng(5)
    batches = [get_batch(tokens, 4, 8, "cpu", first) for _ in range(3)]
    for x, y in batches:
        again_x, again_y = get_batch(tokens, 4, 8, "cpu", second)
        assert torch.equal(x, again_x) and torch.equal(y, again_y)
    assert not torch.equal(batches[0][0], batches[1][0])


def test_batches_without_a_generator_differ() -> None:
    tokens = np.arange(100_000)
    assert not torch.equal(get_batch(tokens, 8, 4, "cpu")[0], get_batch(tokens, 8, 4, "cpu")[0])


def test_a_memmap_gives_the_same_batches(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 2**16, 500).astype(np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    batch = get_batch(mapped, 6, 16, "cpu", np.random.default_rng(1))
    expected = get_batch(tokens, 6, 16, "cpu", np.random.default_rng(1))
    assert torch.equal(batch[0], expected[0]) and torch.equal(batch[1], expected[1])


def test_batch_does_not_share_memory_with_the_tokens() -> None:
    tokens = np.arange(50)
    x, y = get_batch(tokens, 2, 8, "cpu")
    x.fill_(-1)
    assert torch.equal(y[:, 1:], y[:, :-1] + 1) and np.array_equal(tokens, np.arange(50))


def test_exactly_one_start() -> None:
    x, y = get_batch(np.arange(9), 3, 8, "cpu")
    assert x.tolist() == [list(range(8))] * 3
    assert y.tolist() == [list(range(1, 9))] * 3


@pytest.mark.parametrize("length", [0, 1, 7, 8])
def test_too_few_tokens_are_rejected(length: int) -> None:
    with pytest.raises(UserError, match=rf"{length} tokens.*8.*context_length"):
        get_batch(np.arange(length), 3, 8, "cpu")


def test_length_check_names_the_data() -> None:
    check_length(np.arange(9), 8)
    with pytest.raises(UserError, match=r"validation split has 8 tokens.*model\.context_length, or none\."):
        check_length(np.arange(8), 8, "validation split", ", or none")


def test_gather_batch_returns_the_sequences_at_the_starts() -> None:
    x, y = gather_batch(np.arange(10) * 10, [4, 0, 4], 3, "cpu")
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


@FEW_EXAMPLES
@given(
    windows=st.integers(1, 12), batch_size=st.integers(1, 9), context_length=st.integers(1, 5), seed=st.integers(0, 99)
)
def test_each_epoch_has_every_window_once(windows: int, batch_size: int, context_length: int, seed: int) -> None:
    length = windows * context_length + 1 + seed % context_length  # the remainder is no window
    steps = -(-3 * windows // batch_size)
    starts = [batch_starts(length, batch_size, context_length, "shuffled_epochs", seed, step) for step in range(steps)]
    drawn = [start for batch in starts for start in batch]
    whole = [i * context_length for i in range(windows)]
    epochs = [drawn[i * windows : (i + 1) * windows] for i in range(3)]
    assert all(sorted(epoch) == whole for epoch in epochs)
    if windows > 8:
        assert not epochs[0] == epochs[1] == epochs[2], "the order changes with the epoch"
    assert starts[-1] == batch_starts(length, batch_size, context_length, "shuffled_epochs", seed, steps - 1)


@pytest.mark.parametrize("order", ["random", "shuffled_epochs"])
def test_order_depends_on_the_seed(order: Literal["random", "shuffled_epochs"]) -> None:
    batches = [batch_starts(10_001, 64, 10, order, seed, 3) for seed in (0, 0, 1)]
    assert batches[0] == batches[1] != batches[2]


def test_random_order_reaches_every_start() -> None:
    drawn = {start for step in range(200) for start in batch_starts(30, 8, 10, "random", 0, step)}
    assert drawn == set(range(20))


def test_a_thread_loads_the_next_batch_ahead() -> None:
    loads: list[tuple[int, bool]] = []
    ready = threading.Event()

    def load(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        loads.append((step, threading.current_thread() is threading.main_thread()))
        if step == 6:
            ready.set()
        return torch.tensor([step]), torch.tensor([step + 1])

    with prefetch_batches(load, 5) as batch:
        assert batch(5)[0].item() == 5
        assert ready.wait(10), "batch 6 is loaded before it is requested"
        assert batch(6)[0].item() == 6
    assert loads == [(5, False), (6, False), (7, False)]


def test_an_error_while_loading_is_raised() -> None:
    def fail(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise UserError("the shards hold id 70000")

    with prefetch_batches(fail, 0) as batch, pytest.raises(UserError, match="70000"):
        batch(0)


@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 30), st.integers(0, 3))
def test_each_epoch_has_every_index_once(count: int, first: int, number: int, seed: int) -> None:
    epochs = [sorted(shuffled_indices(count, epoch * count, count, seed)) for epoch in range(8)]
    assert epochs == [list(range(count))] * 8
    whole = shuffled_indices(count, 0, first + number, seed).tolist()
    assert shuffled_indices(count, first, number, seed).tolist() == whole[first:]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(shuffled_indices(20, epoch * 20, 20, seed)) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9
