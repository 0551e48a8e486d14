"""The project's own additions to Prefect: names, logs, artifacts, shutdown, dead runs, and ``textmill up``."""
