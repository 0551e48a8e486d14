"""``torch.compile`` of the loss."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lm.distributed.plan
from lm.common.errors import UserError
from lm.common.execution import ParallelKind
from lm.data.batches import Batch
from lm.distributed.plan import Parallel
from lm.model import TransformerLM
from lm.train.trainer import Trainer
from tests.helpers.training import MODEL, small_trainer, weights_equal


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["at once", "after the backward pass", "none"])
def test_failing_compilation_warns_and_trains_without(
    tmp_path: Path, finished: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    def fake_compile(loss: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        def compiled_loss(micro_batch: Batch) -> Tensor:
            if failure == "at once":
                raise RuntimeError("no C++ compiler\nsecond line")
            if failure == "after the backward pass":
                loss(micro_batch).backward()
                raise RuntimeError("no C++ compiler")
            return loss(micro_batch)

        return compiled_loss

    monkeypatch.setattr(torch, "compile", fake_compile)
    monkeypatch.setattr(lm.distributed.plan, "_MIN_FLOPS_TO_COMPILE", 0)
    with caplog.at_level(logging.WARNING, "lm.distributed"):
        trainer = small_trainer(tmp_path, compile=True)
    messages = [record.getMessage() for record in caplog.records]
    if failure == "none":
        assert messages == []
    else:
        assert len(messages) == 1 and messages[0].endswith("no C++ compiler")
    trainer.run()
    assert weights_equal(trainer.model, finished.model)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nsecond line"), None])
def test_out_of_memory_in_the_compiled_step_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    """The training would need the memory without torch.compile too."""

    def fail(micro_batch: Batch) -> Tensor:
        if error:
            raise error
        return torch.empty(1 << 60)  # raises the CPU's out-of-memory error

    monkeypatch.setattr(torch, "compile", lambda loss: fail)
    monkeypatch.setattr(lm.distributed.plan, "_MIN_FLOPS_TO_COMPILE", 0)
    advice = (
        r"out of memory with micro-batches of 2 sequences of 16 .*train\.gradient_accumulation_steps \(now 2\).*"
        r"activation_checkpointing.*batch_size \(now 4\)"
    )
    with pytest.raises(UserError, match=advice):
        small_trainer(tmp_path, compile=True, gradient_accumulation_steps=2)
    assert not [record for record in caplog.records if record.name.startswith("lm.distributed")]


@pytest.mark.usefixtures("process_group_of_one")
@pytest.mark.parametrize("kind", ["zero2", "fsdp"])
def test_a_rank_on_which_compilation_fails_sends_what_the_others_send(
    monkeypatch: pytest.MonkeyPatch, kind: ParallelKind
) -> None:
    """Else the others would wait for it forever."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("no C++ compiler")

    x = torch.arange(MODEL.context_length)[None]

    def called_collectives(compile_block: Callable[[Any], Any]) -> list[str]:
        model, collectives = TransformerLM(MODEL), Mock()
        parallel = Parallel(model, kind)
        originals = [layer.forward for layer in model.layers]
        with monkeypatch.context() as patches:
            for name in ("all_gather_single", "reduce_scatter_single"):
                getattr(collectives, name).side_effect = getattr(dist, name)
                patches.setattr(dist, name, getattr(collectives, name))
            patches.setattr(torch, "compile", compile_block)
            parallel.compile_loss(lambda batch: model.loss(*batch), (x, x))
        assert parallel.is_compiled or [layer.forward for layer in model.layers] == originals
        return [name for name, *_ in collectives.mock_calls]

    expected = called_collectives(lambda forward: forward)
    assert called_collectives(lambda forward: fail) == expected and len(expected) > 2 * MODEL.num_layers


@pytest.mark.usefixtures("process_group_of_one")
def test_compiled_ddp_sends_gradients_of_the_last_block_before_those_of_the_first_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph of the whole loss would have all gradients at the end of its backward pass."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    x = torch.arange(MODEL.context_length)[None]
    config = replace(MODEL, num_layers=3)
    model, plain = TransformerLM(config), TransformerLM(config)
    plain.load_state_dict(model.state_dict())
    parallel = Parallel(model, "ddp")
    loss = parallel.compile_loss(lambda batch: model.loss(*batch), (x, x))
    assert parallel.is_compiled
    events: list[str] = []

    def enter(module: nn.Module, arguments: Any, out: Tensor) -> None:
        out.register_hook(lambda gradient: events.append("enter the first block"))

    model.layers[0].register_forward_hook(enter)
    last = model.get_parameter("layers.2.attn.output_proj.weight")
    last.register_post_accumulate_grad_hook(lambda p: events.append("have the last block's gradient"))
    loss((x, x)).backward()
    parallel.finish_gradient_synchronization()
    assert events == ["have the last block's gradient", "enter the first block"]
    plain.loss(x, x).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-6), name  # type: ignore[arg-type]


@pytest.mark.usefixtures("process_group_of_one")
def test_evaluation_does_not_call_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches have other shapes, each of which would be compiled."""
    calls: list[Any] = []

    def record(forward: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(*args: Any, **kwargs: Any) -> Any:
            calls.append(forward)
            return forward(*args, **kwargs)

        return compiled

    monkeypatch.setattr(torch, "compile", record)
    x = torch.arange(MODEL.context_length)[None]
    model = TransformerLM(MODEL)
    loss = Parallel(model, "ddp").compile_loss(lambda batch: model.loss(*batch), (x, x))
    calls.clear()
    with torch.no_grad():
        loss((x, x))
    assert not calls
    loss((x, x))
    assert len(calls) == MODEL.num_layers + 3  # the embedding, the last norm and the head


def test_short_runs_are_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda loss: pytest.fail("compiled"))
    small_trainer(tmp_path, compile=True)
