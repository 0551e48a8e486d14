"""The signals that stop a run."""

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the request of a job scheduler, and a closed terminal or lost connection."""
