"""Several adapters over one base: each sequence of a batch gets what the model with its adapter fused gives."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.inference import served_adapters
from lm.inference.config import SampleConfig
from lm.inference.embedding import embed_in_steps
from lm.inference.engine import Engine
from lm.inference.generation_request import Generation
from lm.inference.runners import cpu_runner
from lm.inference.runners.cpu_runner import CpuRunner
from lm.inference.runners.runner import prepare_for_inference
from lm.inference.runners.torch_runner import TorchRunner
from lm.model.config import MoEConfig
from lm.model.transformer import TransformerLM
from tests.helpers.adapters import random_adapter, with_fused
from tests.helpers.examples import examples
from tests.helpers.generating import make_model, random_cache
from tests.helpers.generation_cases import Case, check_cases

CONTEXT = 80
MODEL = make_model(context_length=CONTEXT, num_heads=4, num_kv_heads=2, qkv_bias=True)
ADAPTERS = [
    random_adapter(MODEL, 3, seed=1),
    random_adapter(MODEL, 5, ["q_proj", "w2"], seed=2),
    random_adapter(MODEL, 1, ["v_proj", "output_proj", "w1"], seed=3),
]


@examples(20)
@given(
    cases=st.lists(
        st.builds(
            Case,
            st.lists(st.tuples(st.integers(0, 1), st.integers(1, 40)), min_size=1, max_size=3),
            st.integers(0, 12),
            st.booleans(),
            st.integers(0, 3),
            adapter=st.integers(0, 3),
        ),
        min_size=2,
        max_size=7,
    ),
    num_pages=st.integers(8, 24),
    chunk=st.sampled_from([1, 16, 50, 200]),
    has_prefix_cache=st.booleans(),
)
def test_a_mixed_batch_equals_fused_models(
    cases: list[Case], num_pages: int, chunk: int, has_prefix_cache: bool
) -> None:
    """With draft tokens, log-probabilities, shared prefixes and chunks, in float64."""
    check_cases(copy.deepcopy(MODEL).double().eval(), cases, num_pages, chunk, has_prefix_cache, 4, ADAPTERS)


@pytest.mark.parametrize("adapter", [-1, 1])
def test_an_unknown_adapter_is_refused(adapter: int) -> None:
    model = prepare_for_inference(copy.deepcopy(MODEL))
    message = f"number {adapter}, but the model has 0; choose 0 for the base"
    with pytest.raises(UserError, match=message):
        Engine(model, 1).add([Generation([1], 2, adapter=adapter)])
    with pytest.raises(UserError, match=message):
        next(embed_in_steps(model, [[1]], "last", adapter))


def test_the_last_prompt_of_another_adapter_is_no_prefix() -> None:
    """Neither of a running sequence nor of a stored one, nor of an equal one in the same chunk."""
    prompt = [(text * 5) % 11 for text in range(50)]
    cases = [Case([(0, 40)], 4, adapter=number) for number in (0, 1, 0, 2, 1, 3)]
    assert check_cases(copy.deepcopy(MODEL).double().eval(), cases, 40, 200, True, 6, ADAPTERS) == len(cases)
    model = prepare_for_inference(copy.deepcopy(MODEL).double(), adapters=ADAPTERS)
    engine = Engine(model, 2, prefix_cache_bytes=1 << 20)
    cached = []
    for adapter in (1, 2, 1, 0, 0):
        generation = Generation(prompt, 2, SampleConfig(temperature=0), adapter=adapter)
        engine.add([generation])
        while not generation.finish_reason:
            engine.step()
        cached.append(generation.num_cached_tokens)
    assert cached == [0, 0, 48, 0, 48]


def check_runner(model: TransformerLM, adapters: list[Any], served: TransformerLM, tolerance: float) -> None:
    """Compare a decode step and an extension of :class:`CpuRunner` with those of models with one adapter fused."""
    rows, length = 6, 30
    cache = random_cache(model.config, rows, length)
    cache.adapters = torch.randint(len(adapters) + 1, (rows,)).tolist()
    caches = [copy.deepcopy(cache) for _ in range(len(adapters) + 1)]
    for other in caches:
        other.adapters = [0] * rows
    references = [
        TorchRunner(one, other)
        for one, other in zip([model, *(with_fused(model, x) for x in adapters)], caches, strict=True)
    ]
    runner = CpuRunner(served, cache)
    inputs = torch.stack([torch.randint(model.config.vocab_size or 1, (rows,)), torch.randint(length, (rows,))])
    expected = [reference.decode(inputs, length - 1) for reference in references]
    expected = [expected[adapter][row] for row, adapter in enumerate(cache.adapters)]
    torch.testing.assert_close(runner.decode(inputs, length - 1), torch.stack(expected), rtol=tolerance, atol=tolerance)
    tokens, starts, chosen = [(1, 2, 3), (4,), (5, 6)], [4, 9, 0], [5, 0, 2]
    hidden = [reference.extend(chosen, tokens, starts) for reference in references]
    for number, (row, actual) in enumerate(zip(chosen, runner.extend(chosen, tokens, starts), strict=True)):
        torch.testing.assert_close(actual, hidden[cache.adapters[row]][number], rtol=tolerance, atol=tolerance)


@examples(40)
@given(
    ranks=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    targets=st.sampled_from([[], ["q_proj"], ["k_proj", "w3"], ["v_proj", "output_proj"], ["w1", "w2"]]),
    kv_heads=st.integers(1, 2),
    d_model=st.sampled_from([7, 64, 130]),
    d_ff=st.sampled_from([5, 64, 150]),
    qkv_bias=st.booleans(),
    threads=st.sampled_from([1, 2, 5]),
    max_tokens=st.sampled_from([0, 64]),
    seed=st.integers(0, 99),
)
def test_kernels_equal_fused_models(
    ranks: list[int], targets: list[str], kv_heads: int, threads: int, max_tokens: int, seed: int, **options: Any
) -> None:
    """The fused step, and the layers with their kernel (``max_tokens`` 0)."""
    torch.manual_seed(seed)
    model = make_model(50, 30, num_heads=2 * kv_heads, num_kv_heads=kv_heads, head_dim=6, **options).requires_grad_(
        False
    )
    adapters = [random_adapter(model, rank, targets, seed=i) for i, rank in enumerate(ranks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_runner, "_MIN_BYTES_FOR_THREADS", 0)
        patch.setattr(cpu_runner, "_MAX_FUSED_TOKENS", max_tokens)
        patch.setattr(cpu_runner, "MAX_SMALL_BATCH", max_tokens)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        check_runner(model, adapters, prepare_for_inference(copy.deepcopy(model), adapters=adapters), 1e-3)


@pytest.mark.parametrize("quantization", ["int8", "bfloat16"])
def test_a_quantized_base(quantization: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels give what products of matrices give, and these what the exact base gives, but for the rounding."""
    model = make_model(50, 30, d_model=64, num_heads=4, d_ff=96).requires_grad_(False)
    adapters = [random_adapter(model, 4, seed=seed) for seed in range(3)]
    served = prepare_for_inference(copy.deepcopy(model), quantization=quantization, adapters=adapters)
    dtype = served.token_embeddings.weight.dtype
    caches = [random_cache(model.config, 4, 30, dtype=dtype)]
    caches += [copy.deepcopy(caches[0]) for _ in range(3)]
    for cache in caches:
        cache.adapters = [1, 0, 3, 2]
    inputs = torch.stack([torch.arange(4), torch.full((4,), 29)])
    fused_step = CpuRunner(served, caches[0]).decode(inputs, 29).clone()
    kernel = TorchRunner(served, caches[1]).decode(inputs, 29)
    monkeypatch.setattr(served_adapters, "_MAX_KERNEL_ROWS", 0)
    products = TorchRunner(served, caches[2]).decode(inputs, 29)
    tolerance = 1e-4 if quantization == "int8" else 0.06
    torch.testing.assert_close(fused_step, products.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kernel, products, rtol=tolerance, atol=tolerance)
    caches[3].adapters = [0] * 4
    without = TorchRunner(served, caches[3]).decode(inputs, 29)
    assert (without - products).abs().amax(1)[[0, 2, 3]].min() > 0.1
    torch.testing.assert_close(without[1], products[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("moe", [None, MoEConfig(num_experts=3, num_shared_experts=1)], ids=["dense", "experts"])
def test_embeddings_and_experts(moe: MoEConfig | None) -> None:
    """Steps of texts with other adapters take turns. Shared experts see the tokens of all sequences in one row."""
    model = make_model(50, 30, moe=moe).requires_grad_(False)
    adapters = [random_adapter(model, 4, seed=seed) for seed in (1, 2)]
    texts = [[1, 2, 3], [4, 5], [6] * 9]
    served = prepare_for_inference(copy.deepcopy(model), adapters=adapters)
    jobs = {adapter: embed_in_steps(served, texts, "mean", adapter) for adapter in range(3)}
    results: dict[int, torch.Tensor] = {}
    while len(results) < len(jobs):
        for adapter, job in jobs.items():
            try:
                next(job)
            except StopIteration as stop:
                results.setdefault(adapter, stop.value)
    for adapter, one in enumerate([model, *(with_fused(model, x) for x in adapters)]):
        steps = embed_in_steps(one, texts, "mean")
        with pytest.raises(StopIteration) as ended:
            while True:
                next(steps)
        torch.testing.assert_close(results[adapter], ended.value.value, rtol=1e-4, atol=1e-4)
    assert (results[1] - results[2]).abs().max() > 0.05
