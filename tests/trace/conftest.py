"""A small trace, and where the public ones lie."""

from pathlib import Path

import pytest
from trace_samples import make_trace

PUBLIC = Path(__file__).parents[2].parent / "shared/traces"


@pytest.fixture
def trace():
    return make_trace()


@pytest.fixture
def public():
    if not PUBLIC.is_dir():
        pytest.skip("the public traces are not beside this checkout")
    return PUBLIC
