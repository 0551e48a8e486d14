"""Which merges can happen: of several merges that make the same token, one at most."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from lm.kernels.jit import Int32s
from lm.tokenizer.reference import last_merge


def find_used_merges(merges: Sequence[tuple[bytes, bytes]]) -> Int32s:
    """Return the ranks of the merges that can happen, ascending. A merge that is alone to make its token is kept.

    The tokenizer.json of Llama 3 has twice as many merges as tokens, because it was converted from ranks of tokens: a
    merge for each two tokens that a token consists of.
    """
    ranks_of: dict[bytes, list[int]] = defaultdict(list)
    for rank, (left, right) in enumerate(merges):
        ranks_of[left + right].append(rank)
    if len(ranks_of) == len(merges):
        return np.arange(len(merges), dtype=np.int32)
    first_rank = {merge: rank for rank, merge in reversed([*enumerate(merges)])}

    def find_merge(pair: tuple[bytes, bytes]) -> tuple[int, bytes] | None:
        return (first_rank[pair], pair[0] + pair[1]) if pair in first_rank else None

    used = []
    for token, ranks in ranks_of.items():
        if len(ranks) == 1:
            used += ranks
        elif merge := last_merge(token, find_merge):
            used.append(first_rank[merge])
    return np.array(sorted(used), np.int32)
