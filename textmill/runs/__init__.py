"""Runs: what they made, for people and for other programs."""
