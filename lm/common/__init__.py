"""Errors, config validation, checksums, execution settings and devices."""
