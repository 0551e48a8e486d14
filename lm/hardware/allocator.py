"""The allocator of the C library, which gives the memory of large tensors back to the operating system too early."""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of mallopt in glibc's malloc.h


def keep_freed_memory() -> None:
    """Have this process keep the memory of freed tensors for new ones, from now on.

    glibc maps and unmaps each block of more than 32 MB anew, such as the logits of a batch, and the system fills it
    with zeros page by page. A training on two cores took a fifth longer. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never
