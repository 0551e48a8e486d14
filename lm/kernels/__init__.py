"""The compiled core: numba kernels. ``python -m lm.compile_kernels`` compiles all of them ahead of time."""
