"""What the tests of encodings share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def compilable(request):
    """Skips where annotations are enforced, which a compiler cannot trace; forgets what was compiled before."""
    if request.config.getoption("jaxtyping_packages", None):
        pytest.skip("annotations are enforced, and a compiler cannot trace the checks")
    torch._dynamo.reset()
