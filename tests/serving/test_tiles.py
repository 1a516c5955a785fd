"""Tiles by hand: turns of multiprocessors, their depth, and tiles that drawn rows need."""

import math

import numpy as np
import pytest

from pdsim.compute.kernels import Peaks, Roof
from pdsim.compute.tiles import causal_attention, grouped, product, tiles_of, whole_sequences


def test_a_product_walks_along_its_inner_width_once_a_turn():
    """300 rows are three tiles of 128, 1000 columns eight: 24 tiles, on ten multiprocessors three turns."""
    work = product(300, 1000, 64, 2, 128, 128, 10)
    assert work == (2.0 * 384 * 1000 * 64, 2 * (300 * 64 + 1000 * 64) + 2 * 300 * 1000, 3, 3 * 64)
    assert product(300, 1000, 64, 2, 0, 0, 10)[0] == 2.0 * 300 * 1000 * 64


def test_one_more_column_of_tiles_takes_one_more_turn():
    roof = Roof(launch=1e-6, tile=128, columns=128, block=1e-6, walk=1e-9)
    peaks = Peaks(1e15, 1e15, 1e12, processors=132)
    one, two = (roof.seconds(product(1, n, 1000, 2, *roof.cut(), 132), peaks) for n in (132 * 128, 132 * 128 + 1))
    assert one == pytest.approx(1e-6 + 1e-6 + 1e-6)
    assert two == pytest.approx(1e-6 + 2 * (1e-6 + 1e-6))


def test_both_products_of_experts_take_turns():
    """Five experts of 200 rows: two tiles of rows each; 2 x 96 columns are two tiles, 512 are four."""
    work = grouped(1000, 5, 512, 96, 2, 128, 128, 10)
    assert work.turns == 2 + 4
    assert work.depth == 2 * 512 + 4 * 96
    assert work.flops == 6.0 * 5 * 2 * 128 * 512 * 96


def test_drawn_rows_need_as_many_tiles_as_in_a_sample():
    drawn = np.random.default_rng(1).poisson(256, 200_000)
    assert tiles_of(256, 128, even=False) == pytest.approx(np.ceil(drawn / 128).mean(), rel=2e-3)
    assert tiles_of(256, 128) == 2
    assert tiles_of(3, 128, even=False) == pytest.approx(1.0)
    assert tiles_of(10, 0) == 0


@pytest.mark.parametrize(("new", "heads"), [(128, 4), (1024, 4), (1024, 16), (4096, 8)])
def test_causal_tiles_end_no_later_than_graham_says(new, heads):
    """Tiles one by one to whoever is free, in any order: between the mean of all, and that and the longest."""
    processors, tile = 30, 128
    rows = [(number + 1) * tile for number in range(math.ceil(new / tile)) for _ in range(heads)]
    busy = [0] * processors
    for row in rows:
        busy[busy.index(min(busy))] += row
    work = causal_attention([(0, new)], heads, 1, 2.0, tile, processors)
    assert max(rows) <= work.depth
    assert sum(rows) / processors <= work.depth
    assert 0.7 * work.depth < max(busy) <= work.depth


def test_earlier_tokens_are_met_once_a_turn():
    """64 tiles on 30 multiprocessors are three turns, each over 1,000 earlier tokens; bytes are of all tokens."""
    alone, later = (causal_attention([(before, 1024)], 8, 2, 4.0, 128, 30) for before in (0, 1000))
    assert later.depth - alone.depth == pytest.approx(3 * 1000 * 2)
    assert later.nbytes - alone.nbytes == 4000
    assert later.flops - alone.flops == 2.0 * 1024 * 1000 * 2 * 8
    assert causal_attention([(0, 0)], 8, 2, 4.0, 128, 30).depth == 0


def test_decode_attention_splits_below_four_fifths_of_two_tiles_a_multiprocessor():
    assert whole_sequences(32, 8, 132)
    assert not whole_sequences(26, 8, 132)
    assert not whole_sequences(1000, 8, 0)
