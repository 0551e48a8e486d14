"""The CPU runner equals the torch runner."""

import copy
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from lm.inference.engine import Engine
from lm.inference.kv_cache import KVCache
from lm.inference.runners import cpu_runner
from lm.inference.runners.cpu_runner import CpuRunner
from lm.inference.runners.runner import prepare_for_inference
from lm.inference.runners.torch_runner import TorchRunner
from lm.kernels.decode import fused_step
from lm.model.config import ModelConfig, MoEConfig, Multipliers
from lm.model.transformer import TransformerLM
from tests.helpers.examples import examples
from tests.helpers.generating import make_model, random_cache

LENGTH = 30


def random_model(dtype: torch.dtype = torch.float32, **options: Any) -> TransformerLM:
    model = TransformerLM(ModelConfig(**{"vocab_size": 50, "context_length": LENGTH, **options}), dtype=dtype)
    for name, parameter in model.requires_grad_(False).named_parameters():
        if name.endswith((".bias", "norm.weight", "ln1.weight", "ln2.weight", "final.weight", "sum.weight")):
            parameter.uniform_(-2, 2)
    return model


def random_inputs(config: ModelConfig, rows: int) -> Tensor:
    """Ids and positions."""
    return torch.stack([torch.randint(config.vocab_size or 1, (rows,)), torch.randint(LENGTH, (rows,))])


def check(model: TransformerLM, prepared: TransformerLM, rows: int, tolerance: float, ring_pages: int = 0) -> None:
    """Compare logits and cache of two steps."""
    config = model.config
    expected_cache = random_cache(config, rows + 1, LENGTH, ring_pages=ring_pages)
    cache = copy.deepcopy(expected_cache)
    reference, runner = TorchRunner(model, expected_cache), CpuRunner(prepared, cache)
    for _ in range(2):
        inputs = random_inputs(config, rows)
        expected = reference.decode(inputs, int(inputs[1].max()))
        actual = runner.decode(inputs, int(inputs[1].max()))
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(cache.all_keys, expected_cache.all_keys, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(cache.all_values, expected_cache.all_values, rtol=tolerance, atol=tolerance)


@examples(60)
@given(
    rows=st.integers(1, 9),
    num_layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([2, 6, 34, 64]),
    d_model=st.sampled_from([7, 64, 130]),  # with 2, a norm may divide by almost 0 and magnify the rounding
    d_ff=st.sampled_from([1, 5, 64, 150]),
    vocab_size=st.integers(1, 60),
    qk_norm=st.booleans(),
    qkv_bias=st.booleans(),
    more=st.sampled_from(
        [
            {"position_encoding": "none"},
            {"rotary_fraction": 0.67},  # with heads 2 wide, 1 dimension
            {"global_rope": False, "global_interval": 2, "num_layers": 2},
            {"global_rope": False, "global_interval": 2, "num_layers": 3},
            {"sliding_window": 1},
            {"sliding_window": 7, "global_interval": 2, "num_layers": 3, "local_rope_theta": 20.0},
            {"sliding_window": 16, "zero_centered_norm": True},
            {"sliding_window": 17, "multipliers": Multipliers(3.0, 0.3, 0.6, 4.0)},
            {"value_residual": True},
            {"value_residual": True, "sliding_window": 7, "num_layers": 3},
            {},
        ]
    ),
    tied_embeddings=st.booleans(),
    logit_softcap=st.sampled_from([0.0, 3.0]),
    threads=st.sampled_from([1, 2, 5]),
    has_rings=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_decode_step_equals_torch(
    rows: int, kv_heads: int, group: int, more: dict[str, Any], threads: int, has_rings: bool, seed: int, **options: Any
) -> None:
    torch.manual_seed(seed)
    assume("rotary_fraction" not in more or options["head_dim"] == 6)
    model = random_model(num_kv_heads=kv_heads, num_heads=kv_heads * group, **options | more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_runner, "_MIN_BYTES_FOR_THREADS", 0)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        ring_pages = 2 if has_rings and "sliding_window" in more else 0
        check(model, prepare_for_inference(copy.deepcopy(model)), rows, 1e-4, ring_pages)


@examples(40)
@given(
    suffixes=st.dictionaries(st.integers(0, 4), st.tuples(st.integers(0, 20), st.integers(1, 10)), min_size=1),
    threads=st.sampled_from([1, 3]),
    quantization=st.sampled_from(["none", "int8"]),
    window=st.sampled_from([None, 5]),
    seed=st.integers(0, 99),
)
def test_several_tokens_of_a_row(
    suffixes: dict[int, tuple[int, int]], threads: int, quantization: Any, window: int | None, seed: int
) -> None:
    """The first number of each row is where the tokens begin, the second is how many there are."""
    torch.manual_seed(seed)
    model = random_model(d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48, sliding_window=window)
    cache = random_cache(model.config, 5, LENGTH, ring_pages=3 if window else 0)
    other_cache = copy.deepcopy(cache)
    rows, starts = list(suffixes), [start for start, _ in suffixes.values()]
    tokens = [tuple(torch.randint(50, (length,)).tolist()) for _, length in suffixes.values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_runner, "_MIN_BYTES_FOR_THREADS", 0)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        patch.setattr("lm.inference.runners.runner.has_int8_products", lambda: False)  # they round inputs too
        model = prepare_for_inference(model, quantization=quantization)
        runner = CpuRunner(model, cache)
    actual = runner.extend(rows, tokens, starts)
    expected = TorchRunner(model, other_cache).extend(rows, tokens, starts)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache.all_keys, other_cache.all_keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache.all_values, other_cache.all_values, rtol=1e-4, atol=1e-4)


def test_more_tokens_are_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.inference.runners.runner.has_int8_products", lambda: False)
    model = prepare_for_inference(make_model(context_length=100), quantization="int8")
    runner = CpuRunner(model, KVCache(model.config, 65, 100, torch.device("cpu")))
    limit = runner.max_tokens
    assert limit == 64
    monkeypatch.setattr(CpuRunner, "_run", None)
    runner.extend([0], [tuple([1] * (limit + 1))], [0])
    runner.decode(torch.zeros(2, limit + 1, dtype=torch.int64), 0)
    with pytest.raises(TypeError):
        runner.extend([0], [tuple([1] * limit)], [0])
    with pytest.raises(TypeError):
        runner.decode(torch.zeros(2, limit, dtype=torch.int64), 0)


def test_small_batches_are_sampled_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare_for_inference(make_model())
    runner = CpuRunner(model, KVCache(model.config, 1, 4, torch.device("cpu")))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for batch_size, expected in ((1, 1), (runner.max_tokens, 1), (runner.max_tokens + 1, 2)):
            with runner.sampling_context(batch_size):
                assert torch.get_num_threads() == expected
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_bfloat16_is_as_close_as_torch(qk_norm: bool) -> None:
    """To the step in float32 with the same weights."""
    torch.manual_seed(0)
    model = random_model(torch.bfloat16, d_model=128, num_layers=3, num_heads=2, d_ff=256, qk_norm=qk_norm)
    wide = copy.deepcopy(model).float()
    caches = [random_cache(model.config, 4, LENGTH, dtype=torch.bfloat16)]
    caches.append(copy.deepcopy(caches[0]))
    exact_cache = copy.deepcopy(caches[0])
    exact_cache.keys, exact_cache.values = exact_cache.keys.float(), exact_cache.values.float()
    inputs = random_inputs(model.config, 4)
    exact = TorchRunner(wide, exact_cache).decode(inputs, LENGTH - 1)
    plain = TorchRunner(model, caches[0]).decode(inputs, LENGTH - 1)
    actual = CpuRunner(prepare_for_inference(model), caches[1]).decode(inputs, LENGTH - 1)
    assert (actual - exact).norm() < (plain - exact).norm()
    for cache, expected in ((caches[1].keys, exact_cache.keys), (caches[1].values, exact_cache.values)):
        torch.testing.assert_close(cache.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("begins", [True, False])
def test_each_thread_alone_completes_the_step(begins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread begins when all is done, or not at all."""

    class LatePool:
        def submit(self, function: Any, *arguments: Any) -> "Future[None]":
            late: Future[None] = Future()
            if begins:
                late.set_running_or_notify_cancel()
                late.result = lambda timeout=None: function(*arguments)  # type: ignore[method-assign]
            return late

    monkeypatch.setattr(cpu_runner, "_MIN_BYTES_FOR_THREADS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu_runner, "thread_pool", LatePool)
    model = random_model(d_model=32, num_layers=2, num_heads=2, d_ff=48)
    check(model, prepare_for_inference(copy.deepcopy(model)), 2, 1e-5)


def test_the_number_of_phases() -> None:
    """All of them are used: the last one is the head."""
    model = prepare_for_inference(random_model(d_model=32, num_layers=2, num_heads=2, d_ff=48))
    runner = CpuRunner(model, random_cache(model.config, 1, LENGTH))
    runner.decode(random_inputs(model.config, 1), LENGTH - 1)
    progress = runner._step.progress.reshape(-1, 2)
    assert len(progress) == 2 * fused_step.PHASES_PER_LAYER + 1
    assert (progress[:, 1] == 1).all()


OTHER_MODELS: list[dict[str, Any]] = [
    {"norm_placement": "post"},
    {"feed_forward": "silu"},
    {"moe": MoEConfig(num_experts=4)},
]


@pytest.mark.parametrize("options", OTHER_MODELS, ids=str)
def test_other_models_are_computed_by_torch(options: dict[str, Any]) -> None:
    assert type(Engine(prepare_for_inference(make_model(**options)), 1)._runner) is TorchRunner
    assert type(Engine(make_model(), 1)._runner) is TorchRunner, "not prepared"
    assert type(Engine(prepare_for_inference(make_model()), 1)._runner) is CpuRunner


def test_matrices_share_the_flat_array() -> None:
    """The model does not keep the weights of the plain layout twice, however many runners it has."""
    for quantization in ("none", "int8"):
        model = prepare_for_inference(make_model(), quantization=quantization)
        runners = [CpuRunner(model, KVCache(model.config, 1, 4, torch.device("cpu"))) for _ in range(2)]
        matrices: list[Any] = [model.lm_head, *(layer.ffn.w2 for layer in model.layers)]  # type: ignore[union-attr]
        for runner in runners:
            array = runner._network.weights
            start, end = array.ctypes.data, array.ctypes.data + array.nbytes
            assert all(start <= matrix.weight.data_ptr() < end for matrix in matrices)
