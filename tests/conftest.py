import atexit
import os
import shutil
import tempfile

# A graph that an earlier run left in Inductor's cache runs no passes, which tests watch. One run's processes share one.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="flce_inductor_tests_")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

# Inductor would build and run a program to see whether the processor has the instructions that it says it has: 10 s of
# a core for each test that has caches of its own.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _as_the_first_test():
    """A test neither hits another's recompile limit nor finds its compiled code, and draws the same random numbers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
