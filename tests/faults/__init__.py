"""Fault injection: kill the pipeline, fill its disk, damage its outputs or stop its servers, and run it again.

``python -m tests.faults --rounds N --seed S`` runs rounds. ``--list`` shows the cases.
"""
