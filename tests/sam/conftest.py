"""Set-up of the tests of the model."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread: several threads are slower for such small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
