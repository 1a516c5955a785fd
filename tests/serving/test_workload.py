"""Traces are read as they are, what is wrong in them is named; generated arrivals have the right statistics."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdsim.core.errors import ConfigError
from pdsim.serving.settings import Workload
from pdsim.serving.workload import Request, draw, load

CONTEXT = 131_072


def trace(folder: Path, *text: str) -> Workload:
    path = folder / "trace"
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return Workload(trace=str(path))


def mooncake(time: float | str, given: float = 10, wanted: int = 5) -> str:
    return f'{{"timestamp": {time}, "input_length": {given}, "output_length": {wanted}, "hash_ids": [0, 1]}}'


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_mooncake_timestamps_are_milliseconds_from_the_first_arrival(tmp_path):
    requests = load(trace(tmp_path, mooncake(500), mooncake(500, 20), mooncake(1750)), 0, CONTEXT)
    assert [request[:3] for request in requests] == [(0.0, 10, 5), (0.0, 20, 5), (1.25, 10, 5)]
    assert {request.hash_ids for request in requests} == {(0, 1)}


def test_a_byte_order_mark_of_windows_is_skipped(tmp_path):
    assert len(load(trace(tmp_path, f"\ufeff{mooncake(1)}"), 0, CONTEXT)) == 1


def test_azure_timestamps_keep_their_digits_and_time_zones(tmp_path):
    rows = ("46.6805900,374,44", "50.9951690,396,109", "51.9951691,1,1")
    requests = load(trace(tmp_path, HEADER, *(f"2023-11-16 18:15:{row}" for row in rows)), 0, CONTEXT)
    assert [request[1:3] for request in requests] == [(374, 44), (396, 109), (1, 1)]
    assert [request.arrival for request in requests] == pytest.approx([0, 4.314579, 5.3145791], abs=3e-8)
    rows = "2024-05-10 00:00:00.009930+00:00,2162,5", "2024-05-10 00:00:01+00:00,2399,6"
    requests = load(trace(tmp_path, HEADER, *rows), 0, CONTEXT)
    assert [request.arrival for request in requests] == pytest.approx([0, 0.99007], abs=3e-8)


BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BAILIAN = '{{"chat_id": {0}, "timestamp": {1}, "input_length": {2}, "output_length": 2, "turn": 1, "hash_ids": {3}}}'


@pytest.mark.parametrize("extra", ["", "7,1.5,"])
def test_burstgpt_has_seconds_and_tokens(tmp_path, extra):
    header = BURSTGPT.replace("Model", "Session ID,Elapsed time,Model") if extra else BURSTGPT
    rows = f"5,{extra}ChatGPT,472,18,490,Conversation log", f"45.5,{extra}GPT-4,1087,230,1317,API log"
    assert load(trace(tmp_path, header, *rows), 0, CONTEXT) == [Request(0.0, 472, 18), Request(40.5, 1087, 230)]


def test_bailian_hashes_of_16_tokens_make_blocks_of_512(tmp_path):
    common = list(range(40))
    hashes = enumerate((common, [*common[:39], 99], [99, *common[1:]]), 1)
    lines = [BAILIAN.format(n, 60.114 + n, 640, each) for n, each in hashes]
    first, second, third = load(trace(tmp_path, *lines), 0, CONTEXT)
    assert [one.arrival for one in (first, second, third)] == pytest.approx([0, 1, 2])
    assert [len(one.hash_ids) for one in (first, second, third)] == [2, 2, 2]
    assert first.hash_ids[0] == second.hash_ids[0] != third.hash_ids[0]
    assert first.hash_ids[1] != second.hash_ids[1]


def test_windows_line_ends_and_a_missing_last_one_are_read(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(f"{HEADER}\r\n2023-11-16 18:15:46,374,44\r\n2023-11-16 18:15:47,1,2".encode())
    assert load(Workload(trace=str(path)), 0, CONTEXT) == [Request(0.0, 374, 44), Request(1.0, 1, 2)]


def test_speed_divides_arrivals_and_later_lines_are_unread(tmp_path):
    workload = trace(tmp_path, mooncake(0), mooncake(1000), "garbage")
    requests = load(replace(workload, speed=4.0, count=2), 0, CONTEXT)
    assert [request.arrival for request in requests] == [0.0, 0.25]


AZURE = "2023-11-16 18:15:46"


@pytest.mark.parametrize(
    ("first", "line", "reason"),
    [
        (mooncake(1000), "{", "Input data was truncated"),
        (mooncake(1000), '{"timestamp": 1, "input_length": 5}', "missing required field `output_length`"),
        (mooncake(1000), mooncake("null"), "Expected `float`, got `null`"),
        (mooncake(1000), mooncake("NaN"), "invalid"),
        (mooncake(1000), mooncake(2000, given=-3), "-3 input and 5 output tokens: both must be >= 1"),
        (mooncake(1000), mooncake(2000, wanted=0), "10 input and 0 output tokens: both must be >= 1"),
        (mooncake(1000), mooncake(2000, given=5.5), "Expected `int`, got `float`"),
        (mooncake(1000), mooncake(5), "timestamp 0.005 after 1.0: timestamps must be finite and must not decrease"),
        (HEADER, f"{AZURE},5", "2 fields, need the 3"),
        (HEADER, "yesterday,5,5", "'yesterday' is not a time such as 2023-11-16"),
        (HEADER, f"{AZURE},many,5", "'many' is not a whole number of tokens"),
        (HEADER, f"{AZURE},nan,5", "'nan' is not a whole number of tokens"),
        (HEADER, f"{AZURE},0,5", "0 input and 5 output tokens"),
        (BURSTGPT, "5,GPT-4,300,0,300,API log", "a request that failed; take the file without fails"),
        (BURSTGPT, "5,GPT-4,300", "3 fields, need the 6 or 8"),
    ],
)
def test_a_malformed_line_is_named_with_file_line_and_reason(tmp_path, first, line, reason):
    workload = trace(tmp_path, first, "", line)
    with pytest.raises(ConfigError) as caught:
        load(workload, 0, CONTEXT)
    assert str(caught.value).startswith(f"{workload.trace}:3: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_request_beyond_the_context_says_what_helps(tmp_path):
    workload = trace(tmp_path, mooncake(0), mooncake(1, 4000, 97))
    with pytest.raises(ConfigError, match=r":2: 4000 \+ 97 tokens exceed model.context=4096; .*workload.count=1$"):
        load(workload, 0, 4096)
    assert len(load(replace(workload, count=1), 0, 4096)) == 1
    with pytest.raises(ConfigError, match=r":2: .* or delete the line$"):
        load(trace(tmp_path, "", mooncake(0, 5000)), 0, 4096)


def test_prompts_that_are_cut_to_the_context_are_noted():
    workload = Workload(arrivals="poisson", count=100, input_mean=3000.0)
    assert draw(workload, 0, CONTEXT).notes == ()
    drawn = draw(workload, 0, 4096)
    cut = sum(request.input + request.output == 4096 for request in drawn.requests)
    (note,) = drawn.notes
    assert note.startswith(f"warning: {cut} of 100 prompts were cut to model.context=4096: their mean is ")
    assert 10 < cut < 40


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe\x00", "is not text"),
        (b"a,b,c", "no trace of Mooncake or Qwen-Bailian"),
        (b"\n", "has no requests"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content, reason):
    path = tmp_path / "trace"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        load(Workload(trace=str(path)), 0, CONTEXT)


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "bursty"])
def test_generated_arrivals_have_the_mean_rate_and_lengths_asked_for(arrivals):
    lengths = {"input_mean": 1000, "output_mean": 100}
    workload = Workload(arrivals=arrivals, count=20_000, rate=5.0, burst_length=2.0, **lengths)
    requests = load(workload, 0, CONTEXT)
    assert len(requests) / requests[-1].arrival == pytest.approx(5.0, rel=0.1)
    assert np.mean([request.input for request in requests]) == pytest.approx(1000, rel=0.03)
    assert np.mean([request.output for request in requests]) == pytest.approx(100, rel=0.03)


def gaps(**changes: Any) -> np.ndarray:
    workload = replace(Workload(arrivals="poisson", count=20_000, rate=5.0), **changes)
    return np.diff([request.arrival for request in load(workload, 0, CONTEXT)])


@pytest.mark.parametrize(("changes", "cv"), [({}, 1.0), ({"arrivals": "gamma", "cv": 3.0}, 3.0)])
def test_gaps_are_as_irregular_as_asked_for(changes, cv):
    drawn = gaps(**changes)
    assert drawn.std() / drawn.mean() == pytest.approx(cv, rel=0.1)


def test_bursts_come_at_their_multiple_of_the_mean_rate():
    drawn = gaps(arrivals="bursty", burst=4.0, burst_length=20.0)
    assert np.median(drawn) == pytest.approx(np.log(2) / (4 * 5.0), rel=0.05)
    assert drawn.std() / drawn.mean() > 2.0


def test_diurnal_arrivals_peak_at_noon_as_high_as_asked_for():
    day = Workload(arrivals="diurnal", count=40_000, rate=10.0, day=1000.0, peak=3.0)
    counts, _ = np.histogram([request.arrival for request in load(day, 0, CONTEXT)], range(0, 4001, 100))
    hours = counts.reshape(4, 10).mean(axis=0) / 100.0
    # a tenth of a day at the trough and at noon, where the rates are 5 and 15 a second
    assert hours[[0, 9]].mean() == pytest.approx(10 - 5 * np.sinc(0.2), rel=0.05)
    assert hours[[4, 5]].mean() == pytest.approx(10 + 5 * np.sinc(0.2), rel=0.05)
    assert load(replace(day, peak=1.0), 0, CONTEXT)[-1].arrival == pytest.approx(
        load(replace(day, arrivals="poisson", day=86400.0, peak=4.0), 0, CONTEXT)[-1].arrival, rel=1e-9
    )


def test_arrivals_do_not_decrease_and_lengths_fit_the_context():
    requests = load(Workload(arrivals="bursty", count=5000, input_mean=5000, input_cv=3.0, output_mean=500), 1, 8192)
    assert all(one.arrival <= other.arrival for one, other in pairwise(requests))
    assert all(min(one.input, one.output) >= 1 and one.input + one.output <= 8192 for one in requests)


def test_generated_arrivals_need_an_end():
    with pytest.raises(ConfigError, match=r"workload\.count"):
        load(Workload(arrivals="poisson"), 0, CONTEXT)


GENERATED = Workload(arrivals="poisson", count=2000)


def patience(**changes: Any) -> list[float | None]:
    return [request.patience for request in load(replace(GENERATED, **changes), 7, CONTEXT)]


def test_a_share_of_users_leaves_after_a_mean_time():
    waits = [wait for wait in patience(aborts=0.25, patience=4.0) if wait is not None]
    assert len(waits) / 2000 == pytest.approx(0.25, abs=0.03)
    assert np.mean(waits) == pytest.approx(4.0, rel=0.15)


def test_who_leaves_is_a_stream_of_its_own():
    stays, leaves = (load(replace(GENERATED, aborts=share), 7, CONTEXT) for share in (0.0, 0.5))
    assert [request[:3] for request in stays] == [request[:3] for request in leaves]
    assert patience(aborts=0.5)[:100] == patience(aborts=0.5, count=100)
    few, many = patience(aborts=0.2), patience(aborts=0.6)
    assert all(wait == more for wait, more in zip(few, many, strict=True) if wait is not None)


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "bursty"])
def test_requests_drawn_in_blocks_are_those_drawn_at_once(monkeypatch, arrivals):
    workload = replace(GENERATED, arrivals=arrivals, count=100)
    whole = load(workload, 7, CONTEXT)
    monkeypatch.setattr("pdsim.serving.workload._BLOCK", 7)
    assert load(workload, 7, CONTEXT) == whole
