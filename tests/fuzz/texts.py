"""Fuzz targets for files of tokenizers, text sources, pretoken counts and token shards.

Each target writes a valid file, damages it by ``choices`` and reads it.
"""

import bz2
import gzip
import io
import json
import lzma
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm.common.errors import UserError
from lm.data.token_shards import TokenShards
from lm.inference.llama import LlamaTokenizer
from lm.text.config import DataConfig
from lm.text.documents import TextStatistics, stream_documents
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.text.web_pages import PageReader, WebPages
from lm.tokenizer.bpe import train_merges
from lm.tokenizer.pretoken_counts import merge_counts, read_counts, write_counts
from lm.tokenizer.tokenizer import Tokenizer
from tests.fuzz.choices import Choices, json_bytes, mutate, mutate_bytes
from tests.helpers.pretoken_counts import counts_table
from tests.helpers.web import warc_record

TEXT = "Once upon <|endoftext|>a timé \n"


@cache
def _tokenizer_files() -> dict[str, bytes]:
    """Return the saved files of a small tokenizer by name."""
    vocab, merges = train_merges(counts_table({"once": 5, " upon": 4, " time": 3, "é": 2}), 270, [END_OF_TEXT])
    tokenizer = Tokenizer(vocab, merges, [END_OF_TEXT])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        tokenizer.save_tiktoken(Path(folder) / "ranks.tiktoken")
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@cache
def _document(name: str) -> Any:
    return json.loads(_tokenizer_files()[name])


def _use(tokenizer: Tokenizer) -> None:
    """Check that a tokenizer restores a text, and that kernels and reference agree."""
    if tokenizer.pattern != GPT2_PATTERN:
        return  # a hostile pattern may not terminate, see SECURITY.md
    for allowed in ((), tokenizer.special_tokens):
        ids = tokenizer.encode(TEXT, allowed)
        assert tokenizer.decode(ids) == TEXT
        assert ids == tokenizer.encode_reference(TEXT, allowed)


def tokenizer(choices: Choices, folder: Path) -> None:
    """A saved tokenizer directory: vocab.json, merges.txt and tokenizer_config.json."""
    target = choices.below(4)  # the file to damage; 3: all
    for number, name in enumerate(("vocab.json", "tokenizer_config.json")):
        is_damaged = target in (number, 3)
        data = json_bytes(mutate(_document(name), choices), choices) if is_damaged else _tokenizer_files()[name]
        (folder / name).write_bytes(data)
    merges = _tokenizer_files()["merges.txt"]
    (folder / "merges.txt").write_bytes(mutate_bytes(merges, choices) if target >= 2 else merges)
    _use(Tokenizer.load(folder))


def tokenizer_json(choices: Choices, folder: Path) -> None:
    """Hugging Face's tokenizer.json."""
    content = dict(_document("tokenizer.json"))
    if choices.below(2):  # a small document, so that damage reaches all of its parts
        content["model"] = {**content["model"], "merges": content["model"]["merges"][:2]}
        content["post_processor"] = {"type": "ByteLevel", "trim_offsets": True}
    if choices.below(2):
        split = {"type": "Split", "pattern": {"Regex": r"\p{L}+|\s"}, "behavior": "Isolated", "invert": False}
        content["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}],
        }
    part = choices.pick([*content])
    content[part] = mutate(content[part], choices)
    (folder / "tokenizer.json").write_bytes(json_bytes(mutate(content, choices, 1), choices))
    _use(Tokenizer.from_tokenizer_json(folder / "tokenizer.json"))


def tiktoken(choices: Choices, folder: Path) -> None:
    """A file of tiktoken ranks."""
    lines = _tokenizer_files()["ranks.tiktoken"].splitlines(keepends=True)
    for _ in range(choices.below(4)):
        i = choices.below(len(lines))
        lines[i] = choices.pick([b"", lines[i] * 2, mutate_bytes(lines[i], choices), choices.pick(lines)]) or b"\n"
    data = b"".join(lines)
    (folder / "ranks.tiktoken").write_bytes(mutate_bytes(data, choices) if choices.below(2) else data)
    specials = choices.pick([{}, {END_OF_TEXT: 269}, {END_OF_TEXT: 3}, {END_OF_TEXT: 1 << 40}, {"": 300}])
    _use(Tokenizer.from_tiktoken(folder / "ranks.tiktoken", specials))


@cache
def _sentencepiece() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentences = iter(["once upon a time there was a small model", "and it ended"] * 30)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_writer=model, vocab_size=290, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def sentencepiece(choices: Choices, folder: Path) -> None:
    """SentencePiece's tokenizer.model, as of Llama 1 and 2."""
    (folder / "tokenizer.model").write_bytes(mutate_bytes(_sentencepiece(), choices))
    loaded = LlamaTokenizer.load(folder / "tokenizer.model")
    loaded.decode(loaded.encode(TEXT, bos=True, eos=True))


_COMPRESS: dict[str, Any] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lambda data: lzma.compress(data, preset=0),
    "": bytes,
}
_COMPRESS[".zst"] = lambda data: pa.compress(data, "zstd", asbytes=True)


def sources(choices: Choices, folder: Path) -> None:
    """Plain text, JSON Lines and Parquet, plain and compressed."""
    kind, compression = choices.pick([".jsonl", ".parquet", ".txt"]), choices.pick([*_COMPRESS])
    if kind == ".parquet":
        column = choices.pick([pa.array(["one", "two", None]), pa.array([1, 2]), pa.array(["one"]).dictionary_encode()])
        data = _parquet(pa.table({"text": column}), choices)
        compression = choices.pick(["", compression])
    else:
        rows = [mutate({"text": "one <|end", "id": 1}, choices, 2) for _ in range(choices.below(4))]
        lines = b"\n".join(json_bytes(row, choices) for row in rows)
        data = lines if kind == ".jsonl" else mutate_bytes(lines + TEXT.encode(), choices)
    data = _COMPRESS[compression](data)
    path = folder / f"text{kind}{compression}"
    path.write_bytes(mutate_bytes(data, choices) if choices.below(2) else data)
    config = DataConfig(
        [str(path)],
        invalid_utf8=choices.pick(["error", "replace"]),
        separator_in_document=choices.pick(["error", "remove"]),
    )
    for piece in stream_documents(str(path), config, TextStatistics()):
        piece.encode()


@cache
def _page_reader() -> PageReader:
    return PageReader()


def web(choices: Choices, folder: Path) -> None:
    """HTML pages and WARC files, plain and compressed."""
    page = f"<html lang=de><head><meta name=date content=2024><title>a</title></head><p>{TEXT}<b>é</b></p>".encode()
    pages = [mutate_bytes(page, choices) if choices.below(2) else page for _ in range(1 + choices.below(3))]
    kind = choices.pick([".warc", ".warc", ".html", ".wet"])
    compress = _COMPRESS[compression := choices.pick(["", ".gz", ".gz", ".zst"])]
    record_type = "conversion" if kind == ".wet" else "response"
    parts = [page if kind == ".html" else warc_record(page, record_type=record_type) for page in pages]
    parts = [mutate_bytes(part, choices) if choices.below(3) == 2 else part for part in parts]
    data = b"".join(map(compress, parts)) if choices.below(2) else compress(b"".join(parts))
    path = folder / f"web{kind}{compression}"
    path.write_bytes(mutate_bytes(data, choices) if choices.below(3) == 2 else data)
    config = DataConfig([str(path)], separator_in_document="remove")
    for piece in stream_documents(str(path), config, TextStatistics(), pages=WebPages(reader=_page_reader())):
        piece.encode()


def _parquet(table: pa.Table, choices: Choices) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, compression=choices.pick(["zstd", "none", "snappy"]))
    return mutate_bytes(file.getvalue(), choices) if choices.below(2) else file.getvalue()


_COUNTS: dict[bytes, int] = {b"once": 3, b" upon": 2, b"a": 1 << 40, b"\xff\0": 1, b"": 1}


@cache
def _counts() -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        write_counts(Path(file.name), counts_table(_COUNTS))
        return Path(file.name).read_bytes()


def counts(choices: Choices, folder: Path) -> None:
    """Pretoken counts in Parquet: read them, add them up and learn merges from them."""
    whole, path, result = folder / "whole.parquet", folder / "counts.parquet", folder / "sum.parquet"
    whole.write_bytes(_counts())
    if choices.below(2):
        path.write_bytes(mutate_bytes(_counts(), choices))
    else:  # a valid Parquet file with odd content
        numbers = choices.pick([[1, 2], [None, 3], [-1, 2], [1 << 62, 1 << 62], [0, 0]])
        words = choices.pick([[b"a", b"bc"], [None, b"ab"], [b"", b""], [b"x" * 5000, b"x"], [b"same", b"same"]])
        fields = [("pretoken", choices.pick([pa.binary(), pa.large_binary()])), ("count", pa.int64())]
        with pq.ParquetWriter(path, pa.schema(fields)) as writer:
            for number in range(choices.pick([16, 15, 17])):
                rows = [words, numbers] if number == 3 else [[], []]
                writer.write_table(pa.table(rows, pa.schema(fields)))
    table = read_counts(path)
    vocab, merges = train_merges(table, 262, [])
    assert len(merges) <= 6 and len(vocab) == 256 + len(merges)
    merge_counts([whole, path], result)
    read_counts(result)


def shards(choices: Choices, folder: Path) -> None:
    """Token shards and their document ends."""
    vocab_size = choices.pick([300, 70_000])
    ids = np.arange(choices.below(64), dtype=choices.pick(["<u2", "<u4", "<i8"]))
    data = ids.tobytes()
    (folder / "tokens.bin").write_bytes(mutate_bytes(data, choices) if choices.below(2) else data)
    tokens = TokenShards([folder / "tokens.bin"] * choices.below(3), vocab_size)
    start = choices.below(70)
    part = tokens[start : start + choices.below(70)]
    assert len(part) <= len(tokens) and (not len(part) or int(part.max()) < vocab_size)
    ends = io.BytesIO()
    np.save(ends, ids)
    (folder / "documents.npy").write_bytes(mutate_bytes(ends.getvalue(), choices))
    try:
        np.load(folder / "documents.npy")
    except Exception as error:  # numpy raises many types; the only reader, a stage's page, tolerates a failure
        raise UserError(str(error)) from None
