"""The dated table of engines: every row says what, how and where that was read."""

import re
from itertools import groupby

from minserve.tuning.engine_support import engine_support


def test_every_row_says_what_how_and_where_from():
    rows = engine_support()
    assert {row.status for row in rows} == {"yes", "partly", "no"}
    for row in rows:
        assert row.engine and row.ability and row.how and re.fullmatch(r"20\d\d-\d\d-\d\d", row.read_on)
        assert row.source.startswith("https://") and (row.since is None or re.fullmatch(r"PR \d+", row.since))


def test_an_engines_rows_stand_together_and_tell_different_abilities():
    rows = engine_support()
    engines = [engine for engine, _ in groupby(rows, key=lambda row: row.engine)]
    assert len(engines) == len(set(engines)) and "vLLM" in engines and "SGLang" in engines
    assert len({(row.engine, row.ability) for row in rows}) == len(rows)
