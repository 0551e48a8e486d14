"""The compiled core: numba kernels, compiled once for each machine.

``python -m lm.kernels`` compiles all of them ahead of time.
"""
