"""Comparisons of the kernels with their references on random cases.

Each public function is a fuzz target: it compares some cases and returns their number. A case is a text, a training of
merges, a decode step, or a generation.
"""

import copy
import random
from collections import Counter
from functools import cache
from unittest import mock

import torch

from lm.common.errors import InvalidUtf8Error
from lm.inference.kv_cache import PAGE_TOKENS
from lm.inference.runners.cpu_layers import CpuAttention, CpuNorm, LowPrecisionLinear
from lm.inference.runners.torch_runner import DecodeAttention
from lm.model.attention import MultiHeadSelfAttention
from lm.model.config import ModelConfig, MoEConfig
from lm.model.norm import RMSNorm
from lm.model.rope import RotaryEmbedding
from lm.text.patterns import PATTERNS
from lm.text.pretokenize import END_OF_TEXT, pretokenize
from lm.tokenizer.bpe import train_merges
from lm.tokenizer.pretoken_counts import count_pretokens
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.adapters import random_adapter
from tests.helpers.generating import make_model, random_cache
from tests.helpers.generation_cases import Case, check_cases
from tests.helpers.kernels import OVERLAPPING_SPECIALS, PIECES, expected_starts, find_starts
from tests.helpers.naive_bpe import naive_encode, naive_merges
from tests.helpers.pretoken_counts import counts_table
from tests.helpers.tokenizers import make_tokenizer

_PIECES = [*PIECES, "the", " and", " a", "ab", "\n\n", "aaa", " x", "<|end", "I'm", "\r"]
_SPECIALS = OVERLAPPING_SPECIALS


def _character(source: random.Random) -> str:
    point = source.randrange(source.choice([0x80, 0x3100, 0x110000]))
    return chr(point if not 0xD800 <= point < 0xE000 else point - 0xD000)


def _text(source: random.Random) -> str:
    """Make a short text of pieces that are hard for the pattern, of any characters, or of a few letters."""
    size = source.randrange(12)
    match source.randrange(4):
        case 0:
            return "".join(_character(source) for _ in range(size))
        case 1:
            return "".join(source.choices("ab ", k=5 * size))
        case _:
            filler = source.choice("a1 .\u3000") * source.randrange(70) if source.random() < 0.2 else ""
            return filler + "".join(source.choices(_PIECES, k=size))


def _damage(source: random.Random, data: bytes) -> bytes:
    """Replace up to two bytes by one or two random ones."""
    i = source.randrange(len(data) + 1)
    return data[:i] + source.randbytes(source.randrange(1, 3)) + data[i + source.randrange(3) :]


def pretoken_starts(source: random.Random) -> int:
    """Compare pretoken starts and offsets of invalid UTF-8, with other bytes around the text."""
    for _ in range(200):
        data = _text(source).encode()
        if source.random() < 0.3:
            data = _damage(source, data)
        before, after = source.randbytes(source.randrange(70)), source.choice([b"\0", b"s", b"\x80", b" ", b"\xff"])
        pattern = source.choice(list(PATTERNS.values()))
        assert find_starts(data, before, after, pattern) == expected_starts(data, pattern), data
    return 200


@cache
def _tokenizers() -> list[Tokenizer]:
    """Make tokenizers with few and many merges, 16-bit and 32-bit ids, and overlapping special tokens."""
    first = make_tokenizer(special_tokens=_SPECIALS)
    wide = {70_000 + token_id: token for token_id, token in first.vocab.items()}
    others = [make_tokenizer(PATTERNS[name], _SPECIALS) for name in PATTERNS if name != "gpt2"]
    small = make_tokenizer(special_tokens=_SPECIALS, merges=30)
    return [first, Tokenizer(wide, first.merges, _SPECIALS), small, *others]


def encoding(source: random.Random) -> int:
    """Compare the ids of many texts, in blocks and windows of any size, with special tokens allowed or not."""
    tokenizer = source.choice(_tokenizers())
    texts = [_text(source) for _ in range(200)]
    allowed = [END_OF_TEXT] if source.random() < 0.5 else _SPECIALS
    data = END_OF_TEXT.join(texts).encode()
    window = source.choice([1, 7, 64, 150, 1000, 1 << 19])
    size = source.choice([1, 13, 100, 1 << 20])
    blocks = (data[i : i + size] for i in range(0, len(data), size))
    actual = [token_id for ids in tokenizer.encode_blocks(blocks, allowed, window) for token_id in ids.tolist()]
    if allowed is _SPECIALS:  # they may start in one text and end in the next
        assert actual == tokenizer.encode_reference(END_OF_TEXT.join(texts), allowed), texts
        return len(texts)
    end_id, start = tokenizer.special_ids[END_OF_TEXT], 0
    for text in texts:
        expected = [*tokenizer.encode_reference(text, allowed), end_id]
        assert [*actual, end_id][start : start + len(expected)] == expected, text
        start += len(expected)
    return len(texts)


def invalid_utf8(source: random.Random) -> int:
    """Compare the byte and its offset in the errors for texts that may be invalid, in blocks and windows."""
    tokenizer = source.choice(_tokenizers())
    for _ in range(50):
        data = _damage(source, _text(source).encode())
        size, window = source.randrange(1, 40), source.randrange(1, 150)
        blocks = [data[i : i + size] for i in range(0, len(data), size)]
        result: list[int] | int
        try:
            result = [token_id for ids in tokenizer.encode_blocks(blocks, (), window) for token_id in ids.tolist()]
        except InvalidUtf8Error as error:
            assert data[error.offset] == error.byte, data
            result = error.offset
        offset = expected_starts(data)
        assert result == (offset if isinstance(offset, int) else tokenizer.encode_reference(data.decode(), [])), data
    return 50


def counting(source: random.Random) -> int:
    """Compare the pretoken counts of many texts, in blocks, with little or much memory."""
    texts = [_text(source) for _ in range(100)]
    size = source.choice([3, 50, 1 << 20])
    blocks = ([data[i : i + size] for i in range(0, len(data), size)] for data in map(str.encode, texts))
    actual: Counter[bytes] = Counter()
    for table in count_pretokens(blocks, [], memory_bytes=source.choice([1, 512 << 20])):
        actual.update(dict(zip(*table.to_pydict().values(), strict=True)))
    expected: Counter[bytes] = Counter()
    for text in texts:
        expected.update(pretoken.encode() for pretoken in pretokenize(text))
    assert actual == expected, texts
    return len(texts)


def _few_letters(source: random.Random, longest: int) -> str:
    return "".join(source.choices(source.choice(["ab", "abc", "a", "aé"]), k=source.randrange(1, longest)))


def training(source: random.Random) -> int:
    """Compare the merges learned from a few words with many ties."""
    for _ in range(20):
        words = [_few_letters(source, 14).encode() for _ in range(source.randrange(1, 9))]
        counts = {word: source.randrange(1, 6) for word in words}
        merges = source.randrange(25)
        _, actual = train_merges(counts_table(counts), 256 + merges, [])
        assert actual == naive_merges(counts, merges), counts
    return 20


def _random_tokenizer(source: random.Random) -> Tokenizer:
    """Make a tokenizer of random merges, in an order that the kernels support."""
    tokens, merges = [b"a", b"b"], []
    for _ in range(source.randrange(12)):
        pair = (source.choice(tokens), source.choice(tokens))
        if pair[0] + pair[1] not in tokens:
            merges.append(pair)
            tokens.append(pair[0] + pair[1])
    return Tokenizer(dict(enumerate([*(bytes([i]) for i in range(256)), *tokens[2:]])), merges)


def random_merges(source: random.Random) -> int:
    """Compare random merges on pretokens of two letters, up to many blocks long."""
    tokenizer = _random_tokenizer(source)
    assert tokenizer._fast_encoder is not None
    texts = ["".join(source.choices("ab", k=source.randrange(1, 60))) for _ in range(100)]
    unit = source.choice(texts)
    texts.append((unit * 5000)[: source.randrange(1, 5000)])
    actual = tokenizer.encode("\n".join(texts))
    expected = [token_id for text in texts for token_id in [*tokenizer.encode_reference(text, []), 10]][:-1]
    assert actual == expected, tokenizer.merges
    assert tokenizer.encode(texts[0]) == naive_encode(tokenizer, texts[0], []), texts[0]
    return len(texts)


def decode_step(source: random.Random) -> int:
    """Compare attention for one new token and RMSNorm with the layers."""
    torch.manual_seed(source.getrandbits(32))
    dtype, tolerance = source.choice([(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
    kv_heads, half = source.randrange(1, 4), source.randrange(1, 20)
    heads, width = kv_heads * source.randrange(1, 4), 2 * half
    length, rows = source.randrange(1, 50), source.randrange(1, 4)
    rope = RotaryEmbedding(100.0, width, length) if source.random() < 0.5 else None
    config = ModelConfig(
        d_model=heads * width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        position_encoding="rope" if rope else "none",
    )
    layer = MultiHeadSelfAttention(config, rope, dtype=dtype)
    layer.requires_grad_(False).output_proj.weight.copy_(torch.eye(heads * width))
    cpu_layer = CpuAttention(layer, LowPrecisionLinear)
    for _ in range(20):
        x = torch.randn(rows, 1, heads * width).to(dtype)
        positions = torch.randint(length, (rows,))
        stored = random_cache(config, rows, length, dtype=dtype)
        caches = [stored, copy.deepcopy(stored)]
        attention = [
            DecodeAttention(x.keys[0], x.values[0], x.page_table[:rows].contiguous(), positions) for x in caches
        ]
        actual = cpu_layer.attend(torch.cat(layer.project(x), -1), attention[0])
        expected = layer(x, positions[:, None], attention[1])
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(caches[0].keys, caches[1].keys, rtol=tolerance, atol=tolerance)
        assert caches[0].values.equal(caches[1].values)
    norm = RMSNorm(heads * width, dtype=dtype).requires_grad_(False)
    torch.testing.assert_close(CpuNorm(norm)(x), norm(x), rtol=tolerance, atol=tolerance)
    return 21


def generation(source: random.Random) -> int:
    """Compare an engine of little memory, which shares pages and computes in chunks, some sequences with adapters, with
    models without a cache."""
    kv_heads, context = source.randrange(1, 3), source.randrange(20, 90)
    model = make_model(
        source.randrange(5, 40),
        context,
        num_layers=source.randrange(1, 3),
        num_heads=kv_heads * source.randrange(1, 3),
        num_kv_heads=kv_heads,
        head_dim=2 * source.randrange(2, 6),
        position_encoding=source.choice(["rope", "rope", "none"]),
        qk_norm=source.random() < 0.3,
        qkv_bias=source.random() < 0.3,
        norm_placement=source.choice(["pre", "pre", "post"]),
        logit_softcap=source.choice([0.0, 0.0, 5.0]),
        sliding_window=source.choice([None, None, source.randrange(1, 40)]),
        moe=MoEConfig(num_experts=3) if source.random() < 0.1 else None,
    )
    targets: list[list[str]] = [[], ["q_proj", "w2"], ["v_proj", "output_proj"], ["w1"]]
    adapters = [
        random_adapter(model, source.randrange(1, 7), source.choice(targets), source.getrandbits(16))
        for _ in range(source.choice([0, 0, 1, 3]))
    ]
    adapters = [adapter for adapter in adapters if adapter]  # a mixture of experts has no such layer outside them
    cases = [
        Case(
            [(source.randrange(3), source.randrange(1, context // 3)) for _ in range(source.randrange(1, 4))],
            source.randrange(16),
            source.random() < 0.3,
            source.randrange(4),
            source.random() < 0.1,
            source.randrange(len(adapters) + 1),
        )
        for _ in range(source.randrange(1, 5))
    ]
    num_pages, chunk = source.randrange(8, 24), source.choice([1, 16, 32, 50, 200])
    limits = num_pages, chunk, source.random() < 0.5, source.randrange(1, 5)
    with mock.patch("lm.inference.cache_size.MIN_CHUNK_TOKENS", PAGE_TOKENS):  # so that short texts have rings too
        return check_cases(model.double().eval(), cases, *limits, adapters)
