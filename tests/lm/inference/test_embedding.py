"""Embeddings equal those of each text alone in float64, and those of transformers' hidden states."""

import copy
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.checkpoint.hugging_face.model_files import load_hugging_face
from lm.inference import embedding
from lm.inference.config import Pooling
from lm.inference.embedding import embed_in_steps
from lm.inference.runners.runner import prepare_for_inference
from lm.model.config import MoEConfig
from lm.model.transformer import TransformerLM
from tests.helpers.examples import examples
from tests.helpers.generating import make_model
from tests.helpers.reference_model import MODEL_VARIANTS, SMALL_CONFIG
from tests.lm.checkpoint.hugging_face.test_families import make_model as make_theirs

POOLINGS: list[Pooling] = ["last", "mean"]
VOCAB_SIZE, CONTEXT = 53, 16


def run(job: Generator[None, None, torch.Tensor]) -> tuple[npt.NDArray[Any], int]:
    """Return the result of a job, and the number of its steps."""
    num_steps = 0
    while True:
        try:
            next(job)
            num_steps += 1
        except StopIteration as end:
            assert end.value.dtype == torch.float32
            return end.value.numpy(), num_steps


def pool_plainly(states_TD: npt.NDArray[Any], pooling: str) -> npt.NDArray[Any]:
    pooled = states_TD[-1] if pooling == "last" else sum(states_TD) / len(states_TD)
    return pooled / np.sqrt((pooled**2).sum())


def embed_plainly(model: TransformerLM, texts: Sequence[Sequence[int]], pooling: str) -> npt.NDArray[Any]:
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        states = [exact.hidden_states(torch.tensor([text]))[0].numpy() for text in texts]
    return np.stack([pool_plainly(states_TD, pooling) for states_TD in states])


@examples(40)
@given(
    options=st.sampled_from([*MODEL_VARIANTS, {"moe": MoEConfig(num_experts=4, top_k=2, capacity_factor=1.0)}]),
    texts=st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=CONTEXT), min_size=1, max_size=6),
    pooling=st.sampled_from(POOLINGS),
    step_tokens=st.sampled_from([1, 3, 7, 16, 1024]),
    is_prepared=st.booleans(),
)
def test_embeddings_equal_those_of_each_text_alone(
    options: dict[str, Any], texts: list[list[int]], pooling: Pooling, step_tokens: int, is_prepared: bool
) -> None:
    torch.manual_seed(1)
    model = TransformerLM(replace(SMALL_CONFIG, **options)).eval()
    expected = embed_plainly(model, texts, pooling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(embedding._STEP_TOKENS, "cpu", step_tokens)
        found, _ = run(embed_in_steps(prepare_for_inference(model) if is_prepared else model, texts, pooling))
    assert found == pytest.approx(expected, abs=2e-5)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_of_a_rounded_model_are_close(pooling: Pooling) -> None:
    texts = [[1, 2, 3], list(range(40)), [5] * 64]
    expected = embed_plainly(make_model(64, 64), texts, pooling)
    for options in ({"dtype": torch.bfloat16}, {"quantization": "int8"}):
        model = prepare_for_inference(make_model(64, 64).eval(), **options)
        found, _ = run(embed_in_steps(model, texts, pooling))
        assert (found * expected).sum(1) == pytest.approx(1, abs=3e-3), options


def test_a_step_is_a_layer_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(embedding._STEP_TOKENS, "cpu", 8)
    model, seen = make_model(11, 64).eval(), list[tuple[int, ...]]()
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape[:2]))
    texts = [[1] * 20, [2] * 4, [3] * 4, [4], [5] * 4]
    _, num_steps = run(embed_in_steps(model, texts, "mean"))
    assert seen == [(2, 4)] * 2 + [(2, 4)] * 2 + [(1, 8), (1, 8), (1, 4)] * 2
    assert num_steps == len(seen)


def test_no_text_has_no_embedding() -> None:
    found, num_steps = run(embed_in_steps(make_model(11, 16), [], "last"))
    assert (found.shape, num_steps) == ((0, 16), 0)


@pytest.mark.parametrize("family", ["Llama 3.2, tied", "Qwen2", "Qwen3", "Mistral"])
def test_embeddings_equal_transformers(family: str, tmp_path: Path) -> None:
    theirs = make_theirs(family)
    theirs.save_pretrained(tmp_path)
    ours = prepare_for_inference(load_hugging_face(tmp_path))
    texts = [[7, 299, 12], [5], list(range(100, 190))]
    for pooling in POOLINGS:
        found, _ = run(embed_in_steps(ours, texts, pooling))
        with torch.no_grad():
            states = [theirs.model(torch.tensor([text])).last_hidden_state[0].double().numpy() for text in texts]
        assert found == pytest.approx(np.stack([pool_plainly(one, pooling) for one in states]), abs=1e-5)
