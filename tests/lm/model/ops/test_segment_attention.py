"""Attention within segments: packed examples get the logits that they get alone."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.data.chat_template import EncodedExample
from lm.data.packing import pack_examples
from lm.model.config import ModelConfig
from lm.model.functional import scaled_dot_product_attention
from lm.model.ops.segment_attention import make_segment_attention
from lm.model.transformer import TransformerLM
from tests.helpers.tensors import FEW_EXAMPLES, random_normal, seeds


@FEW_EXAMPLES
@given(seeds, st.lists(st.integers(0, 3), min_size=1, max_size=6), st.sampled_from([1, 2]))
def test_attention_equals_the_reference_with_loops(seed: int, segments: list[int], kv_heads: int) -> None:
    length = len(segments)
    q, k, v = (random_normal(1, heads, length, 4, seed=seed + i) for i, heads in enumerate((2, kv_heads, kv_heads)))
    out = make_segment_attention(torch.tensor([segments]))(q, k, v)
    for head in range(2):
        for t in range(length):
            seen = [s for s in range(t + 1) if segments[s] == segments[t]]
            kv = head * kv_heads // 2
            expected = scaled_dot_product_attention(q[0, head, t : t + 1], k[0, kv, seen], v[0, kv, seen])
            torch.testing.assert_close(out[0, head, t : t + 1], expected)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1}, {"qk_norm": True}])
def test_packed_examples_have_the_logits_that_they_have_alone(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=30, context_length=12, d_model=16, num_layers=2, num_heads=2, d_ff=16, **options)
    model = TransformerLM(config, dtype=torch.float64)
    texts = [list(range(1, 6)), list(range(10, 18)), [20, 21], list(range(22, 29))]
    packed = pack_examples([EncodedExample(ids, [True] * len(ids)) for ids in texts], 12)
    ids, segments = torch.from_numpy(packed.input_ids), torch.from_numpy(packed.segment_ids)
    attend = make_segment_attention(segments)
    logits = model.logits(model.hidden_states(ids, torch.from_numpy(packed.positions), [attend] * config.num_layers))
    found = 0
    for row in range(len(ids)):
        for segment in range(1, int(segments[row].max()) + 1):
            place = segments[row] == segment
            torch.testing.assert_close(logits[row, place], model(ids[row, place][None])[0])
            found += 1
    assert found == len(texts) and len(ids) == 2
