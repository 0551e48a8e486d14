"""The order of training examples."""

from hypothesis import given
from hypothesis import strategies as st

from lm.data.shuffle import shuffled_indices


@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 30), st.integers(0, 3))
def test_each_epoch_has_every_index_once(count: int, first: int, number: int, seed: int) -> None:
    epochs = [sorted(shuffled_indices(count, epoch * count, count, seed)) for epoch in range(8)]
    assert epochs == [list(range(count))] * 8
    whole = shuffled_indices(count, 0, first + number, seed).tolist()
    assert shuffled_indices(count, first, number, seed).tolist() == whole[first:]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(shuffled_indices(20, epoch * 20, 20, seed)) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9
