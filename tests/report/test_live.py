"""`stats()` and `requests()` of a live model print as one line, know data frames, and are a dictionary and a list."""

from __future__ import annotations

import copy
import json

import pytest

from hotset.generation import Sampling, TextModel, encode_prompt, generate
from hotset.options import RunOptions
from hotset.report import to_pandas
from hotset.report.live import Requests, Stats

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def handle():
    with TextModel.load(RunOptions(memory="25%", prefetch="off")) as text_model:
        fresh = text_model.stats(), text_model.handle.requests()
        for text in ("Il mercato del", "def f(x):"):
            generate(text_model, encode_prompt(text_model, text), Sampling(max_new_tokens=4))
        text_model.handle.fresh = fresh
        yield text_model.handle


def test_stats_are_a_line_and_a_dictionary(handle):
    stats = handle.stats()
    assert isinstance(stats, dict)
    rate = f"hit rate {100 * stats['hit_rate']:.1f} %"
    held = f"{stats['resident']} of {stats['slots']} slots used, blend"
    assert repr(stats) == f"<Stats: {stats['tokens']} tokens, {rate}; {held}; {len(stats)} figures>"
    assert "nothing asked for yet" in repr(handle.fresh[0])
    assert repr(Stats()) == "<Stats: 0 tokens, nothing asked for yet; 0 figures>"
    assert json.loads(json.dumps(stats)) == json.loads(json.dumps(dict(stats)))
    assert stats == dict(stats)
    assert isinstance(copy.deepcopy(stats), Stats)


def test_requests_are_a_line_and_a_list(handle):
    requests = handle.requests()
    assert isinstance(requests, list)
    assert len(requests) == 2
    tokens = sum(int(each.tokens.sum()) for each in requests)
    first, last = requests[0].number, requests[-1].number
    assert repr(requests) == f"<Requests: 2 requests, numbers {first} to {last}; {tokens} tokens>"
    assert repr(handle.fresh[1]) == "<Requests: none>"
    assert repr(Requests(requests[:1])).startswith(f"<Requests: 1 request, number {first}; ")
    assert json.loads(json.dumps([each.as_dict() for each in requests]))[0]["request"] == first


def test_a_request_is_a_line(handle):
    request = handle.requests()[0]
    figures = request.as_dict()
    prompt, new = figures["prefill_tokens"], figures["decode_tokens"]
    assert repr(request).startswith(f"<Request {request.number}: {prompt} tokens of prompt and {new} new, hit rate ")
    assert repr(request).endswith(" loaded>")
    assert len(repr(request)) < 120


def test_both_know_data_frames(handle):
    pytest.importorskip("pandas")
    stats, requests = handle.stats(), handle.requests()
    assert stats.to_pandas()["decode.hit_rate"].tolist() == [stats["decode"]["hit_rate"]]
    frame = requests.to_pandas()
    assert frame.request.tolist() == [each.number for each in requests]
    assert frame.equals(to_pandas(list(requests)))
