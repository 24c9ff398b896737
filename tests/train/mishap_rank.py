"""A rank of the training command with a mishap of mishap.py: `python -m tests.train.mishap_rank MODEL MISHAP --flags`."""

from tests.train import mishap, rank

if __name__ == "__main__":
    rank.run(mishap.arrange)
