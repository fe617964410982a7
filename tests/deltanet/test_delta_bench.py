"""The bench of the delta rule: what is compared, and what is refused."""

import json

import pytest

from minserve.bench.delta import bench_delta, table, to_json
from minserve.errors import InvalidValue


def test_every_form_is_measured_and_agrees():
    results = bench_delta(num_tokens=(5, 40), chunks=(1, 4, 16), rounds=2)
    assert [(r.num_tokens, r.chunk) for r in results] == [(n, chunk) for n in (5, 40) for chunk in (1, 4, 16)]
    for r in results:
        assert r.ms > 0 and r.ratio > 0 and (r.ratio, r.difference) == (1, 0) if r.chunk == 1 else r.difference < 1e-5
    assert max(r.difference for r in results) > 0, "two forms of float32 arithmetic differ somewhere"
    assert len(json.loads(to_json(results))) == 6 and len(table(results).splitlines()) == 2 + 6 + 1


@pytest.mark.parametrize(
    "wrong", [{"num_tokens": (0,)}, {"num_tokens": ()}, {"chunks": (16, 0)}, {"rounds": 0}], ids=str
)
def test_what_cannot_be_measured_is_refused(wrong):
    with pytest.raises(InvalidValue, match=next(iter(wrong))):
        bench_delta(**wrong)
