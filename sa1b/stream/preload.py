"""What the server of a loader's processes imports once, so that each starts in 0.1 s and shares memory."""

import numpy as np

import sa1b.stream.mix
import sa1b.stream.processes  # noqa: F401
from sa1b.hashing import random_words

random_words(0, np.zeros(1, np.int64))  # loads compiled code
