"""Blocks of GGUF are dequantized to the same bits as by llama.cpp's own library."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.checkpoint.gguf import quantized_blocks
from lm.checkpoint.gguf.quantized_blocks import BLOCKS, dequantize

gguf = pytest.importorskip("gguf", reason="the gguf library is not installed")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("type_name", BLOCKS)
@given(data=st.data())
def test_all_bytes_become_the_same_numbers(type_name: str, data: st.DataObject) -> None:
    block = BLOCKS[type_name]
    count = data.draw(st.integers(1, 3))
    raw = data.draw(st.binary(min_size=count * block.num_bytes, max_size=count * block.num_bytes))
    values = np.frombuffer(raw, np.uint8)
    expected = gguf.dequantize(values, gguf.GGMLQuantizationType[type_name])
    assert np.array_equal(dequantize(values, type_name), expected.reshape(-1), equal_nan=True)


@pytest.mark.parametrize("type_name", BLOCKS)
def test_a_block_is_as_the_library_says(type_name: str) -> None:
    block, kind = BLOCKS[type_name], gguf.GGMLQuantizationType[type_name]
    assert block.number == kind
    assert (block.num_numbers, block.num_bytes) == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_numbers_come_back_within_a_step(type_name: str) -> None:
    numbers = np.random.default_rng(0).standard_normal((7, 64)).astype(np.float32)
    values = gguf.quantize(numbers, gguf.GGMLQuantizationType[type_name])
    step = 2 * np.abs(numbers).max() / {"8": 254, "5": 31, "4": 15}[type_name[1]]
    assert np.abs(dequantize(values.reshape(-1), type_name).reshape(7, 64) - numbers).max() <= step


def test_chunks_do_not_change_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 255, 210 * 9, dtype=np.uint8)
    whole = dequantize(values, "Q6_K")
    monkeypatch.setattr(quantized_blocks, "_CHUNK_NUMBERS", 1024)
    assert np.array_equal(dequantize(values, "Q6_K"), whole, equal_nan=True)
