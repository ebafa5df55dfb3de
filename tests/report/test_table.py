from dataclasses import replace
from io import StringIO

from result_rows import result, row, sized, sweep
from rich.console import Console

from hotset.report import comparison_tables
from hotset.sim import Result
from hotset.sim.rows import Times


def text_of(found: Result, width: int = 100) -> str:
    console = Console(width=width, file=StringIO())
    for table in comparison_tables(found):
        console.print(table, highlight=False)
    return console.file.getvalue()


def timed() -> Times:
    return Times(0.0254, 0.0358, 27.93).with_bound(0.78 * 0.0358)


def lines_with(word: str, text: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


def test_title_states_the_setting() -> None:
    text = text_of(result(*sweep(streams=4, scope="pool", staging_slots=2)))
    assert "demo: decode from a cold start" in text
    assert "1,000 tokens, one pool of slots, 4 streams, 2 staging slots" in text


def test_figures_of_one_row() -> None:
    (line,) = lines_with("blend", text_of(result(*(r for r in sweep() if r.budget == "25%"))))
    assert line.split() == ["2.0", "cycles", "blend", "*", "76.0", "%", "40", "%", "23.04", "1.23"]


def test_budget_is_spelled_out_in_every_unit() -> None:
    text = text_of(result(*map(sized, sweep())))
    firsts = [line.split("  ")[0] for line in text.splitlines()]
    at = firsts.index("25 %")
    assert firsts[at : at + 4] == ["25 %", "192 slots", "2.0 cycles", "4.75 GiB"]


def test_budget_asked_for_in_slots_or_bytes_is_not_repeated() -> None:
    slots = text_of(result(sized(row(budget="192 slots")), sized(row(budget="192 slots", policy="lfu"))))
    assert slots.count("192 slots") == 1
    assert "25.0 %" in slots
    sizes = text_of(result(sized(row(budget="4.75 GiB", policy="lfu"))))
    assert sizes.count("GiB") == 2  # the budget and the bytes per token


def test_units_show_even_where_policies_are_few() -> None:
    text = text_of(result(sized(row())))
    assert lines_with("4.75 GiB", text)
    assert lines_with("2.0 cycles", text)


def test_star_marks_the_best_causal_policy_of_each_budget() -> None:
    rates = {"lru": (0.5, 0.6, 0.7), "lfu": (0.4, 0.7, 0.7), "blend": (0.3, 0.7, 0.8), "belady": (0.9, 0.9, 0.9)}
    text = text_of(result(*sweep(rates)))
    assert [line.count(" *") for line in lines_with("lru ", text)[:3]] == [1, 0, 0]
    assert [line.count(" *") for line in lines_with("lfu ", text)] == [0, 1, 0]
    assert [line.count(" *") for line in lines_with("blend ", text)] == [0, 1, 1]


def test_belady_is_the_bound_stands_last_and_has_no_star() -> None:
    rows = sweep()
    text = text_of(result(*reversed(rows)))
    bound = lines_with("belady (bound)", text)
    assert len(bound) == 3
    assert not any("*" in line for line in bound)
    names = [next((n for n in ("lru", "lfu", "blend", "belady") if f" {n} " in line), "") for line in text.splitlines()]
    assert [n for n in names if n][:4][-1] == "belady"


def test_equals_are_not_starred() -> None:
    rates = dict.fromkeys(("lru", "lfu", "belady"), (0.0, 0.0, 0.0))
    text = text_of(result(*sweep(rates)))
    assert not lines_with("lfu *", text)
    assert not lines_with("lru *", text)


def test_best_is_bold_and_bound_is_not() -> None:
    console = Console(width=100, file=StringIO(), force_terminal=True, color_system="standard", legacy_windows=False)
    console.print(comparison_tables(result(*sweep()))[0])
    assert "\x1b[1mblend *" in console.file.getvalue()
    assert "\x1b[3;36mbelady (bound)" in console.file.getvalue()


def test_columns_without_figures_are_absent() -> None:
    text = text_of(result(*sweep()))
    for word in ("bytes", "stall", "tokens/s", "requests"):
        assert word not in text
    assert "bytes" in text_of(result(*map(sized, sweep())))


def test_link_and_warm_start_have_their_columns_within_100_columns() -> None:
    rows = [replace(sized(found), start="warm", cold_hit_rate=0.111, times=timed()) for found in sweep()]
    text = text_of(result(*rows))
    (line,) = [line for line in lines_with("blend", text) if "76.0 %" in line]
    assert line.endswith("78 %")
    assert "11.1 %" in line
    assert "25.40" in line
    assert "27.9" in line
    assert "not seen before" in text
    assert len(lines_with("belady (bound)", text)) == 3  # nothing is folded
    assert max(map(len, text.splitlines())) <= 100


def test_the_time_bound_stands_below_the_memory_and_takes_the_room_of_evictions() -> None:
    rows = [replace(sized(found), times=timed()) for found in sweep()]
    text = text_of(result(*rows))
    firsts = [line.split("  ")[0].strip() for line in text.splitlines()]
    at = firsts.index("25 %")
    assert firsts[at : at + 5] == ["25 %", "192 slots", "2.0 cycles", "4.75 GiB", "27.92 ms"]
    assert "memory," in firsts
    assert "time bound: no policy and no prefetch" in " ".join(text.split())
    assert "evicted" not in text
    plain = text_of(result(*sweep()))
    assert "evicted" in plain
    assert "time bound" not in plain


def test_phases_starts_and_traces_stand_apart() -> None:
    rows = [*sweep(), *sweep(phase="prefill"), *sweep(start="warm"), *sweep(trace="other")]
    titles = [str(table.title).strip().splitlines()[0] for table in comparison_tables(result(*rows))]
    assert titles == [
        "demo: decode from a cold start",
        "demo: prefill from a cold start",
        "demo: decode from a warm start",
        "other: decode from a cold start",
    ]


def test_legend_is_said_once() -> None:
    text = text_of(result(*sweep(), *sweep(trace="other")))
    assert text.count("knows the future") == 1


def test_names_cannot_steer_the_terminal_or_the_markup() -> None:
    text = text_of(result(*sweep(trace="a\x1b[31m[red]b")))
    assert "\x1b" not in text
    assert "a?[31m[red]b" in text


def test_absent_gap_is_a_dash_and_there_is_no_minus_zero() -> None:
    text = text_of(result(row(gap_closed=None), row(policy="lfu", gap_closed=-0.001)))
    assert "-0 %" not in text
    assert lines_with(" - ", text)


def test_no_rows_no_tables() -> None:
    assert comparison_tables(Result()) == []


def test_ascii_terminals_can_show_it() -> None:
    class Ascii(StringIO):
        encoding = "ascii"

    console = Console(width=100, file=Ascii())
    for table in comparison_tables(result(*sweep())):
        console.print(table)
    assert console.file.getvalue().isascii()
