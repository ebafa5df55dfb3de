"""What keeps one event cheap when Python serves it; benchmarks/event_latency.py has the times."""

from hotset.policies import names, parse
from hotset.shape import ModelShape

SHAPE = ModelShape(layers=4, experts=128, top_k=8)


def test_state_types_have_names_of_their_own():
    """Numba's fast dispatch tells named tuples apart by name and fields; two alike slowed every call fortyfold."""
    types = [type(parse(name).start(SHAPE)).__name__ for name in names()]
    assert len(set(types)) == len(types)
