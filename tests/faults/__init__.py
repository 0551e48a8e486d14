"""The pipeline under faults: killed, stopped, out of disk, its outputs damaged, its servers gone; then run again.

``python -m tests.faults --rounds N --seed S`` plays rounds; ``--list`` says which there are, and which make no sense.
"""
