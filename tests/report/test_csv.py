import csv
from dataclasses import replace
from io import StringIO

from result_rows import row, sweep

from hotset.report import to_csv
from hotset.sim.rows import FIELDS


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(text)))


def test_header_and_a_line_per_row() -> None:
    lines = to_csv(sweep()).splitlines()
    assert lines[0].split(",") == FIELDS == list(row().as_dict())
    assert FIELDS[0] == "trace"
    assert FIELDS[-3:] == ["late", "wasted", "wasted_bytes_per_token"]
    at = FIELDS.index("tokens_per_s")
    assert FIELDS[at + 1 : at + 3] == ["bound_s_per_token", "bound_share"]
    assert len(lines) == 1 + len(sweep())


def test_figures_survive() -> None:
    found = replace(row(), hit_rate=1 / 3, gap_closed=None)
    (line,) = read(to_csv([found]))
    assert float(line["hit_rate"]) == 1 / 3
    assert line["gap_closed"] == ""
    assert line["budget"] == "25%"


def test_awkward_names_are_quoted() -> None:
    (line,) = read(to_csv([row(trace='a,"b"\nc', policy="decay:half_life=8,x=1")]))
    assert line["trace"] == 'a,"b"\nc'
    assert line["policy"] == "decay:half_life=8,x=1"


def test_no_rows_leave_the_header() -> None:
    assert to_csv([]).startswith("trace,policy,")
    assert to_csv([]).count("\n") == 1
