"""Windows and soft-caps equal the plain reference, in each form of attention."""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.common.execution import AttentionForm
from lm.model.functional import scaled_dot_product_attention
from lm.model.ops.causal_attention import choose_attention, make_segment_attention, reference_attention
from lm.model.ops.windowed_attention import AttentionRule
from tests.helpers.examples import examples
from tests.helpers.tensors import assert_equal_with_gradients

rules = st.builds(AttentionRule, st.one_of(st.none(), st.integers(1, 50)), st.sampled_from([0.0, 0.7]))


@examples(60)
@given(
    rule=rules,
    length=st.integers(1, 40),
    kv_heads=st.sampled_from([1, 2, 4]),
    block=st.sampled_from([1, 8, 512]),
    form=st.sampled_from(get_args(AttentionForm)),
    seed=st.integers(0, 99),
)
def test_each_form_equals_the_reference(
    rule: AttentionRule, length: int, kv_heads: int, block: int, form: AttentionForm, seed: int
) -> None:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, length, heads, 6).transpose(1, 2) for heads in (4, kv_heads, kv_heads))
    attention = choose_attention(form, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.model.ops.windowed_attention._MIN_BLOCK", min(block, 128))
        patch.setattr("lm.model.ops.windowed_attention._MAX_BLOCK", block)
        assert_equal_with_gradients(
            lambda q, k, v: attention(q, k, v, rule), lambda q, k, v: reference_attention(q, k, v, rule), q, k, v
        )


def test_the_reference_attends_to_the_window_alone() -> None:
    """The rule, written out for each query and key."""
    q, k, v = torch.randn(3, 1, 1, 9, 4)
    mask = torch.tensor([[key <= query and query - key < 3 for key in range(9)] for query in range(9)])
    expected = scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(reference_attention(q, k, v, AttentionRule(3)), expected)


@examples(30)
@given(rule=rules, lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_segments_with_a_window_equal_each_alone(rule: AttentionRule, lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 1, 2, sum(lengths), 6)
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    found = make_segment_attention(segments[None])(q, k, v, rule)
    parts = zip(*(x.split(lengths, -2) for x in (q, k, v)), strict=True)
    expected = torch.cat([reference_attention(q, k, v, rule) for q, k, v in parts], -2)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [AttentionRule(9), AttentionRule(None, 2.0)], ids=str)
def test_compiled_attention_has_the_same_gradients(rule: AttentionRule) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 70, 16)
    attention = choose_attention("auto", torch.device("cpu"))
    compiled = torch.compile(attention)
    assert_equal_with_gradients(
        lambda q, k, v: compiled(q, k, v, rule), lambda q, k, v: attention(q, k, v, rule), q, k, v
    )
