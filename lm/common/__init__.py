"""Errors, bounds of configuration fields, execution settings and phases."""
