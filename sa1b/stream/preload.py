"""What the server of a loader's processes imports once, so that each starts in 0.1 s and shares memory."""

from sa1b.stream.dataset import load_compiled_code

load_compiled_code()
