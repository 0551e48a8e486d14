"""Statuses that kernels return.

All are 0 or negative, so a kernel can return either a count or, below 0, a status. With one of the "full"
statuses the kernel has stopped at a point where it can continue after the caller has enlarged the structure.
"""

OK = 0
WORKSPACE_FULL = -1  # a pretoken is longer than the workspace
TABLE_FULL = -2  # a hash table needs more slots
ARENA_FULL = -3  # the pretoken table needs a larger arena
PLACES_FULL = -4  # BPE training needs more room for the places of pairs
INVALID_UTF8 = -5  # INVALID_UTF8 - i: byte i of the buffer is not valid UTF-8
