"""Hostile input for every parser, and long comparisons of the compiled kernels with the slow, obvious way.

``python -m tests.fuzz`` runs all targets, one after the other, and ends with a table.
"""
