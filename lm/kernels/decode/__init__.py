"""Kernels of a decode step on a CPU: matmul of a small batch, norm and attention, and the fused step."""
