"""Compile all kernels ahead of time, for example in an image: ``python -m lm.compile_kernels --pattern llama3``.

With ``--id-bits 16`` or ``32``, compile only what a pipeline run with such ids starts in the background. Calls the
public functions of :mod:`lm` on small inputs that reach every kernel with every type, so no list of signatures is
needed.
"""

import argparse
import gc
import logging
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lm.curate.decontaminate import ProtectedTexts
from lm.curate.document_batch import pack_documents
from lm.curate.duplicate_documents import deduplicate_documents, digest_documents_to_runs
from lm.curate.duplicate_lines import deduplicate_lines
from lm.curate.language import identify_language
from lm.curate.masks import mask_emails
from lm.curate.rules import gopher_quality_filter
from lm.hardware.cpu import available_cpus
from lm.inference.config import Quantization
from lm.kernels.curation.language_features import walk_features
from lm.kernels.disk_cache import CACHE_DIR, IS_CACHE_WRITABLE, pipeline_marker
from lm.kernels.jit import KERNELS
from lm.text.patterns import PATTERNS, SEGMENT_PATTERNS
from lm.tokenizer.bpe import train_merges
from lm.tokenizer.composed_stream import TextComposer
from lm.tokenizer.piece_encoder import PieceEncoder
from lm.tokenizer.pretoken_counts import DEFAULT_MEMORY_BYTES, SCHEMA, count_to_file
from lm.tokenizer.sentencepiece_model import UNKNOWN, Piece, SentencePieceModel
from lm.tokenizer.superwords import train_superwords
from lm.tokenizer.tokenizer import Tokenizer

_NUM_WORDS = 40_000  # different pretokens: more than the first hash tables of counting and encoding hold
_NUM_RANDOM_BYTES = 200_000  # their merges make more pairs than the first hash table of training holds
_NUM_MERGES = 9_000


def kernel_groups(pattern: str = "gpt2", id_bits: int | None = None) -> dict[str, Callable[[], object]]:
    """Return functions that run the kernels in groups, by the names of the groups.

    ``pattern`` is a name in PATTERNS. ``id_bits``: only what a pipeline run with ids of 16 or 32 bits uses. The first
    two groups take longest, and a run needs the kernels of counting first.
    """
    widths = (16, 32) if id_bits is None else (id_bits,)
    groups: dict[str, Callable[[], object]] = {
        "counting": partial(_count, pattern),
        "AdamW, decode step": _update_and_decode,
        **{f"encoding, {bits}-bit ids": partial(_encode, pattern, bits) for bits in widths},
        **{f"BPE training, {bits}-bit ids": partial(_train, bits) for bits in widths},
    }
    if id_bits is None:
        groups |= {
            "decode step, bfloat16": partial(_decode, "bfloat16"),
            "decode step, int8": partial(_decode, "int8"),
            "superwords": partial(_learn_superwords, pattern),
            "adapters": _compute_adapter,
            "weights in 4 bits": _dequantize,
            "curation": _curate,
            "SentencePiece": _encode_pieces,
            "NFC": _compose,
        }
    return groups


def _text() -> bytes:
    words = b"".join(b" %x" % (number * 0x9E3779B1) for number in range(_NUM_WORDS))
    return words + b" a" * 40 + b"\xe2\x82\xac" * 40


def _count(pattern: str) -> None:
    """Count pretokens. ``pattern`` is a name in PATTERNS, here and below."""
    with tempfile.TemporaryDirectory() as folder:
        count_to_file(Path(folder) / "counts.parquet", [[_text()]], [], PATTERNS[pattern], DEFAULT_MEMORY_BYTES)


def _train(id_bits: int) -> None:
    """Train merges whose ids have 16 or 32 bits."""
    data = random.Random(0).randbytes(_NUM_RANDOM_BYTES)
    parts = [data[i : i + 100] for i in range(0, len(data), 100)]
    table = pa.table([parts, [1] * len(parts)], schema=SCHEMA)
    train_merges(table, 256 + _NUM_MERGES if id_bits == 16 else 1 << 17, [])


def _encode(pattern: str, id_bits: int) -> None:
    """Encode to ids of 16 or 32 bits."""
    merges = [(bytes([i // 256]), bytes([i % 256])) for i in range(_NUM_MERGES)]  # not trained: another group does that
    vocab = {i: bytes([i]) for i in range(256)} | {256 + i: left + right for i, (left, right) in enumerate(merges)}
    if id_bits == 32:
        vocab[1 << 17] = b"a token with an id of 18 bits"
    tokenizer = Tokenizer(vocab, merges, pattern=PATTERNS[pattern], ignore_merges=id_bits == 32)
    for _ in tokenizer.encode_blocks([_text()]):
        pass


def _learn_superwords(pattern: str) -> None:
    """Train superwords for ids of 16 and of 32 bits, if the pattern has segments."""
    if pattern in SEGMENT_PATTERNS:
        for size in (1 << 9, 1 << 17):
            train_superwords([lambda: [[_text()]]], [(b" ", b"a")], size, [], PATTERNS[pattern])


def _encode_pieces() -> None:
    """Encode with both algorithms of SentencePiece."""
    for is_bpe in (True, False):
        PieceEncoder(SentencePieceModel([Piece("<unk>", 0.0, UNKNOWN), Piece("aa", -1.0)], is_bpe)).encode("aa")


def _compose() -> None:
    """Normalize a text that is not ASCII."""
    list(TextComposer([]).compose([_text()]))


def _curate() -> None:
    """Filter, mask, compare and classify texts."""
    gopher_quality_filter("")
    mask_emails("")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "first", Path(folder) / "second"]
        for path in paths:
            path.write_text("one text")
        deduplicate_documents(paths, Path(folder) / "documents", 2, 1, 1, 1.0)
        digest_documents_to_runs([pack_documents(["one text"])], Path(folder))
        deduplicate_lines(paths, Path(folder) / "lines")
    ProtectedTexts([("one", ["one text"])], 1).find(pack_documents(["one text"]))
    identify_language("")
    walk_features(np.frombuffer(bytes(1), np.uint8), *(np.zeros(256, np.int32) for _ in range(5)))


# These import torch, for which the functions above need not wait.


def _update_and_decode() -> None:
    """Update a weight with AdamW, and compute a step of a model in float32."""
    import torch

    from lm.optim.adamw import AdamW

    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    AdamW([weight]).step()
    _decode("none")


def _decode(quantization: Quantization) -> None:
    """Compute a step of a model whose weights are stored as for serving."""
    import torch

    from lm.inference.runners.runner import compile_kernels

    compile_kernels(torch.bfloat16 if quantization == "bfloat16" else torch.float32, quantization)


def _compute_adapter() -> None:
    """Add the change of an adapter to the output of a layer."""
    import torch

    from lm.inference.served_adapters import LayerAdapters, use_adapters
    from lm.kernels.decode.low_rank import RANK_MULTIPLE

    layer = torch.nn.Linear(1, 1, bias=False)
    adapters = LayerAdapters(torch.zeros(4 * RANK_MULTIPLE), 0, 2, RANK_MULTIPLE, 1, [1])
    with torch.inference_mode(), use_adapters(torch.ones(1, dtype=torch.int64)):
        adapters(layer, (torch.zeros(1, 1),), torch.zeros(1, 1))


def _dequantize() -> None:
    """Read weights of 4 bits as float32 and bfloat16."""
    import torch

    from lm.model.nf4 import dequantize_on_cpu, quantize_nf4

    for dtype in (torch.float32, torch.bfloat16):
        dequantize_on_cpu(quantize_nf4(torch.zeros(1, 1)), (1, 1), dtype)


def _num_compiled() -> int:
    return sum(sum(kernel.stats.cache_misses.values()) for kernel in KERNELS)


def _run_next_groups(groups: dict[str, Callable[[], object]], taken: Any, compiled: Any) -> None:
    """Run groups that no other process has taken, and print the seconds of each.

    ``taken`` and ``compiled`` are shared counters, of groups and of kernels.
    """
    while True:
        with taken.get_lock():
            number, taken.value = taken.value, taken.value + 1
        if number >= len(groups):
            return
        name, before, started = list(groups)[number], _num_compiled(), time.perf_counter()
        groups[name]()
        count = _num_compiled() - before
        with compiled.get_lock():
            compiled.value += count
        figures = f"{count} compiled, {time.perf_counter() - started:.1f} s" if count else "cached"
        print(f"{name:26}{figures}", flush=True)


def main() -> None:
    """Compile in a process per core; print the seconds of each group and the folder of the machine code."""
    parser = argparse.ArgumentParser(prog="python -m lm.compile_kernels", description=__doc__)
    parser.add_argument("--pattern", choices=PATTERNS, default="gpt2", help="of the pretokens; default: gpt2")
    parser.add_argument("--id-bits", type=int, choices=[16, 32], help="of the token ids; leaves out bfloat16 and int8")
    options = parser.parse_args()
    if not IS_CACHE_WRITABLE:
        sys.exit(f"Kernels cannot be cached: {CACHE_DIR} is not writable. Set XDG_CACHE_HOME to a writable folder.")
    logging.getLogger("lm").setLevel(logging.ERROR)  # the lines below replace its messages
    gc.disable()  # the compiler makes millions of objects: a twelfth of the time
    print(f"Kernels are cached in {CACHE_DIR}", flush=True)
    started = time.perf_counter()
    groups = kernel_groups(options.pattern, options.id_bits)
    # Forked, so that the imports so far are not repeated. No library has started threads yet.
    context = multiprocessing.get_context("fork")
    taken, compiled = context.Value("i", 0), context.Value("i", 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the other processes too
    others = min(available_cpus(), len(groups)) - 1
    arguments = groups, taken, compiled
    processes = [context.Process(target=_run_next_groups, args=arguments, daemon=True) for _ in range(others)]
    for process in processes:
        process.start()
    _run_next_groups(*arguments)
    for process in processes:
        process.join()
        if process.exitcode:
            sys.exit(f"A process that compiles kernels ended with code {process.exitcode}.")
    if options.id_bits is not None:
        pipeline_marker(options.pattern, options.id_bits).touch()
    if compiled.value:
        print(f"{compiled.value} kernels compiled in {time.perf_counter() - started:.1f} s")
    else:
        print("All kernels are cached; nothing was compiled.")


if __name__ == "__main__":
    main()
