"""The project's own additions to Prefect: its server, ``textmill up``, logs and artifacts, dead runs, shutdown."""
