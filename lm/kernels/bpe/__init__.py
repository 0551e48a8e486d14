"""Kernels of BPE: pretokens, counts, training and encoding."""
