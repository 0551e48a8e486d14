"""A matrix times a vector at the speed at which memory is read, by several threads.

The threads claim blocks of rows, one after the other, until none are left: one that comes late, or is interrupted,
keeps nobody waiting but for the block that it has. All matrices lie in one array; a job says which of them is meant.
The reference is ``matrix @ vector``.
"""

import numpy as np
import numpy.typing as npt

from lm.kernels import Int, Longs, inlined, kernel, summing
from lm.kernels.atomics import add, give_way, load, replace, store
from lm.kernels.simd import read

Floats = npt.NDArray[np.float32]

# Of the state of a team, each in a line of the cache of its own:
NEXT = 0  # the job's number · 2³² + the block to be claimed next
DONE = 8  # blocks that are computed
SPINNING = 16  # threads that look out for a job
OFFSET, ROWS, COLUMNS = 24, 25, 26  # of the job
STATE = 32  # words
_NONE = 0xFFFFFFFF  # a block that no matrix has
_BLOCK = 1 << 15  # floats of a block: enough for the claims to cost nothing beside it
_PATIENCE = 1_000  # looks for the last blocks, before another thread may have the processor
_SPINS = 200_000  # looks without a job before a thread rests: near a millisecond


@inlined
def _rows_of_a_block(columns: Int) -> int:
    return int(max(4, _BLOCK // columns // 4 * 4))


@summing
def _multiply_rows(weights: Floats, offset: int, columns: int, x: Floats, y: Floats, first: int, last: int) -> None:
    """``y[first:last]``, four rows side by side as each is a stream from memory."""
    row = first
    while row + 4 <= last:
        at = offset + row * columns
        a = b = c = d = np.float32(0)
        for i in range(columns):
            factor = read(x, i)
            a += read(weights, at + i) * factor
            b += read(weights, at + columns + i) * factor
            c += read(weights, at + 2 * columns + i) * factor
            d += read(weights, at + 3 * columns + i) * factor
        y[row], y[row + 1], y[row + 2], y[row + 3] = a, b, c, d
        row += 4
    while row < last:
        at = offset + row * columns
        a = np.float32(0)
        for i in range(columns):
            a += read(weights, at + i) * read(x, i)
        y[row] = a
        row += 1


@kernel
def _work(state: Longs, weights: Floats, x: Floats, y: Floats, job: int) -> bool:
    """Compute blocks of job number ``job`` until none are left; whether there was any."""
    has_worked = False
    while True:
        claim = load(state, NEXT)
        offset, rows, columns = state[OFFSET], state[ROWS], state[COLUMNS]  # the job's, if the claim below succeeds
        block = claim & _NONE
        if claim >> 32 != job or columns <= 0:
            return has_worked
        height = _rows_of_a_block(columns)
        if block * height >= rows:
            return has_worked
        if replace(state, NEXT, claim, claim + 1):
            has_worked = True
            _multiply_rows(weights, offset, columns, x, y, block * height, min(rows, (block + 1) * height))
            add(state, DONE, 1)


@kernel
def help_out(state: Longs, weights: Floats, x: Floats, y: Floats) -> None:
    """What each thread but the caller's does: take part in the jobs that come, until there are none for a while."""
    add(state, SPINNING, 1)
    idle = 0
    while idle < _SPINS:
        if _work(state, weights, x, y, load(state, NEXT) >> 32):
            idle = 0
        else:
            idle += 1
    add(state, SPINNING, -1)


@kernel
def multiply(state: Longs, weights: Floats, x: Floats, y: Floats, offset: int, rows: int, columns: int) -> None:
    """``y[:rows]`` = the matrix (rows, columns) at ``weights[offset:]`` times ``x[:columns]``."""
    job = (load(state, NEXT) >> 32) + 1
    store(state, NEXT, job << 32 | _NONE)  # nobody claims while the numbers below are neither the old nor the new
    state[OFFSET], state[ROWS], state[COLUMNS] = offset, rows, columns
    store(state, DONE, 0)
    store(state, NEXT, job << 32)
    _work(state, weights, x, y, job)
    height = _rows_of_a_block(columns)
    blocks = (rows + height - 1) // height
    waits = 0
    while load(state, DONE) < blocks:
        waits += 1
        if waits % _PATIENCE == 0:
            give_way()  # who has the last block may wait for this processor
