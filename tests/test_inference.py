"""A model made ready to generate gives what it gave before, by threads that share the work."""

import copy
import gc
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.generate import Generation, generate
from lm.inference import Team, prepare
from lm.sampling import SampleConfig
from tests.generating import make_model
from tests.training import wait_until


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=4),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_a_teams_products_are_those_of_its_matrices(shapes: list[tuple[int, int]], threads: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    matrices = [random.standard_normal(shape, np.float32) for shape in shapes]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        team = Team(np.concatenate([matrix.ravel() for matrix in matrices]), 300)
    finally:
        torch.set_num_threads(before)
    offset = 0
    for matrix in matrices:
        x = random.standard_normal(matrix.shape[1], np.float32)
        found = team.multiply(torch.from_numpy(x), offset, len(matrix))
        np.testing.assert_allclose(found.numpy(), matrix.astype(np.float64) @ x, rtol=1e-4, atol=1e-4)
        offset += matrix.size


def test_threads_that_wake_and_rest_between_jobs_leave_nothing_out(two_threads: None) -> None:
    """Jobs of one block and of many, one right after the other, while the other thread comes and goes."""
    weights = torch.randn(700, 120)
    team = Team(weights.numpy().ravel(), 700)
    x = torch.randn(3000, 120)
    sizes = torch.randint(1, 700, (3000,)).tolist()
    for row, size in zip(x, sizes, strict=True):
        torch.testing.assert_close(team.multiply(row, 0, size), weights[:size] @ row, rtol=1e-3, atol=1e-3)


def test_a_teams_threads_end_with_it(two_threads: None) -> None:
    before = threading.active_count()
    team = Team(np.ones(6, np.float32), 3)
    assert team.multiply(torch.ones(3), 0, 2).tolist() == [3, 3]
    assert threading.active_count() == before + 1
    del team
    gc.collect()
    assert wait_until(lambda: threading.active_count() == before, 10)


@pytest.mark.parametrize(
    "variant",
    [{}, {"num_kv_heads": 1, "qk_norm": True}, {"tied_embeddings": True, "feed_forward": "relu2"}],
    ids=str,
)
def test_a_prepared_model_draws_the_same(two_threads: None, variant: dict[str, Any]) -> None:
    model = make_model(300, 40, **variant)
    found = []
    for ours in (model, prepare(copy.deepcopy(model))):
        for batch in (1, 3):  # one row, and a few
            prompts = [[1, 2, 3], [4], [5, 6, 7, 8]][:batch]
            generations = [Generation(p, 20, SampleConfig(temperature=0), wants_logprobs=True) for p in prompts]
            generate(ours, generations)
            found.append(generations)
    for before, after in zip(found[:2], found[2:], strict=True):
        for one, other in zip(before, after, strict=True):
            assert one.ids == other.ids
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-5)


def test_a_model_prepared_in_bfloat16_is_near_itself(two_threads: None) -> None:
    model = make_model(300, 64)
    ids = torch.randint(300, (2, 64))
    with torch.no_grad():
        exact = model(ids).log_softmax(-1)
        near = prepare(copy.deepcopy(model), torch.bfloat16)(ids)
    assert near.dtype == torch.bfloat16
    assert (near.float().log_softmax(-1) - exact).abs().mean() < 0.02
    assert model.rope is not None and model.rope.cos.dtype == torch.float32


def test_a_process_ends_while_a_team_is_awake() -> None:
    code = (
        "import numpy as np, torch; from lm.inference import Team; torch.set_num_threads(3);"
        "team = Team(np.ones(6, np.float32), 3); print(team.multiply(torch.ones(3), 0, 2).tolist())"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "[3.0, 3.0]\n"), done.stderr
