"""Penalties and biases equal formulas applied token by token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.inference.config import SampleConfig
from lm.inference.engine import generate
from lm.inference.generation_request import Generation
from lm.inference.sampler import LogitEditor, LogitEdits
from tests.helpers.examples import examples
from tests.helpers.generating import make_model

VOCAB_SIZE = 11
some_edits = st.builds(
    LogitEdits,
    frequency_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.3, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.7, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100, width=32), max_size=3),
)
some_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8)
penalties = st.sampled_from([1.0, 1.0, 0.5, 1.3])


def edit_plainly(
    logits: list[float], edits: LogitEdits, penalty: float, prompt: list[int], new_ids: list[int]
) -> list[float]:
    edited = []
    for token_id, logit in enumerate(logits):
        if token_id in prompt or token_id in new_ids:
            logit = logit / penalty if logit > 0 else logit * penalty
        count = new_ids.count(token_id)
        logit -= count * edits.frequency_penalty + (count > 0) * edits.presence_penalty
        edited.append(logit + edits.logit_bias.get(token_id, 0.0))
    return edited


@examples(200)
@given(edits=some_edits, penalty=penalties, prompt=some_ids, new_ids=some_ids, seed=st.integers(0, 99))
def test_edited_logits_equal_the_reference(
    edits: LogitEdits, penalty: float, prompt: list[int], new_ids: list[int], seed: int
) -> None:
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4
    before = logits.clone()
    editor = LogitEditor(edits, penalty, prompt, VOCAB_SIZE, logits.device)
    for token_id in new_ids:
        editor.record(token_id)
    assert editor.edit(logits).tolist() == pytest.approx(
        edit_plainly(logits.tolist(), edits, penalty, prompt, new_ids), abs=1e-4
    )
    assert logits.equal(before)
    if penalty == 1 and edits == LogitEdits():
        assert editor.edit(logits).equal(logits)


@examples(20)
@given(rows=st.lists(st.tuples(some_edits, penalties, some_ids.filter(len)), min_size=1, max_size=5))
def test_generation_with_edits_equals_greedy_search_without_a_cache(
    rows: list[tuple[LogitEdits, float, list[int]]],
) -> None:
    model = make_model(VOCAB_SIZE, 24)
    generations = [
        Generation(prompt, 6 + number, SampleConfig(temperature=0, repetition_penalty=penalty), edits=edits)
        for number, (edits, penalty, prompt) in enumerate(rows)
    ]
    generate(model, generations, 2)
    for generation, (edits, penalty, prompt) in zip(generations, rows, strict=True):
        ids: list[int] = []
        for _ in range(generation.max_new_tokens):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids]]))[0, -1].tolist()
            edited = edit_plainly(logits, edits, penalty, prompt, ids)
            ids.append(generation.ids[len(ids)])
            assert edited[ids[-1]] == pytest.approx(max(edited), abs=1e-4), "equal, or a tie"
