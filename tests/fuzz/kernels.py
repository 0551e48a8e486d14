"""The compiled kernels against the slow, obvious way, on random cases without end. A case is one text, one training of
merges, or one step of attention that is compared."""

import random
from collections import Counter
from functools import cache

import numpy as np
import torch

from lm import decode
from lm.bpe import train_merges
from lm.cache import OneMore
from lm.counts import count_pretokens
from lm.errors import NotUtf8
from lm.kernels.classes import character_classes
from lm.kernels.scan import scan
from lm.layers import MultiHeadSelfAttention, RMSNorm, RotaryEmbedding
from lm.pretokens import END_OF_TEXT, pretokenize
from lm.tokenizer import Tokenizer
from tests.test_bpe import naive_merges
from tests.test_kernels import OVERLAPPING, blanks, digits, letters, others
from tests.test_tokenizer import naive_encode
from tests.tokenizers_made import counts_table, make_tokenizer

_PIECES = [*letters, *digits, *blanks, *others, "the", " and", " a", "ab", "\n\n", "aaa", " x", "<|end", "I'm", "\r"]
_SPECIALS = OVERLAPPING
_CLASSES = character_classes()
_BUFFER, _STARTS = np.zeros(1 << 14, np.uint8), np.empty(1 << 14, np.int32)


def _character(source: random.Random) -> str:
    point = source.randrange(source.choice([0x80, 0x3100, 0x110000]))
    return chr(point if not 0xD800 <= point < 0xE000 else point - 0xD000)


def _text(source: random.Random, longest: int = 12) -> str:
    """A short text: of what matters to the pattern, of any characters, or of a few letters."""
    size = source.randrange(longest)
    match source.randrange(4):
        case 0:
            return "".join(_character(source) for _ in range(size))
        case 1:
            return "".join(source.choices("ab ", k=5 * size))
        case _:
            filler = source.choice("a1 .\u3000") * source.randrange(70) if source.random() < 0.2 else ""
            return filler + "".join(source.choices(_PIECES, k=size))


def _damaged(source: random.Random, data: bytes) -> bytes:
    place = source.randrange(len(data) + 1)
    return data[:place] + source.randbytes(source.randrange(1, 3)) + data[place + source.randrange(3) :]


def _starts(data: bytes) -> list[int] | int:
    """Where pretokens begin by ``regex``; -1 less the place that is not UTF-8."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return -1 - error.start
    starts, at = [], 0
    for pretoken in pretokenize(text):
        starts.append(at)
        at += len(pretoken.encode())
    return starts


def scanning(source: random.Random) -> int:
    """Where pretokens begin, and what is not UTF-8, with garbage around the text."""
    for _ in range(200):
        data = _text(source).encode()
        if source.random() < 0.3:
            data = _damaged(source, data)
        before = source.randrange(70)
        end = before + len(data)
        whole = source.randbytes(before) + data + source.choice([b"\0", b"s", b"\x80", b" ", b"\xff"]) * 128
        _BUFFER[: len(whole)] = np.frombuffer(whole, np.uint8)
        found = int(scan(_BUFFER, before, end, _CLASSES, _STARTS))
        got = (_STARTS[:found] - before).tolist() if found >= 0 else found + before
        assert got == _starts(data), data
    return 200


@cache
def _tokenizers() -> list[Tokenizer]:
    """Tokenizers of few and many merges, ids of two and four bytes, and special tokens that overlap."""
    first = make_tokenizer(special_tokens=_SPECIALS)
    wide = {70_000 + token_id: token for token_id, token in first.vocab.items()}
    return [first, Tokenizer(wide, first.merges, _SPECIALS), make_tokenizer(special_tokens=_SPECIALS, merges=30)]


def encoding(source: random.Random) -> int:
    """Ids of many texts at once, in blocks and windows of any size, special tokens allowed or plain text."""
    tokenizer = source.choice(_tokenizers())
    texts = [_text(source) for _ in range(200)]
    allowed = [END_OF_TEXT] if source.random() < 0.5 else _SPECIALS
    data = END_OF_TEXT.join(texts).encode()
    window = source.choice([1, 7, 64, 150, 1000, 1 << 19])
    size = source.choice([1, 13, 100, 1 << 20])
    blocks = (data[i : i + size] for i in range(0, len(data), size))
    found = [token_id for ids in tokenizer.encode_blocks(blocks, allowed, window) for token_id in ids.tolist()]
    if allowed is _SPECIALS:  # which may begin in one text and end in the next
        assert found == tokenizer.encode_reference(END_OF_TEXT.join(texts), allowed), texts
        return len(texts)
    end, at = tokenizer.special_ids[END_OF_TEXT], 0
    for text in texts:
        expected = [*tokenizer.encode_reference(text, allowed), end]
        assert [*found, end][at : at + len(expected)] == expected, text
        at += len(expected)
    return len(texts)


def refusing(source: random.Random) -> int:
    """Texts that may not be UTF-8, in windows: the byte and its place, as Python has them."""
    tokenizer = source.choice(_tokenizers())
    for _ in range(50):
        data = _damaged(source, _text(source).encode())
        size, window = source.randrange(1, 40), source.randrange(1, 150)
        blocks = [data[i : i + size] for i in range(0, len(data), size)]
        try:
            found: list[int] | int = [t for ids in tokenizer.encode_blocks(blocks, (), window) for t in ids.tolist()]
        except NotUtf8 as error:
            assert data[error.offset] == error.byte, data
            found = -1 - error.offset
        expected = _starts(data)
        assert found == (expected if isinstance(expected, int) else tokenizer.encode_reference(data.decode(), [])), data
    return 50


def counting(source: random.Random) -> int:
    """Counts of many texts at once, in blocks, with little memory or much."""
    texts = [_text(source) for _ in range(100)]
    size = source.choice([3, 50, 1 << 20])
    datas = [text.encode() for text in texts]
    blocks = ([data[i : i + size] for i in range(0, len(data), size)] for data in datas)
    found: Counter[bytes] = Counter()
    for table in count_pretokens(blocks, [], memory=source.choice([1, 512 << 20])):
        found.update(dict(zip(*table.to_pydict().values(), strict=True)))
    expected: Counter[bytes] = Counter()
    for text in texts:
        expected.update(pretoken.encode() for pretoken in pretokenize(text))
    assert found == expected, texts
    return len(texts)


def _few_letters(source: random.Random, longest: int) -> str:
    return "".join(source.choices(source.choice(["ab", "abc", "a", "aé"]), k=source.randrange(1, longest)))


def merging(source: random.Random) -> int:
    """Merges learned of few words with many ties."""
    for _ in range(20):
        words = [_few_letters(source, 14).encode() for _ in range(source.randrange(1, 9))]
        counts = {word: source.randrange(1, 6) for word in words}
        merges = source.randrange(25)
        _, found = train_merges(counts_table(counts), 256 + merges, [])
        assert found == naive_merges(counts, merges), counts
    return 20


def _any_tokenizer(source: random.Random) -> Tokenizer:
    """A tokenizer of merges that no training would learn, in an order that the kernels know."""
    tokens, merges = [b"a", b"b"], []
    for _ in range(source.randrange(12)):
        pair = (source.choice(tokens), source.choice(tokens))
        if pair[0] + pair[1] not in tokens:
            merges.append(pair)
            tokens.append(pair[0] + pair[1])
    return Tokenizer(dict(enumerate([*(bytes([i]) for i in range(256)), *tokens[2:]])), merges)


def applying(source: random.Random) -> int:
    """Merges of any kind on pretokens of two letters, up to many blocks long."""
    tokenizer = _any_tokenizer(source)
    assert tokenizer._encoder is not None
    texts = ["".join(source.choices("ab", k=source.randrange(1, 60))) for _ in range(100)]
    unit = source.choice(texts)
    texts.append((unit * 5000)[: source.randrange(1, 5000)])
    found = tokenizer.encode("\n".join(texts))
    expected = [token_id for text in texts for token_id in [*tokenizer.encode_reference(text, []), 10]][:-1]
    assert found == expected, tokenizer.merges
    assert tokenizer.encode(texts[0]) == naive_encode(tokenizer, texts[0], []), texts[0]
    return len(texts)


def decoding(source: random.Random) -> int:
    """A step of attention and a norm, as the layers compute them."""
    torch.manual_seed(source.getrandbits(32))
    dtype, tolerance = source.choice([(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
    kv_heads, half = source.randrange(1, 4), source.randrange(1, 20)
    heads, width = kv_heads * source.randrange(1, 4), 2 * half
    length, rows = source.randrange(1, 50), source.randrange(1, 4)
    rope = RotaryEmbedding(100.0, width, length) if source.random() < 0.5 else None
    layer = MultiHeadSelfAttention(heads * width, heads, rope, dtype=dtype, num_kv_heads=kv_heads)
    layer.requires_grad_(False).output_proj.weight.copy_(torch.eye(heads * width))
    step = decode.Attention(layer)
    for _ in range(20):
        x = torch.randn(rows, 1, heads * width).to(dtype)
        keys, values = torch.randn(2, rows, kv_heads, length, width).to(dtype)
        positions = torch.randint(length, (rows,))
        places = [OneMore(keys.clone(), values.clone(), positions, int(positions.max())) for _ in range(2)]
        found = step(torch.cat(layer.project(x), -1), places[0])
        expected = layer(x, positions[:, None], places[1])
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(places[0].keys, places[1].keys, rtol=tolerance, atol=tolerance)
        assert places[0].values.equal(places[1].values)
    norm = RMSNorm(heads * width, dtype=dtype).requires_grad_(False)
    torch.testing.assert_close(decode.Norm(norm)(x), norm(x), rtol=tolerance, atol=tolerance)
    return 21
