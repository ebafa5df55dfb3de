"""A small trace, and where the public ones lie."""

import pytest
from foreign_traces import PUBLIC
from trace_samples import make_trace


@pytest.fixture
def trace():
    return make_trace()


@pytest.fixture
def public():
    if not PUBLIC.is_dir():
        pytest.skip("the public traces are not beside this checkout")
    return PUBLIC
