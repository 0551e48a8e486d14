"""Runners: three forms of computing new tokens with a KV cache."""
