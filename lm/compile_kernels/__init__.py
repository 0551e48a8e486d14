"""Compilation of all kernels ahead of time: ``python -m lm.compile_kernels``."""
