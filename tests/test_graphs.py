"""Recorded steps: of the shapes that are recorded, what steps of the very shape give; on a GPU, replayed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.cache import KVCache, one_more
from lm.generate import Generation, generate
from lm.graphs import DecodeGraphs
from lm.sampling import SampleConfig
from tests.generating import make_model

ROWS, LENGTH = 5, 100


class Computed:
    """Stands for a graph where there is no GPU: computes again what is recorded."""

    def __init__(self, graphs: DecodeGraphs, rows: int, keys: int) -> None:
        self.graphs, self.shape = graphs, (rows, keys)
        self.logits = graphs._compute(*self.shape)

    def replay(self) -> None:
        self.logits.copy_(self.graphs._compute(*self.shape))


@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=ROWS), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_masked_keys_and_free_rows_change_nothing(steps: list[list[int]], seed: int) -> None:
    model = make_model(context_length=LENGTH, num_kv_heads=2)
    generator = torch.Generator().manual_seed(seed)
    caches = [KVCache(model.config, ROWS, LENGTH, torch.device("cpu")) for _ in range(2)]
    for stored in ("keys", "values"):
        setattr(caches[0], stored, torch.randn(caches[0].keys.shape, generator=generator))
        getattr(caches[1], stored).copy_(getattr(caches[0], stored))
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        graphs = DecodeGraphs(model, caches[0])

        def record(rows: int, keys: int) -> tuple[Computed, torch.Tensor]:
            assert (rows in (1, 2, 4, ROWS)) and (keys in (64, LENGTH))
            computed = Computed(graphs, rows, keys)
            return computed, computed.logits

        patch.setattr(graphs, "_record", record)
        for positions in steps:
            ids = torch.randint(model.config.vocab_size or 1, (len(positions),), generator=generator)
            inputs = torch.stack([ids, torch.tensor(positions)])
            found = graphs(inputs, max(positions))
            expected = one_more(model, caches[1], inputs, max(positions))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            for stored in ("keys", "values"):  # the free rows may hold anything
                ours, theirs = (getattr(cache, stored)[:, : len(positions)] for cache in caches)
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
                getattr(caches[1], stored).copy_(getattr(caches[0], stored))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are for CUDA, which is not here")
def test_replayed_steps_draw_what_a_processor_draws() -> None:
    model = make_model(context_length=LENGTH)
    prompts = [[1, 2, 3], [4], [5] * 40, [6, 7]]
    greedy = SampleConfig(temperature=0)
    ours, theirs = ([Generation(prompt, 50, greedy) for prompt in prompts] for _ in range(2))
    generate(model, ours)
    generate(model.to("cuda"), theirs)
    assert [one.ids for one in theirs] == [one.ids for one in ours]
