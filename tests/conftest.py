import pytest
import torch


@pytest.fixture(autouse=True)
def _as_the_first_test():
    """A test neither hits another's recompile limit nor finds its compiled code, and draws the same random numbers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
