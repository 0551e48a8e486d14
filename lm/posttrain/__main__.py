"""Run the job file of a post-training, as ``python -m lm.train`` runs that of a pretraining; see there."""

from lm.posttrain.job import PosttrainJob
from lm.train.__main__ import run_as_program

if __name__ == "__main__":
    run_as_program(PosttrainJob)
