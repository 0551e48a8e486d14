"""Choice of the device and recognition of out-of-memory errors."""

import logging

import pytest
import torch

from lm.common.errors import UserError
from lm.hardware.device import _log_choice, choose_device, choose_precision, has_bfloat16, is_out_of_memory


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_out_of_memory_errors_are_recognized_by_type(error: BaseException) -> None:
    assert is_out_of_memory(error)


def test_a_failed_cpu_allocation_is_recognized_by_its_message() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)


def test_another_runtime_error_is_not_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2) @ torch.empty(3)
    assert not is_out_of_memory(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_absent_device_is_a_user_error() -> None:
    for device in ("cuda", "cuda:1"):
        with pytest.raises(UserError, match=f"{device}.*cannot be used; this machine has cpu"):
            choose_device(device)


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    for device in ("gpu", "", "CPU", "tpu:0", "meta"):
        with pytest.raises(UserError, match="cannot be used; this machine has"):
            choose_device(device)


def test_the_choice_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    _log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="lm"):
        chosen = {choose_device("auto") for _ in range(3)}
    assert len(caplog.messages) == len(chosen) == 1
    assert caplog.messages[0].startswith(f"Using device {chosen.pop()}")


@pytest.mark.parametrize(
    ("instructions", "precision"),
    [
        ({"avx2": True}, "float32"),
        ({"avx512_f": True, "avx512_bf16": False}, "float32"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
        ({"neon": True, "bf16": True}, "bfloat16"),
    ],
)
def test_precision_is_bfloat16_if_the_processor_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, instructions: dict[str, bool], precision: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    assert choose_precision("auto", torch.device("cpu")) == precision
    assert choose_precision("float32", torch.device("cpu")) == "float32"


def test_a_warning_says_that_bfloat16_is_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with caplog.at_level(logging.WARNING):
        assert choose_precision("bfloat16", torch.device("cpu")) == "bfloat16"
    assert "train.precision to auto" in caplog.text


def test_this_processor_says_whether_it_has_bfloat16() -> None:
    assert isinstance(has_bfloat16(torch.device("cpu")), bool)
