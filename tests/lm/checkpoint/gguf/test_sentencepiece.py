"""SentencePiece's tokenizers in GGUF, as of Llama 2: the ids are those of its own file, and those of llama.cpp."""

from pathlib import Path
from typing import Any

import pytest

from lm.checkpoint.external import load_any_tokenizer, load_external
from lm.checkpoint.gguf.writer import save_gguf
from lm.common.errors import UserError
from lm.tokenizer.sentencepiece import SentencePieceTokenizer
from tests.helpers.gguf_files import Change, rewrite, with_field, without
from tests.helpers.llamas import train_small_llama_tokenizer
from tests.lm.checkpoint.gguf.test_llama_cpp import needs_llama_cpp, run_llama_cpp
from tests.lm.checkpoint.gguf.test_writer import TOKENIZER, make_model

TEXT = "the cat  sat\n\n on the hat é日🙂 </s> [INST] 12345 "


def write(directory: Path) -> tuple[SentencePieceTokenizer, Path]:
    """Return a tokenizer, and a GGUF file with it and a random model."""
    tokenizer = SentencePieceTokenizer(train_small_llama_tokenizer(directory / "tokenizer.model"))
    save_gguf(make_model(vocab_size=TOKENIZER.size), TOKENIZER, directory / "other.gguf", "float32")
    pieces = tokenizer._model.pieces
    unused = TOKENIZER.size - len(pieces)
    assert unused > 0

    def change(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in ("pre", "merges"):
            without(f"tokenizer.ggml.{name}")(fields, tensors)
        for name, value, kind in (
            ("model", "llama", "STRING"),
            ("tokens", [piece.text for piece in pieces] + [f"[PAD{i}]" for i in range(unused)], "STRING"),
            ("scores", [piece.score for piece in pieces] + [-1000.0] * unused, "FLOAT32"),
            ("token_type", [piece.type for piece in pieces] + [5] * unused, "INT32"),
            ("bos_token_id", tokenizer.bos_id, "UINT32"),
            ("eos_token_id", tokenizer.eos_id, "UINT32"),
        ):
            with_field(f"tokenizer.ggml.{name}", value, kind)(fields, tensors)

    return tokenizer, rewrite(directory / "other.gguf", change).rename(directory / "model.gguf")


def test_the_ids_are_those_of_the_models_file(tmp_path: Path) -> None:
    expected, path = write(tmp_path)
    model, tokenizer = load_external(path)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.begin_token) == (1, 2, "<s>")
    assert tokenizer.encode(TEXT) == expected.encode(TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == f" {TEXT}"
    assert model.config.vocab_size == tokenizer.size
    without_prefix = rewrite(path, with_field("tokenizer.ggml.add_space_prefix", False, "BOOL"))
    assert load_any_tokenizer(without_prefix).encode(" the", allowed_special=()) == expected.encode("the")


@pytest.mark.slow
@needs_llama_cpp
def test_the_ids_are_those_of_llama_cpp(tmp_path: Path) -> None:
    tokenizer, _ = write(tmp_path)
    assert run_llama_cpp(tmp_path, TEXT, [1], 1).encoded == tokenizer.encode(TEXT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("tokenizer.ggml.scores"), "scores has no score for each"),
        (with_field("tokenizer.ggml.eos_token_id", 1 << 31), "has no tokens that begin and end a text"),
        (with_field("tokenizer.ggml.token_type", [1] * TOKENIZER.size, "INT32"), "not one piece for unknown text"),
        (with_field("tokenizer.ggml.token_type", [7] * TOKENIZER.size, "INT32"), "pieces of an unknown type"),
    ],
)
def test_other_vocabularies_are_refused(tmp_path: Path, change: Change, message: str) -> None:
    _, path = write(tmp_path)
    with pytest.raises(UserError, match=f"changed.gguf.*{message}"):
        load_any_tokenizer(rewrite(path, change))
