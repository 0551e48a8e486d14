"""The Triton kernels of a decode step equal the torch runner. Without a GPU they run in Triton's interpreter."""

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.inference.runners.cuda_runner import TritonStep, _works, can_use_triton, join_layers, matmul
from lm.inference.runners.torch_runner import TorchRunner
from lm.model.transformer import TransformerLM
from tests.helpers.examples import examples
from tests.helpers.generating import make_model, random_cache
from tests.helpers.gpus import compile_for_gpus

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="the extra triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 36  # three pages
SHAPE: dict[str, Any] = {"context_length": LENGTH, "d_ff": 24, "num_layers": 1}
VARIANTS: list[dict[str, Any]] = [
    {"num_layers": 2},
    {"num_heads": 4, "num_kv_heads": 2, "tied_embeddings": True},
    {"num_heads": 3, "num_kv_heads": 1, "head_dim": 6, "qkv_bias": True},
    {"qk_norm": True, "logit_softcap": 5.0},
    {"position_encoding": "none", "head_dim": 5},
]


def check(model: TransformerLM, positions: list[int], tolerance: float, dtype: torch.dtype = torch.float32) -> None:
    """Compare logits and caches with those of the torch runner in float64."""
    model = model.to(DEVICE, dtype).requires_grad_(False)
    exact_model = copy.deepcopy(model).double()
    cache = random_cache(model.config, len(positions) + 1, LENGTH, DEVICE, dtype)
    exact = copy.deepcopy(cache)
    exact.keys, exact.values = exact.keys.double(), exact.values.double()
    ids = torch.arange(len(positions), device=DEVICE) * 7 % (model.config.vocab_size or 1)
    inputs = torch.stack([ids, torch.tensor(positions, device=DEVICE)])
    with torch.inference_mode():
        expected = TorchRunner(exact_model, exact).decode(inputs, max(positions))
        join_layers(model)
        logits = TritonStep(model, cache)(inputs, cache.page_table[: len(positions)], max(positions))
    assert logits.dtype == torch.float32
    assert_near(logits, expected, tolerance)
    assert_near(cache.keys, exact.keys, tolerance)
    assert_near(cache.values, exact.values, tolerance)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert (found.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("split_elements", [32, 1 << 12])
def test_a_step_equals_the_plain_one(
    options: dict[str, Any], split_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.inference.runners.cuda_runner._SPLIT_ELEMENTS", split_elements)
    model = make_model(**SHAPE | options)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape))  # the norm weights were 1
    check(copy.deepcopy(model), [7], 1e-5)
    check(model, [0, LENGTH - 1, 5], 0.03, torch.bfloat16)


@examples(10)
@given(
    positions=st.lists(st.integers(0, LENGTH - 1), min_size=2, max_size=16),
    split_elements=st.sampled_from([8, 16, 32, 1 << 12]),
    block_splits=st.sampled_from([1, 2, 16]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_any_positions(positions: list[int], split_elements: int, block_splits: int, dtype: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.inference.runners.cuda_runner._SPLIT_ELEMENTS", split_elements)
        patch.setattr("lm.inference.runners.cuda_runner._BLOCK_SPLITS", block_splits)
        check(make_model(**SHAPE), positions, 0.03, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shapes",
    [
        ["86-128-bfloat16", "90-128-bfloat16", "86-64-float32"],
        pytest.param(["86-80-bfloat16", "90-80-bfloat16", "90-64-float32"], marks=pytest.mark.long),
    ],
)
def test_the_kernels_compile_for_gpus(shapes: list[str]) -> None:
    kernels = compile_for_gpus("step", *shapes)
    for shape in shapes:
        capability, _, dtype = shape.split("-")
        names = int(capability), f"torch.{dtype}"
        of_shape = [kernel for kernel in kernels if (kernel["capability"], kernel["dtype"]) == names]
        assert len(of_shape) == (7 if dtype == "bfloat16" else 5)
        assert any(kernel["has_tensor_cores"] for kernel in of_shape) == (dtype == "bfloat16")


def test_the_joined_weights_are_those_of_the_model() -> None:
    model = make_model(**SHAPE, qkv_bias=True).requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    join_layers(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    layers: Any = model.layers
    layers[0].attn.k_proj.weight.fill_(3)
    assert (layers[0].attn.qkv == 3).any()


def test_the_kernels_read_weights_of_any_layout() -> None:
    model = make_model(**SHAPE)
    for name in ("lm_head.weight", "layers.0.attn.output_proj.weight", "layers.0.ffn.w2.weight"):
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.T.contiguous().T
    check(model, [7], 1e-5)


def test_kernels_that_do_not_work_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(**SHAPE).to(DEVICE)
    monkeypatch.setattr("lm.inference.runners.cuda_runner._SPLIT_ELEMENTS", 128)  # also of the trial
    _works.cache_clear()
    generators = torch.get_rng_state(), torch.cuda.get_rng_state_all()
    assert can_use_triton(model) and can_use_triton(model.bfloat16())
    torch.testing.assert_close((torch.get_rng_state(), torch.cuda.get_rng_state_all()), generators)
    monkeypatch.setattr("lm.inference.runners.cuda_runner.matmul", fail)
    assert can_use_triton(model)  # tried only once
    _works.cache_clear()
    with caplog.at_level("WARNING"):
        assert not can_use_triton(model)
    assert "decoding runs without it: no C compiler" in caplog.text and "more" not in caplog.text
    _works.cache_clear()


def fail(*arguments: object, **options: object) -> Tensor:
    raise RuntimeError("no C compiler\nmore")


def test_more_rows_than_a_tile_has_are_refused() -> None:
    with pytest.raises(ValueError, match="17 rows are more than 16"):
        matmul(torch.zeros(17, 4, device=DEVICE), torch.zeros(4, 4, device=DEVICE))
    with pytest.raises(ValueError, match="2 rows are more than 1"):
        check(make_model(**SHAPE), [0, 1], 1e-5)  # float32


def test_models_that_the_kernels_do_not_compute() -> None:
    assert not can_use_triton(make_model(norm_placement="post"))
    assert not can_use_triton(make_model().double())
