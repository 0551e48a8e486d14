"""The algorithms and file formats of textmill. Knows no Prefect and no server."""

import os

# Torch divides each operation among OpenMP's threads, which keep their cores busy while they wait for one another, by
# default for milliseconds. Beside a program that holds one of two cores, a training was then three to ten times slower.
# After this many pauses, some tenths of a millisecond, they sleep. OpenMP reads the variable when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
