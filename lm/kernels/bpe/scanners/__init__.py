"""Scanners: kernels that find where the pretokens of a pattern start."""
