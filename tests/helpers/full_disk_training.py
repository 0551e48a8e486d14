"""A training that cannot save. ``python -m tests.helpers.full_disk_training JOB.json`` runs one of its processes."""

import errno
from unittest.mock import patch

from lm.train.__main__ import run_as_program

if __name__ == "__main__":
    with patch("lm.train.checkpoints.save_training", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        run_as_program()
