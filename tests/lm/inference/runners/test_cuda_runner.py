"""CUDA graphs of decode steps: padding to the shapes of graphs changes nothing. On a GPU, graphs are replayed."""

import copy
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.inference.config import SampleConfig
from lm.inference.engine import generate
from lm.inference.generation_request import Generation
from lm.inference.runners.cuda_runner import CudaRunner, JoinedSwiGLU, join_layers
from lm.inference.runners.runner import prepare_for_inference
from lm.inference.runners.torch_runner import TorchRunner
from lm.model.config import MoEConfig
from lm.model.transformer import TransformerLM
from tests.helpers.examples import examples
from tests.helpers.generating import make_model, random_cache

ROWS, LENGTH = 5, 112


class RecomputedStep:
    """Replaces a CUDA graph on machines without a GPU: ``replay`` computes the step again."""

    def __init__(self, runner: CudaRunner, rows: int, keys: int) -> None:
        self.runner, self.shape = runner, (rows, keys)
        self.logits = runner._compute(*self.shape)

    def replay(self) -> None:
        self.logits.copy_(self.runner._compute(*self.shape))


@examples(40)
@given(
    steps=st.lists(st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=ROWS), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_padded_rows_and_keys_change_nothing(steps: list[list[int]], seed: int) -> None:
    check_runner(make_model(context_length=LENGTH, num_kv_heads=2), steps, seed, 1e-5)


@pytest.mark.skipif(not find_spec("triton"), reason="the extra triton is not installed")
@examples(8)
@given(
    steps=st.lists(st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=ROWS), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_padded_rows_and_keys_change_nothing_in_triton(steps: list[list[int]], seed: int) -> None:
    model = make_model(context_length=LENGTH, num_kv_heads=1, d_ff=24, num_layers=1).bfloat16().requires_grad_(False)
    join_layers(model)
    check_runner(model, steps, seed, 0.05)


def check_runner(model: TransformerLM, steps: list[list[int]], seed: int, tolerance: float) -> None:
    dtype = model.head_weight.dtype
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    caches = [random_cache(model.config, ROWS, LENGTH, dtype=dtype)]
    caches.append(copy.deepcopy(caches[0]))
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        runner, reference = CudaRunner(model, caches[0]), TorchRunner(model, caches[1])
        assert (runner._triton_step is not None) == (dtype == torch.bfloat16)

        def capture(rows: int, keys: int) -> tuple[RecomputedStep, torch.Tensor]:
            assert (rows in (1, 2, 4, ROWS)) and (keys in (64, LENGTH))
            step = RecomputedStep(runner, rows, keys)
            return step, step.logits

        patch.setattr(runner, "_capture", capture)
        for positions in steps:
            ids = torch.randint(model.config.vocab_size or 1, (len(positions),), generator=generator)
            inputs = torch.stack([ids, torch.tensor(positions)])
            logits = runner.decode(inputs, max(positions))
            expected = reference.decode(inputs, max(positions))
            torch.testing.assert_close(logits, expected.to(logits.dtype), atol=tolerance, rtol=tolerance)
            for stored in ("keys", "values"):  # page 0 may hold anything
                torch.testing.assert_close(
                    *(getattr(cache, stored)[:, :, 1:] for cache in caches), atol=tolerance, rtol=tolerance
                )
                getattr(caches[1], stored).copy_(getattr(caches[0], stored))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("moe", [None, MoEConfig(4, 2, d_expert=16)])
def test_graphs_on_a_gpu_generate_the_ids_of_the_cpu(moe: MoEConfig | None) -> None:
    model = make_model(context_length=LENGTH, moe=moe)
    prompts = [[1, 2, 3], [4], [5] * 40, [6, 7]]
    greedy = SampleConfig(temperature=0)
    cpu, gpu = ([Generation(prompt, 50, greedy) for prompt in prompts] for _ in range(2))
    generate(model, cpu)
    model = prepare_for_inference(model.to("cuda"))
    assert isinstance(model.layers[0].ffn, JoinedSwiGLU) == (moe is None and bool(find_spec("triton")))
    generate(model, gpu)
    assert [generation.ids for generation in gpu] == [generation.ids for generation in cpu]
