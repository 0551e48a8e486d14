"""Peak FLOPs of devices: data sheets, and matmuls that are timed."""

import pytest
import torch

from lm.common.execution import Execution
from lm.experiments.speed import guess_flops_per_second
from lm.hardware.peak_flops import data_sheet_flops, peak_flops


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("A100-SXM4-40GB", 312),  # name in older drivers
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
    ],
)
def test_known_gpus_have_the_flops_of_their_data_sheets(name: str, teraflops: int) -> None:
    assert data_sheet_flops(name) == teraflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",
        "NVIDIA RTX A1000 Laptop GPU",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA GH200 480GB",
        "NVIDIA L40G",
        "Tesla T4",  # no bfloat16
        "Quadro RTX 4000",
        "",
    ],
)
def test_similar_names_are_not_mistaken_for_known_gpus(name: str) -> None:
    assert data_sheet_flops(name) is None


def test_a_device_without_a_data_sheet_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.hardware.peak_flops.seconds_waiting_for_cores", lambda: 0.0)
    assert 1e8 < (peak_flops(torch.device("cpu"), torch.bfloat16) or 0) < 1e15


def test_products_beside_other_programs_are_not_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of three products is beside another program, and counts only for how fast the machine is now."""
    cpu, products = torch.device("cpu"), [(3e10, 0.5), (1e10, 0.0), (2e10, 0.02)]
    monkeypatch.setattr("lm.hardware.peak_flops.time_matmuls", lambda device, dtype: products)
    assert peak_flops(cpu, torch.float32) == 2e10
    products[1:] = [(1e10, 0.2)]
    assert peak_flops(cpu, torch.float32) is None
    monkeypatch.setattr("lm.experiments.speed.time_matmuls", lambda device, dtype: products)
    assert guess_flops_per_second(Execution(device="cpu")) == pytest.approx(0.3 * 3e10)
