"""FlashAttention, in torch and in Triton, equals the plain reference in float64, forward and backward.

Without a GPU the Triton kernels run in Triton's interpreter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.common.errors import UserError
from lm.model import FlashAttentionTorch, FlashAttentionTriton, scaled_dot_product_attention
from lm.model.ops.flash_attention import load_kernels
from tests.helpers.examples import examples
from tests.helpers.gpus import compile_for_gpus
from tests.helpers.memory import peak_tensor_bytes

HAS_TRITON = find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="the extra triton is not installed")
FORMS = [FlashAttentionTorch, pytest.param(FlashAttentionTriton, marks=needs_triton)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
Form = type[FlashAttentionTorch] | type[FlashAttentionTriton]


def reference(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device)
    return scaled_dot_product_attention(q, k, v, mask.tril() if is_causal else mask)


def random_inputs(
    kv_heads: int, group_size: int, length: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values and a gradient of the output."""
    torch.manual_seed(seed)
    q, grad = torch.randn(2, kv_heads * group_size, length, width)
    k, v = torch.randn(2, kv_heads, length, width)
    return q.to(DEVICE, dtype), k.to(DEVICE, dtype), v.to(DEVICE, dtype), grad.to(DEVICE, dtype)


def output_and_gradients(
    attention: Callable[..., Tensor], is_causal: bool, q: Tensor, k: Tensor, v: Tensor, grad: Tensor
) -> list[Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, is_causal)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def assert_equals_reference(form: Form, *inputs: Tensor, is_causal: bool) -> None:
    """Check output and gradients. The tolerance is relative to the largest element of all of them, if that is above 1.

    The saved output is rounded to the inputs' dtype. So an error of the size of the output enters all gradients.
    """
    results = output_and_gradients(form.apply, is_causal, *inputs)
    exact_results = output_and_gradients(reference, is_causal, *(x.double() for x in inputs))
    tolerance = TOLERANCES[inputs[0].dtype] * max(1.0, *(float(x.detach().abs().max()) for x in exact_results))
    for name, result, exact in zip(("out", "q", "k", "v"), results, exact_results, strict=True):
        assert result.dtype == inputs[0].dtype and result.shape == exact.shape
        assert (result.double() - exact).abs().max() <= tolerance, name


@contextmanager
def block_sizes(queries: int, keys: int) -> Iterator[None]:
    """Set the size of a tile, without tuning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.model.ops.flash_attention._BLOCK_QUERIES", queries)
        patch.setattr("lm.model.ops.flash_attention._BLOCK_KEYS", keys)
        if HAS_TRITON:
            import triton

            kernels = load_kernels()
            config = triton.Config({"BLOCK_QUERIES": queries, "BLOCK_KEYS": keys})
            for kernel in (kernels.forward_kernel, kernels.key_value_gradient_kernel, kernels.query_gradient_kernel):
                patch.setattr(kernel, "configs", [config])
        yield


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_causal", [False, True])
@examples(20)
@given(
    kv_heads=st.integers(1, 2),
    group_size=st.integers(1, 2),
    length=st.integers(1, 50),
    width=st.sampled_from([16, 24, 40, 64]),
    queries=st.sampled_from([16, 32]),
    keys=st.sampled_from([16, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_flash_attention_equals_reference(
    form: Form,
    is_causal: bool,
    kv_heads: int,
    group_size: int,
    length: int,
    width: int,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    with block_sizes(queries, keys):
        inputs = random_inputs(kv_heads, group_size, length, width, dtype, seed)
        assert_equals_reference(form, *inputs, is_causal=is_causal)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        (torch.float32, 80),
        (torch.bfloat16, 256),
        pytest.param(torch.bfloat16, 80, marks=pytest.mark.long),
        pytest.param(torch.float32, 256, marks=pytest.mark.long),
    ],
)
def test_two_heads_of_512_tokens_equal_reference(form: Form, is_causal: bool, dtype: torch.dtype, width: int) -> None:
    """With the tile sizes that are used, or that the autotuner chooses."""
    assert_equals_reference(form, *random_inputs(2, 1, 512, width, dtype), is_causal=is_causal)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, for rows past the end
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sign", [-1, 1])
def test_large_scores_do_not_overflow(form: Form, is_causal: bool, sign: int) -> None:
    """All scores are near ±300, so their exponentials are 0 or infinite in float32. 35 tokens leave a tile unfilled."""
    q, k, v, grad = random_inputs(1, 2, 35, 16)
    q, k = 75.0 + 0.1 * q, sign * (1.0 + 0.001 * k)  # scores are 16 · ±75 / 4
    with block_sizes(16, 32):
        results = output_and_gradients(form.apply, is_causal, q, k, v, grad)
    exact_results = output_and_gradients(reference, is_causal, *(x.double() for x in (q, k, v, grad)))
    for result, exact in zip(results, exact_results, strict=True):
        torch.testing.assert_close(result, exact.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_saved_tensors_are_inputs_output_and_log_sum_exp(form: Form, is_causal: bool) -> None:
    q, k, v, _ = random_inputs(2, 2, 70, 24)
    out = form.apply(q.requires_grad_(), k, v, is_causal)
    *saved, log_sum_exp = out.grad_fn.saved_tensors
    for tensor, expected in zip(saved, (q, k, v, out), strict=True):
        assert torch.equal(tensor, expected)
    scores = q.double() @ k.double().repeat_interleave(2, 0).mT / 24**0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(70, 70, dtype=torch.bool, device=DEVICE).triu(1), float("-inf"))
    assert log_sum_exp.dtype == torch.float32
    torch.testing.assert_close(log_sum_exp, scores.logsumexp(-1).float(), rtol=1e-5, atol=1e-5)


def test_torch_form_has_exact_gradients_in_float64() -> None:
    q, k, v, _ = (x.double().requires_grad_() for x in random_inputs(2, 2, 9, 3))
    with block_sizes(4, 3):
        assert torch.autograd.gradcheck(lambda q, k, v: FlashAttentionTorch.apply(q, k, v, True), (q, k, v))


@pytest.mark.parametrize("form", FORMS)
def test_inputs_need_not_be_contiguous(form: Form) -> None:
    q, k, v, grad = (x.mT.contiguous().mT for x in random_inputs(1, 1, 20, 16))
    assert not q.is_contiguous()
    assert_equals_reference(form, q, k, v, grad, is_causal=True)


def test_torch_form_computes_in_float32_under_autocast() -> None:
    inputs = random_inputs(1, 1, 40, 16)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_equals_reference(FlashAttentionTorch, *inputs, is_causal=True)


@pytest.mark.slow
def test_memory_of_the_torch_form_grows_with_the_length() -> None:
    """A doubled length doubles the peak; the reference, which has T × T scores, needs four times as much."""

    def peak(attention: Callable[..., Tensor], length: int) -> int:
        inputs = random_inputs(1, 1, length, 16)
        return peak_tensor_bytes(lambda: output_and_gradients(attention, True, *inputs))

    with block_sizes(32, 32):
        assert peak(FlashAttentionTorch.apply, 1024) < 2.1 * peak(FlashAttentionTorch.apply, 512)
    assert peak(reference, 1024) > 3.5 * peak(reference, 512)


@needs_triton
def test_results_of_the_kernels_are_the_same_in_each_run() -> None:
    inputs = random_inputs(1, 3, 50, 16)
    with block_sizes(16, 16):
        first, second = (output_and_gradients(FlashAttentionTriton.apply, True, *inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_compiled_attention_has_the_same_gradients(form: Form) -> None:
    inputs = random_inputs(2, 2, 40, 16)
    compiled = torch.compile(lambda *arguments: form.apply(*arguments), fullgraph=True, backend="aot_eager")
    with block_sizes(16, 16):
        results = [output_and_gradients(attention, True, *inputs) for attention in (form.apply, compiled)]
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((2, 8, 16), (2, 8, 16), (2, 8, 32), "same T and K"),
        ((2, 8, 16), (2, 9, 16), (2, 9, 16), "same T and K"),
        ((8, 16), (8, 16), (8, 16), "same T and K"),
        ((3, 8, 16), (2, 8, 16), (2, 8, 16), "multiple"),
    ],
)
def test_wrong_shapes_are_named(form: Form, q: Any, k: Any, v: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        form.apply(*(torch.zeros(shape, device=DEVICE) for shape in (q, k, v)), True)


@needs_triton
@pytest.mark.parametrize(("width", "dtype"), [(257, torch.float32), (16, torch.float64)])
def test_inputs_that_the_kernels_do_not_take_are_named(width: int, dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match="Use FlashAttentionTorch"):
        FlashAttentionTriton.apply(*torch.zeros(3, 1, 8, width, dtype=dtype, device=DEVICE), True)


def test_dtypes_must_be_equal() -> None:
    q, k, v, _ = random_inputs(1, 1, 8, 16)
    with pytest.raises(UserError, match=r"float32, torch\.bfloat16"):
        FlashAttentionTorch.apply(q, k.bfloat16(), v, True)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "shapes",
    [
        ["80-128-bfloat16", "90-128-bfloat16", "80-64-float32"],  # float32 is largest where shared memory is smallest
        pytest.param(["90-64-float32"], marks=pytest.mark.long),
    ],
)
def test_kernels_compile_for_gpus(shapes: list[str]) -> None:
    kernels = compile_for_gpus("flash", *shapes)
    assert len(kernels) == 3 * len(shapes)
    assert all(kernel["has_tensor_cores"] == (kernel["dtype"] == "torch.bfloat16") for kernel in kernels)


@needs_triton
def test_kernels_refuse_tensors_on_a_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_kernels().IS_INTERPRETED, "value", False)
    with pytest.raises(UserError, match=r"needs a GPU.*TRITON_INTERPRET"):
        FlashAttentionTriton.apply(*torch.zeros(3, 1, 8, 16), True)
