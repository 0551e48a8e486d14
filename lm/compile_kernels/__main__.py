"""Compile all kernels ahead of time, for example in an image: ``python -m lm.compile_kernels --pattern llama3``.

With ``--id-bits 16`` or ``32``, compile only what a pipeline run with such ids starts in the background. Calls the
public functions of :mod:`lm` on small inputs that reach every kernel with every type, so no list of signatures is
needed.
"""

import argparse
import gc
import logging
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lm.compile_kernels import text_kernels
from lm.hardware.cpu import available_cpus
from lm.kernels.disk_cache import CACHE_DIR, IS_CACHE_WRITABLE, pipeline_marker
from lm.kernels.jit import KERNELS
from lm.text.patterns import PATTERNS


def kernel_groups(pattern: str = "gpt2", id_bits: int | None = None) -> dict[str, Callable[[], object]]:
    """Return functions that run the kernels in groups, by the names of the groups.

    ``pattern`` is a name in PATTERNS. ``id_bits``: only what a pipeline run with ids of 16 or 32 bits uses. The first
    two groups take longest, and a run needs the kernels of counting first.
    """
    widths = (16, 32) if id_bits is None else (id_bits,)
    groups: dict[str, Callable[[], object]] = {
        "counting": partial(text_kernels.count, pattern),
        "AdamW, decode step": _of_models("update_and_decode"),
        **{f"encoding, {bits}-bit ids": partial(text_kernels.encode, pattern, bits) for bits in widths},
        **{f"BPE training, {bits}-bit ids": partial(text_kernels.train, bits) for bits in widths},
    }
    if id_bits is None:
        groups |= {
            "decode step, bfloat16": _of_models("decode", "bfloat16"),
            "decode step, int8": _of_models("decode", "int8"),
            "superwords": partial(text_kernels.learn_superwords, pattern),
            "adapters": _of_models("compute_adapter"),
            "weights in 4 bits": _of_models("dequantize"),
            "curation": text_kernels.curate,
            "SentencePiece": text_kernels.encode_pieces,
        }
    return groups


def _of_models(name: str, *arguments: str) -> Callable[[], object]:
    def run() -> None:
        from lm.compile_kernels import model_kernels  # imports torch, for which the other groups need not wait

        getattr(model_kernels, name)(*arguments)

    return run


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
