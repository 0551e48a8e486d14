"""Fuzz tests: hostile input for each parser, and random comparisons of the compiled kernels with slow references.

``python -m tests.fuzz`` runs all targets in turn and prints a table.
"""
