import pytest
import torch


@pytest.fixture(autouse=True)
def _no_leftover_compilations():
    """A test neither hits another's recompile limit nor finds its compiled code."""
    torch._dynamo.reset()
