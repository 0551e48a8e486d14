"""Compile all kernels ahead of time, for example in an image: ``python -m lm.compile_kernels --pattern llama3``.

With ``--id-bits 16`` or ``32``, compile only what a pipeline run with such ids starts in the background. Calls the
public functions of :mod:`lm` on small inputs that reach every kernel with every type, so no list of signatures is
needed.
"""

import argparse
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from lm.curate.decontaminate import ProtectedTexts
from lm.curate.document_batch import pack_documents
from lm.curate.duplicate_documents import deduplicate_documents, digest_documents_to_runs
from lm.curate.duplicate_lines import deduplicate_lines
from lm.curate.language import identify_language
from lm.curate.masks import mask_emails
from lm.curate.rules import gopher_quality_filter
from lm.inference.runners.runner import compile_kernels
from lm.kernels.curation.language_features import walk_features
from lm.kernels.disk_cache import CACHE_DIR, IS_CACHE_WRITABLE, pipeline_marker
from lm.kernels.jit import KERNELS
from lm.model.nf4 import dequantize_on_cpu, quantize_nf4
from lm.optim.adamw import AdamW
from lm.text.patterns import PATTERNS
from lm.tokenizer.bpe import train_merges
from lm.tokenizer.piece_encoder import PieceEncoder
from lm.tokenizer.pretoken_counts import DEFAULT_MEMORY_BYTES, SCHEMA, count_to_file
from lm.tokenizer.sentencepiece_model import UNKNOWN, Piece, SentencePieceModel
from lm.tokenizer.tokenizer import Tokenizer

_NUM_WORDS = 40_000  # different pretokens: more than the first hash tables of counting and encoding hold
_NUM_RANDOM_BYTES = 200_000  # their merges make more pairs than the first hash table of training holds
_NUM_MERGES = 9_000


def _text() -> bytes:
    words = b"".join(b" %x" % (number * 0x9E3779B1) for number in range(_NUM_WORDS))
    return words + b" a" * 40 + b"\xe2\x82\xac" * 40


def _random_counts() -> pa.Table:
    data = random.Random(0).randbytes(_NUM_RANDOM_BYTES)
    return pa.table([[data[i : i + 100] for i in range(0, len(data), 100)], [1] * (len(data) // 100)], schema=SCHEMA)


def run_groups(pattern: str = "gpt2", id_bits: int | None = None) -> Iterator[str]:
    """Run the kernels in groups; yield the name of each group after it has run.

    ``pattern`` is a name in PATTERNS. ``id_bits``: only what a pipeline run with ids of 16 or 32 bits uses.
    """
    expression = PATTERNS[pattern]
    with tempfile.TemporaryDirectory() as folder:
        count_to_file(Path(folder) / "counts.parquet", [[_text()]], [], expression, DEFAULT_MEMORY_BYTES)
    yield "counting"
    for bits in (16, 32) if id_bits is None else (id_bits,):
        vocab, merges = train_merges(_random_counts(), 256 + _NUM_MERGES if bits == 16 else 1 << 17, [])
        yield f"BPE training, {bits}-bit ids"
        if bits == 32:
            vocab[1 << 17] = b"a token with an id of 18 bits"
        tokenizer = Tokenizer(vocab, merges, pattern=expression, ignore_merges=bits == 32)
        for _ in tokenizer.encode_blocks([_text()]):
            pass
        yield f"encoding, {bits}-bit ids"
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    AdamW([weight]).step()
    yield "AdamW"
    compile_kernels(torch.float32)
    if id_bits is not None:
        pipeline_marker(pattern, id_bits).touch()
    yield "decode step, float32"
    if id_bits is None:
        gopher_quality_filter("")
        mask_emails("")
        _deduplicate()
        identify_language("")
        for is_bpe in (True, False):
            PieceEncoder(SentencePieceModel([Piece("<unk>", 0.0, UNKNOWN), Piece("aa", -1.0)], is_bpe)).encode("aa")
        walk_features(np.frombuffer(bytes(1), np.uint8), *(np.zeros(256, np.int32) for _ in range(5)))
        yield "curation and SentencePiece"
        for dtype in (torch.float32, torch.bfloat16):
            dequantize_on_cpu(quantize_nf4(torch.zeros(1, 1)), (1, 1), dtype)
        yield "weights in 4 bits"
        compile_kernels(torch.bfloat16)
        yield "decode step, bfloat16"
        compile_kernels(torch.float32, "int8")
        yield "decode step, int8"


def _deduplicate() -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "first", Path(folder) / "second"]
        for path in paths:
            path.write_text("one text")
        deduplicate_documents(paths, Path(folder) / "documents", 2, 1, 1, 1.0)
        digest_documents_to_runs([pack_documents(["one text"])], Path(folder))
        deduplicate_lines(paths, Path(folder) / "lines")
    ProtectedTexts([("one", ["one text"])], 1).find(pack_documents(["one text"]))


def _num_compiled() -> int:
    return sum(sum(kernel.stats.cache_misses.values()) for kernel in KERNELS)


def main() -> None:
    """Compile; print the seconds of each group and the folder of the machine code."""
    parser = argparse.ArgumentParser(prog="python -m lm.compile_kernels", description=__doc__)
    parser.add_argument("--pattern", choices=PATTERNS, default="gpt2", help="of the pretokens; default: gpt2")
    parser.add_argument("--id-bits", type=int, choices=[16, 32], help="of the token ids; leaves out bfloat16 and int8")
    options = parser.parse_args()
    if not IS_CACHE_WRITABLE:
        sys.exit(f"Kernels cannot be cached: {CACHE_DIR} is not writable. Set XDG_CACHE_HOME to a writable folder.")
    logging.getLogger("lm").setLevel(logging.ERROR)  # the lines below replace its messages
    print(f"Kernels are cached in {CACHE_DIR}", flush=True)
    started, num_compiled = time.perf_counter(), 0
    group_started = started
    for name in run_groups(options.pattern, options.id_bits):
        count, now = _num_compiled() - num_compiled, time.perf_counter()
        print(f"{name:26}{f'{count} compiled, {now - group_started:.1f} s' if count else 'cached'}", flush=True)
        num_compiled, group_started = num_compiled + count, now
    if num_compiled:
        print(f"{num_compiled} kernels compiled in {time.perf_counter() - started:.1f} s")
    else:
        print("All kernels are cached; nothing was compiled.")


if __name__ == "__main__":
    main()
