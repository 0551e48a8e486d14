"""Memory and gradients of FSDP."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lm.common.execution import Execution, ParallelKind
from lm.distributed import FSDP
from lm.distributed.plan import parallelize
from lm.model import ModelConfig, TransformerLM
from lm.model.adapter import add_adapter, trained_parameters
from lm.model.config import AdapterConfig
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("process_group_of_one")

IDS = torch.arange(16)[None]
DOWN_SHAPE = (16, 32)  # of a matrix of each block alone


def make_model(is_tied: bool = False, has_adapter: bool = False) -> TransformerLM:
    torch.manual_seed(0)
    config = ModelConfig(32, context_length=16, d_model=16, num_layers=6, num_heads=2, d_ff=32, tied_embeddings=is_tied)
    model = TransformerLM(config)
    return add_adapter(model, AdapterConfig(rank=2)) if has_adapter else model


def gathered_bytes(fsdp: FSDP) -> int:
    """Return the bytes of whole weights, and of those that are gathered ahead."""
    whole = sum(p.untyped_storage().nbytes() for unit in fsdp._units for p in unit.full)
    return whole + sum(unit._gather.buffer.nbytes for unit in fsdp._units if unit._gather)


def watch_backward_pass(model: TransformerLM, fsdp: FSDP) -> list[int]:
    """Return a list to which backward passes add the gathered bytes before each block."""
    seen: list[int] = []

    def watch(layer: nn.Module, inputs: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda _: seen.append(gathered_bytes(fsdp)))

    for layer in model.layers:
        layer.register_forward_hook(watch)
    return seen


@pytest.mark.parametrize("has_adapter", [False, True])
@pytest.mark.parametrize("is_resharded_after_forward", [True, False])
def test_checkpointing_gathers_no_more_blocks_in_the_backward_pass(
    is_resharded_after_forward: bool, has_adapter: bool
) -> None:
    seen: dict[bool, list[int]] = {}
    for has_checkpointing in (False, True):
        model = make_model(has_adapter=has_adapter)
        if has_checkpointing:
            parallelize(model, Execution(activation_checkpointing=True), "none")
        fsdp = FSDP(model, is_resharded_after_forward=is_resharded_after_forward)
        seen[has_checkpointing] = watch_backward_pass(model, fsdp)
        for _ in range(2):
            model.loss(IDS, IDS).backward()
            seen[has_checkpointing].append(gathered_bytes(fsdp))
            fsdp.finish_gradient_synchronization()
    assert seen[True] == seen[False]


def test_frozen_blocks_are_freed_in_the_backward_pass() -> None:
    """Each has its weights and those of the next block, as blocks of trained weights do."""
    model = make_model(has_adapter=True)
    block = sum(p.nbytes for p in model.layers[0].parameters())
    fsdp = FSDP(model)
    seen = watch_backward_pass(model, fsdp)
    for _ in range(2):
        model.loss(IDS, IDS).backward()
        assert gathered_bytes(fsdp) == 0
        fsdp.finish_gradient_synchronization()
    last_to_first = [2 * block] * 5 + [block]  # the embedding before the first has no backward pass
    assert seen == 2 * last_to_first


@pytest.mark.parametrize("is_tied", [False, True])
def test_frozen_weights_are_gathered_for_the_passes_that_need_them_and_never_reduced(
    monkeypatch: pytest.MonkeyPatch, is_tied: bool
) -> None:
    """The look-up of the embedding has no backward pass."""
    model = make_model(is_tied, has_adapter=True)
    fsdp = FSDP(model)
    gathers, reductions = (Mock(side_effect=f) for f in (dist.all_gather_single, dist.reduce_scatter_single))
    monkeypatch.setattr(dist, "all_gather_single", gathers)
    monkeypatch.setattr(dist, "reduce_scatter_single", reductions)
    blocks = model.config.num_layers
    for _ in range(3):
        for calls in (gathers, reductions):
            calls.reset_mock()
        model.loss(IDS, IDS).backward()
        fsdp.finish_gradient_synchronization()
        assert gathers.call_count == 1 + 2 * 2 * blocks + 2 and reductions.call_count == blocks
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trained_parameters(model).keys()


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_step_gathers_the_weights_of_each_call_twice(monkeypatch: pytest.MonkeyPatch, is_tied: bool) -> None:
    """For the forward and the backward pass, in which a tied embedding is gathered once. None is gathered in vain."""
    model = make_model(is_tied)
    fsdp = FSDP(model)
    calls, units = Mock(side_effect=dist.all_gather_single), 1 + model.config.num_layers + 1
    monkeypatch.setattr(dist, "all_gather_single", calls)
    for _ in range(3):
        calls.reset_mock()
        model.loss(IDS, IDS).backward()
        assert gathered_bytes(fsdp) == 0
        fsdp.finish_gradient_synchronization()
        with torch.no_grad():
            assert calls.call_count == 2 * units - is_tied
            model.loss(IDS, IDS)
            assert calls.call_count == 3 * units - is_tied


def test_gradients_of_blocks_with_frozen_weights() -> None:
    """The input of a frozen norm gets its gradient after all trained weights of the block."""

    def freeze(model: TransformerLM) -> TransformerLM:
        model.requires_grad_(False)
        for layer in model.layers:
            layer.ffn.requires_grad_(True)
        return model

    expected, model = freeze(make_model()), freeze(make_model())
    expected.loss(IDS, IDS).backward()
    fsdp = FSDP(model)
    model.loss(IDS, IDS).backward()
    assert gathered_bytes(fsdp) == 0
    fsdp.finish_gradient_synchronization()
    for p, expected_p in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected_p.grad)


class Failure(torch.autograd.Function):
    """Fails in the backward pass."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


def test_a_failed_backward_pass_leaves_nothing_behind() -> None:
    model = make_model()
    fsdp = FSDP(model)
    hook = model.layers[1].register_forward_pre_hook(lambda _, inputs: (Failure.apply(inputs[0]), *inputs[1:]))
    with pytest.raises(RuntimeError, match="out of memory"):
        model.loss(IDS, IDS).backward()
    hook.remove()
    fsdp.finish_gradient_synchronization()
    with fsdp.no_sync():
        model.loss(IDS, IDS).backward()
    model.loss(IDS, IDS).backward()
    assert gathered_bytes(fsdp) == 0 and fsdp._reductions == len(fsdp._units)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["average_gradients_of_vectors", "resume_with_whole_vectors", "start_with_the_weights_of_one_process"],
)
def test_two_ranks(tmp_path: Path, case: str) -> None:
    run_ranks("tests.helpers.rank_trainings", tmp_path, case, world_size=2)
    assert len([*tmp_path.glob("*.done")]) == 2


@pytest.mark.parametrize("kind", ["fsdp", "zero2"])
def test_matrices_gathered_in_the_dtype_of_autocast_change_no_gradient(kind: ParallelKind) -> None:
    """Bit for bit, with two micro-batches. Nor are copies of the matrices saved for the backward pass."""
    gradients, gathered, num_copies = [], [], []
    for dtype in (None, torch.bfloat16):
        model = make_model()
        fsdp = (parallel := parallelize(model, Execution(), kind, autocast_dtype=dtype)).wrapper
        assert isinstance(fsdp, FSDP)
        storages = [p.untyped_storage()._cdata for unit in fsdp._units for p in unit.full]
        saved: list[Tensor] = []

        def save(x: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(x)
            return x

        for number in range(2):
            part = IDS[:, number : number + 11]
            with nullcontext() if number else parallel.no_sync():
                with saved_tensors_hooks(save, lambda x: x), torch.autocast("cpu"):
                    loss = model.loss(part, part)
                loss.backward()
        with torch.no_grad(), torch.autocast("cpu"):
            seen: list[int] = []
            model.layers[3].register_forward_hook(lambda *_, seen=seen, fsdp=fsdp: seen.append(gathered_bytes(fsdp)))
            model(IDS)
        parallel.finish_gradient_synchronization()
        num_copies.append(sum(x.shape == DOWN_SHAPE and x.untyped_storage()._cdata not in storages for x in saved))
        gathered.append(max(seen))
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert all(grad is not None and grad.dtype == torch.float32 for grad in gradients[1])
    assert num_copies[0] > 0 == num_copies[1]
    assert gathered[1] < 0.6 * gathered[0]
