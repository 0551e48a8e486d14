"""Texts of special tokens inside documents, from the sources to the token shards, by the stages of the pipeline."""

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.config import PipelineConfig
from flows.pipeline import pipeline_stages
from lm.text.config import ChunkConfig, DataConfig
from lm.tokenizer.config import TokenizerConfig
from lm.tokenizer.pretoken_counts import read_counts
from lm.tokenizer.tokenizer import Tokenizer
from tasks.runtime.output import Output, read_output
from tests.helpers.corpora import EOT, write_jsonl, write_parquet
from tests.helpers.local_executor import run_locally

SPECIALS = [EOT, "<|user|>", "###"]
OTHERS = ["Once upon a time there was a user.", "Hello hello hello."]
TYPED = ["Who says <|user|> here?", "### A title ### and <|user|>###"]


class Encoded:
    """The outputs of the stages up to ``encode``."""

    def __init__(self, root: Path, *urls: Path | str, special_tokens: Sequence[str] = SPECIALS, **data: Any) -> None:
        config = PipelineConfig(
            data=DataConfig(train=[*map(str, urls)], **{"valid_fraction": 0, **data}),
            chunk=ChunkConfig(target_bytes=120),
            tokenizer=TokenizerConfig(vocab_size=300, special_tokens=[*special_tokens]),
        )
        executor = run_locally(pipeline_stages, config, root, "encode")
        self.run, refs = executor.run, executor.finished
        self.outputs = executor.outputs
        self.tokenizer = Tokenizer.load(read_output(self.run.store, refs["merge"]).directory("tokenizer"))
        self.counts = read_counts(read_output(self.run.store, refs["count"]).path("counts.parquet"))
        self.page = read_output(self.run.store, refs["encode"]).page or ""

    def open(self, title: str) -> Iterator[Output]:
        return (read_output(self.run.store, ref) for ref in self.outputs[title])

    def ids(self, split: str = "train") -> list[int]:
        return [
            int(token_id)
            for output in self.open(f"encode-{split}")
            for token_id in np.fromfile(output.path("tokens.bin"), "<u2")
        ]

    def special_ids(self, split: str = "train") -> set[int]:
        return {self.tokenizer.special_ids[token] for token in SPECIALS[1:]} & {*self.ids(split)}

    def special_texts(self, split: str = "train") -> int:
        return sum(output.manifest["figures"]["special_texts"] for output in self.open(f"encode-{split}"))


def jsonl(path: Path, documents: Sequence[str]) -> str:
    return write_jsonl(path, *(json.dumps({"text": document}) for document in documents))


WRITERS: dict[str, Callable[[Path, Sequence[str]], object]] = {
    "jsonl": lambda path, documents: jsonl(path.with_suffix(".jsonl"), documents),
    "jsonl.gz": lambda path, documents: path.with_suffix(".jsonl.gz").write_bytes(
        gzip.compress("\n".join(json.dumps({"text": document}) for document in documents).encode())
    ),
    "parquet": lambda path, documents: write_parquet(path.with_suffix(".parquet"), text=[*documents]),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_special_token_typed_in_a_document_is_ordinary_text(tmp_path: Path, kind: str) -> None:
    documents = [*OTHERS, *TYPED, *OTHERS] * 3
    WRITERS[kind](tmp_path / "a", documents)
    encoded = Encoded(tmp_path / "root", tmp_path / f"a.{kind}")
    assert encoded.special_ids() == set()
    tokenizer = encoded.tokenizer
    separator = tokenizer.special_ids[EOT]
    assert encoded.ids() == [i for text in documents for i in (*tokenizer.encode(text, ()), separator)]
    assert tokenizer.decode(encoded.ids()) == "".join(text + EOT for text in documents)
    assert encoded.special_texts() == 15
    assert "**15** texts of special tokens" in encoded.page
    assert [token for token in tokenizer.vocab.values() if token == b"###"] == [b"###"], "no merge makes it too"
    counts = dict(zip(*(encoded.counts[name].to_pylist() for name in ("pretoken", "count")), strict=True))
    assert (counts[b" <|"], counts[b"user"], counts[b" user"], counts.get(b"###")) == (6, 6, 6, None)


def test_an_option_asks_for_the_tokens_of_documents(tmp_path: Path) -> None:
    encoded = Encoded(tmp_path / "root", jsonl(tmp_path / "a.jsonl", TYPED), special_tokens_in_document="token")
    assert encoded.ids() == [i for text in TYPED for i in encoded.tokenizer.encode(text + EOT)]
    assert len(encoded.special_ids()) == 2
    assert (encoded.special_texts(), "texts of special tokens" in encoded.page) == (0, False)


def test_plain_text_beside_documents_keeps_its_tokens(tmp_path: Path) -> None:
    """The compressed text and the documents become one file."""
    plain = gzip.compress("".join(text + EOT for text in [*TYPED, *OTHERS]).encode())
    for name in ("a.txt.gz", "c.txt.gz"):
        (tmp_path / name).write_bytes(plain)
    encoded = Encoded(
        tmp_path / "root", tmp_path / "a.txt.gz", jsonl(tmp_path / "b.jsonl", [*TYPED, *OTHERS]), tmp_path / "c.txt.gz"
    )
    as_tokens, as_text = (
        [i for text in [*TYPED, *OTHERS] for i in [*encoded.tokenizer.encode(text, special), 256]]
        for special in (SPECIALS[1:], ())
    )
    assert encoded.ids() == [*as_tokens, *as_text, *as_tokens]
    assert encoded.special_texts() == 5


def test_documents_held_out_for_validation_are_ordinary_too(tmp_path: Path) -> None:
    documents = [f"{text} {number}" for number in range(20) for text in TYPED]
    (tmp_path / "a.txt").write_text("".join(text + EOT for text in documents))
    sources = tmp_path / "a.txt", jsonl(tmp_path / "b.jsonl", [text + "!" for text in documents])
    encoded = Encoded(tmp_path / "root", *sources, valid_fraction=0.3)
    for split in ("train", "valid"):
        text = encoded.tokenizer.decode(encoded.ids(split)).split(EOT)[:-1]
        expected = [
            i
            for document in text
            for i in [*encoded.tokenizer.encode(document, () if document.endswith("!") else "all"), 256]
        ]
        assert encoded.ids(split) == expected
        assert 0 < sum(document.endswith("!") for document in text) < len(text)
    assert encoded.special_texts() + encoded.special_texts("valid") == sum(
        document.count(token) for document in documents for token in SPECIALS[1:]
    )


def test_only_sources_with_such_text_have_other_keys(tmp_path: Path) -> None:
    without, typed = jsonl(tmp_path / "a.jsonl", OTHERS * 9), jsonl(tmp_path / "b.jsonl", [*OTHERS * 9, *TYPED * 2])

    def keys(url: str, option: str, special_tokens: Sequence[str] = SPECIALS) -> dict[str, list[str]]:
        encoded = Encoded(tmp_path / "root", url, special_tokens=special_tokens, special_tokens_in_document=option)
        return {title: [ref.key for ref in refs] for title, refs in encoded.outputs.items()}

    before, after = keys(without, "token"), keys(without, "text")
    assert {title for title in before if before[title] != after[title]} == {"ingest-train"}
    assert keys(without, "token", [EOT]) == keys(without, "text", [EOT]), "there is no other special token"
    before, after = keys(typed, "token"), keys(typed, "text")
    assert before["chunk-train"] != after["chunk-train"] and before["encode"] != after["encode"]
    assert before["count"][0] == after["count"][0], "the chunk holds no such text"
