"""Choice of the device and recognition of out-of-memory errors."""

import pytest
import torch

from lm.common.device import choose_device, is_out_of_memory
from lm.common.errors import UserError


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
    for device in ("gpu", "", "CPU", "tpu:0"):
        with pytest.raises(UserError, match="cannot be used; this machine has"):
            choose_device(device)
