"""Fault injection: kill a flow, fill its disk, damage its outputs or stop its servers, and run it again.

``python -m tests.faults --rounds N --seed S`` runs rounds of the flow ``pipeline``, or with ``--posttrain`` of
``posttrain``. ``--list`` shows the cases.
"""
