"""Load the model and the tokenizer of a directory, whatever its format: Meta's, Hugging Face's or this project's; or of
a GGUF file."""

import itertools
import logging
import re
from pathlib import Path
from typing import Any

import torch

from lm.checkpoint.external_weights import read_json_object, refuse_other_formats
from lm.checkpoint.gguf.container import GGUFFile, is_gguf
from lm.checkpoint.gguf.reader import load_gguf, load_gguf_tokenizer, read_gguf_config
from lm.checkpoint.hugging_face.chat_files import read_chat_settings
from lm.checkpoint.hugging_face.config_json import read_config
from lm.checkpoint.hugging_face.model_files import load_hugging_face
from lm.checkpoint.hugging_face.weight_files import read_weights
from lm.checkpoint.meta import load_meta
from lm.checkpoint.peft import base_of_peft, fuse_peft, is_peft
from lm.checkpoint.safe_load import refuse_lfs_pointer
from lm.checkpoint.training_checkpoint import load_model, read_description
from lm.common.errors import UserError
from lm.files.json import read_json
from lm.model.transformer import TransformerLM, shrink_vocabulary
from lm.text.patterns import PATTERNS
from lm.tokenizer.sentencepiece import SentencePieceTokenizer
from lm.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_META_CONTEXT_LENGTH = 2048  # Meta's files do not state the context. That of Llama 1 is the shortest.


def load_external(
    directory: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[TransformerLM, Tokenizer | SentencePieceTokenizer]:
    """Load a model in evaluation mode, and the tokenizer beside it.

    The model is read as :func:`load_any_model` does, the tokenizer as :func:`load_any_tokenizer` does. Rows of the
    embedding and the head that only pad the vocabulary are removed, as are those of tokens that files of transformers
    add to another tokenizer's, with a warning. Added tokens that the embedding lacks are removed from the tokenizer,
    with a warning. Raises UserError if a file is missing or damaged, or if model and tokenizer do not belong together.
    """
    model = load_any_model(directory, device, dtype=dtype)
    tokenizer, lost = _remove_tokens_without_rows(load_any_tokenizer(directory), model.config.vocab_size or 0)
    if lost := [*dict.fromkeys([*lost, *_added_tokens(directory, tokenizer.size)])]:
        named = ", ".join(lost[:5]) + (" and more" if len(lost) > 5 else "")
        log.warning(
            "%s adds tokens that the model's embedding or its tokenizer's file lacks: the model neither reads nor "
            "writes %s.",
            directory,
            named,
        )
    shrink_vocabulary(model, tokenizer.size)
    return model, tokenizer


def _remove_tokens_without_rows(
    tokenizer: Tokenizer | SentencePieceTokenizer, num_rows: int
) -> tuple[Tokenizer | SentencePieceTokenizer, list[str]]:
    """Return the tokenizer without its added tokens from id ``num_rows`` on, and their texts.

    A padding token is often added to the tokenizer alone. If other tokens lack a row too, nothing is removed.
    """
    if tokenizer.size <= num_rows or not isinstance(tokenizer, Tokenizer):
        return tokenizer, []
    parts = tokenizer.parts
    lost = {text: token_id for text, token_id in tokenizer.added_ids.items() if token_id >= num_rows}
    vocab = {token_id: token for token_id, token in parts.vocab.items() if token_id not in lost.values()}
    if max(vocab) >= num_rows:
        return tokenizer, []
    kept = parts._replace(
        vocab=vocab,
        special_tokens=[text for text in parts.special_tokens if text not in lost],
        added_tokens=[token for token in parts.added_tokens if token.content not in lost],
        begin_token=None if parts.begin_token in lost else parts.begin_token,
    )
    return Tokenizer(*kept), list(lost)


def _added_tokens(directory: Path, size: int) -> list[str]:
    """Return the tokens that the files of transformers add to a vocabulary of ``size`` ids."""
    added, config = (_read(directory / name) for name in ("added_tokens.json", "tokenizer_config.json"))
    ids = {name: str(token_id) for name, token_id in added.items()}
    if isinstance(decoder := config.get("added_tokens_decoder"), dict):
        ids |= {str(about.get("content")): key for key, about in decoder.items() if isinstance(about, dict)}
    return [name for name, token_id in ids.items() if re.fullmatch("[0-9]{1,9}", token_id) and int(token_id) >= size]


def read_context_length(directory: Path) -> int:
    """Return the context length of a model in the formats of :func:`load_any_model`, without reading its weights.

    Raises UserError if a file is missing, damaged or unknown.
    """
    if is_gguf(directory):
        return read_gguf_config(GGUFFile(directory))[0].context_length
    if is_peft(directory):
        return read_context_length(base_of_peft(directory))
    path = directory / "config.json"
    if path.exists() and not any(directory.glob("consolidated.*.pth")):
        return read_config(path, read_json_object(path), None)[0].context_length
    if description := read_description(directory):
        return int(description["model"]["context_length"])
    return _META_CONTEXT_LENGTH


def exact_dtype(directory: Path) -> torch.dtype:
    """Return the smallest dtype that holds the weights of a model exactly.

    It is float32, or the 16-bit dtype of all tensors in Hugging Face's files. Raises UserError if a file is missing or
    damaged.
    """
    is_other = is_gguf(directory) or is_peft(directory) or _is_meta(directory)
    if is_other or not (directory / "config.json").exists():
        return torch.float32
    dtypes = {tensor.dtype for tensor in read_weights(directory).values()}
    return dtypes.pop() if dtypes in ({torch.bfloat16}, {torch.float16}) else torch.float32


def _is_meta(directory: Path) -> bool:
    has_meta_weights = any(directory.glob("consolidated.*.pth"))
    return (directory / "params.json").exists() and (has_meta_weights or not (directory / "config.json").exists())


def load_any_model(
    directory: Path,
    device: torch.device | str = "cpu",
    max_seq_len: int | None = None,
    dtype: torch.dtype | None = None,
) -> TransformerLM:
    """Load the model of a directory, or of a GGUF file, in evaluation mode.

    ``max_seq_len`` is its context length; default: that of the files, and 2,048 for Meta's, which state none.
    ``dtype`` is that of its parameters; default: that of its embedding, bfloat16 if it is quantized in GGUF. A
    checkpoint of this project has its own context and dtype. An adapter in peft's format is fused into its base, which
    is loaded in the same way. Raises UserError if a file is missing, damaged or unknown.
    """
    if is_gguf(directory):
        return load_gguf(directory, max_seq_len, device, dtype)
    if is_peft(directory):
        return fuse_peft(load_any_model(base_of_peft(directory), device, max_seq_len, dtype), directory)
    if _is_meta(directory):
        return load_meta(directory, _META_CONTEXT_LENGTH if max_seq_len is None else max_seq_len, device, dtype)
    if (directory / "config.json").exists():
        return load_hugging_face(directory, max_seq_len, device, dtype)
    if (directory / "checkpoint.json").exists():
        return load_model(directory, device)
    refuse_other_formats(directory)
    raise UserError(
        f"{directory} is no checkpoint: it has neither params.json (Meta), config.json (Hugging Face) nor "
        "checkpoint.json (this project)."
    )


def load_any_tokenizer(path: Path) -> Tokenizer | SentencePieceTokenizer:
    """Read Meta's ``tokenizer.model`` (SentencePiece's for Llama 1 and 2, ranks for Llama 3), a ``tokenizer.json``, or
    a directory with one of them or with GPT-2's ``vocab.json`` and ``merges.txt``; the tokenizer of a GGUF file; or a
    ``.tiktoken`` file of ranks, whose pattern follows from OpenAI's names.

    A directory with several has them for the same ids; ``tokenizer.model`` is read. An adapter of peft without a
    tokenizer has that of its base. The tokenizer gets the chat
    template and the end tokens that the files of a Hugging Face model beside it name. Raises UserError if the file is
    missing, damaged or unsupported.
    """
    if is_gguf(path):
        return load_gguf_tokenizer(path)
    if path.is_dir() and is_peft(path) and not any((path / name).exists() for name in _TOKENIZER_FILES):
        return load_any_tokenizer(base_of_peft(path))
    if path.is_dir() and ((path / "config.json").exists() or is_peft(path)):
        tokenizer = _load_tokenizer(path)
        if isinstance(tokenizer, Tokenizer):
            tokenizer.chat = read_chat_settings(path, tokenizer)
        return tokenizer
    return _load_tokenizer(path)


def _load_tokenizer(path: Path) -> Tokenizer | SentencePieceTokenizer:
    if path.is_dir():
        meta, vocab = path / "tokenizer.model", path / "vocab.json"
        if vocab.exists() and not meta.exists() and not (path / "tokenizer.json").exists():
            config = path / "tokenizer_config.json"
            options = read_json(config) if config.exists() else {}
            is_ours = isinstance(options, dict) and "pattern" in options
            return Tokenizer.load(path) if is_ours else Tokenizer.from_files(vocab, path / "merges.txt")
        path = meta if meta.exists() else path / "tokenizer.json"
    refuse_lfs_pointer(path)
    if path.suffix == ".tiktoken":
        names = dict.fromkeys(("gpt2", "r50k_base", "p50k_base"), "gpt2")
        pattern = (names | {"cl100k_base": "cl100k", "o200k_base": "o200k"}).get(path.stem)
        if pattern is None:
            log.warning("%s does not say how it splits texts; GPT-2's pattern is assumed.", path)
        return Tokenizer.from_tiktoken(path, pattern=PATTERNS[pattern or "gpt2"])
    if path.suffix == ".json":
        return Tokenizer.from_tokenizer_json(path)
    return _load_llama3(path) if _is_rank_file(path) else SentencePieceTokenizer(path)


def _is_rank_file(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            # A line of tiktoken's files; SentencePiece's begin with a line break.
            return re.fullmatch(rb"[A-Za-z0-9+/]+={0,2} \d+", file.readline(1000).rstrip()) is not None
    except OSError:
        return False  # the reader of the other format says why


def _load_llama3(path: Path) -> Tokenizer:
    first = sum(bool(line.strip()) for line in path.read_bytes().splitlines())
    # Of its 256 special tokens, which its tokenizer.model does not contain. The others are reserved.
    named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
    reserved = (f"reserved_special_token_{number}" for number in itertools.count())
    special_tokens = {f"<|{named.get(index) or next(reserved)}|>": first + index for index in range(256)}
    return Tokenizer.from_tiktoken(path, special_tokens, PATTERNS["llama3"])


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}
