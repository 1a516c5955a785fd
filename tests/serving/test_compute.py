"""How long a forward takes, checked against sums done by hand; tiles and their turns."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pdsim.compute.forward import Compute, forward_time
from pdsim.compute.kernels import Peaks, Roof
from pdsim.compute.roofline import HOST_FLOPS
from pdsim.compute.tiles import causal_attention, grouped, product, tiles_of, whole_sequences
from pdsim.hardware.machine import Gpu, Host, Interconnect, Machine, Nic
from pdsim.models.llm import Llm, Side
from pdsim.serving.steps import RunningBatch

PARTS = {
    "gpu": Gpu(name="g", memory=10**11, memory_rate=1e12, compute=1e15, pcie=1e10),
    "interconnect": Interconnect(kind="switch", rate=1e11),
    "nic": Nic(count=0, rate=0.0),
    "host": Host(memory=10**12, memory_rate=1e11, tcp_rate=1e9, tcp_latency=1e-5),
}
MACHINE = Machine(name="round numbers", vendor="nvidia", nodes=1, gpus=8, **PARTS)
MODEL = Llm(name="m", parameters=1e10, active=1e10, layers=10, hidden=1000, heads=10, kv_heads=4, head_dim=100)
PLAIN = Compute(flops_share=0.5, memory_share=0.5, allreduce_latency=1e-5, overhead=1e-3)


LINEAR, PAIR = 2 * 1e10 * 4000 / 0.5e15, 4 * 10 * 10 * 100 / 0.5e15
OWN, BEFORE = 4000 * 4001 / 2, 4000 * 1000
"""Pairs of tokens of a chunk of 4,000 after 1,000: seconds of its products, and of a pair."""


@pytest.mark.parametrize(
    ("changes", "piece", "seconds"),
    [
        ({}, (1000, 4000), LINEAR + PAIR * (OWN + BEFORE)),  # bound by arithmetic
        ({}, (100, 10), (2e10 + (100 + 10) * 2 * 10 * 4 * 100 * 2) / 0.5e12),  # by reading weights and keys
        ({"prefix_share": 0.25}, (1000, 4000), LINEAR + PAIR * (OWN + 2 * BEFORE)),
        ({"prefix_share": 0.25}, (0, 4000), LINEAR + PAIR * OWN),
    ],
)
def test_a_prefill_is_bound_by_arithmetic_or_by_reading(changes, piece, seconds):
    times = forward_time(MODEL, MACHINE, replace(PLAIN, **changes), Side(tp=1))
    assert times.prefill([piece]) == pytest.approx(seconds + 1e-3)


def test_pieces_of_one_iteration_share_its_weights_and_overhead():
    times = forward_time(MODEL, MACHINE, PLAIN, Side(tp=1))
    assert times.prefill([(0, 8), (0, 8)]) < 1.01 * times.prefill([(0, 16)])


def test_padded_attention_computes_every_sequence_up_to_the_longest():
    plain, padded = (
        forward_time(MODEL, MACHINE, replace(PLAIN, attention_padded=on), Side(tp=1)) for on in (False, True)
    )
    assert padded.prefill([(1000, 4000)]) == plain.prefill([(1000, 4000)])
    # rows of the second that are none of its tokens, and the keys that they meet
    more = (4000 - 1000) * (1000 + 500)
    expected = plain.prefill([(0, 4000), (500, 1000)]) + 4 * 10 * 10 * 100 * more / 0.5e15
    assert padded.prefill(iter([(0, 4000), (500, 1000)])) == pytest.approx(expected)


def test_tensor_parallelism_divides_work_and_adds_two_all_reduces():
    one, four = (forward_time(MODEL, MACHINE, PLAIN, Side(tp=tp)) for tp in (1, 4))
    tokens = 4000
    ring = 2 * 3 / 4 * tokens * 1000 * 2 / 1e11 + 1e-5
    assert four.prefill([(0, tokens)]) == pytest.approx((one.prefill([(0, tokens)]) - 1e-3) / 4 + 1e-3 + 20 * ring)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 0.0),
        ({"experts": 8, "experts_per_token": 2, "dense_layers": 3}, 7e-4),  # seven layers have experts
        ({"attention": "mla", "latent_dim": 576, "rope_dim": 64}, 2e-3),
    ],
)
def test_small_kernels_add_a_latency_a_layer(changes, seconds):
    model, more = replace(MODEL, **changes), replace(PLAIN, mixed_latency=1e-4, latent_latency=2e-4)
    without, with_them = (forward_time(model, MACHINE, each, Side(tp=1)).step(4) for each in (PLAIN, more))
    assert with_them - without == pytest.approx(seconds)


def test_a_step_reads_once_what_its_tokens_use():
    times = forward_time(MODEL, MACHINE, PLAIN, Side(tp=1))
    assert times.step(1) == pytest.approx(2e10 / 0.5e12 + 1e-3)
    assert times.context == pytest.approx(2 * 10 * 4 * 100 * 2 / 0.5e12)
    times = forward_time(replace(MODEL, active=1e9), MACHINE, PLAIN, Side(tp=1))
    read = [(times.step(batch) - 1e-3) * 0.5e12 for batch in (1, 4, 10, 100)]
    assert read == pytest.approx([2e9, 8e9, 2e10, 2e10])


MOE = replace(MODEL, active=2e9, experts=100, experts_per_token=20)
"""8e9 parameters are of the 80 experts that a token does not use; so all 100 have 1e10 and the rest is nothing."""


def test_tokens_of_all_groups_read_the_experts_they_hit():
    times = forward_time(MOE, MACHINE, PLAIN, Side(tp=1))
    read = [(times.step(batch) - 1e-3) * 0.5e12 for batch in (1, 2, 16)]
    # two bytes a parameter, and all parameters here are routed experts'
    assert read == pytest.approx([2e10 * (1 - 0.8**n) for n in (1, 2, 16)])
    half = forward_time(replace(MOE, parameters=1.6e10, active=8e9), MACHINE, PLAIN, Side(tp=1))
    assert (half.step(1) - 1e-3) * 0.5e12 == pytest.approx(2 * (6e9 + 1e10 * 0.2))
    one, four = (
        forward_time(MOE, MACHINE, replace(PLAIN, allreduce_latency=0.0), Side(tp=4, dp=dp)) for dp in (1, 4)
    )
    assert one.weight_bytes == four.weight_bytes
    assert one._weights(16) == four._weights(4) == pytest.approx(5e9 * (1 - 0.8**16))
    assert one.token_flops * 16 == four.token_flops * 4


def test_latent_attention_multiplies_more_in_decode_than_in_prefill():
    latent = replace(MODEL, attention="mla", latent_dim=576, rope_dim=64, heads=128, head_dim=128)
    times = forward_time(latent, MACHINE, PLAIN, Side(tp=8))
    assert times.pair_flops == 2 * (128 + 64 + 128) * 10 * 128 / 8
    assert times.decode_pair_flops == 2 * (576 + 512) * 10 * 128 / 8
    plain = forward_time(replace(MODEL, heads=128, head_dim=128, kv_heads=8), MACHINE, PLAIN, Side(tp=8))
    assert plain.pair_flops == plain.decode_pair_flops == times.decode_pair_flops / 4.25


def test_eight_bit_weights_are_multiplied_at_the_peak_of_fp8():
    fast = replace(MACHINE, gpu=replace(MACHINE.gpu, compute_fp8=2e15))
    wide, narrow = (forward_time(replace(MODEL, dtype_bytes=size), fast, PLAIN, Side(tp=1)) for size in (2, 1))
    assert (wide.flops, narrow.flops) == (0.5e15, 1e15)
    assert wide.attention_flops == narrow.attention_flops == 0.5e15
    assert forward_time(replace(MODEL, dtype_bytes=1), MACHINE, PLAIN, Side(tp=1)).flops == 0.5e15


def test_a_latent_cache_is_read_whole_on_every_rank():
    latent = replace(MODEL, attention="mla", latent_dim=500)
    one, four = (forward_time(latent, MACHINE, PLAIN, Side(tp=tp)) for tp in (1, 4))
    assert one.kv_bytes == four.kv_bytes == 10 * 500 * 2


def test_a_decode_step_waits_for_its_longest_sequence():
    times = forward_time(MODEL, MACHINE, replace(PLAIN, sequence_share=0.1), Side(tp=1))
    assert times.sequence == pytest.approx(10 * times.context)
    assert forward_time(MODEL, MACHINE, PLAIN, Side(tp=1)).sequence == 0.0
    for contexts, tokens in (((50,), 500), ((50, 10), 500), ((50,) * 20, 1000)):
        batch = RunningBatch(times, limit=32)
        for number, context in enumerate(contexts):
            batch.join(number, context, 5)
        batch.begin(0.0)
        assert batch.first_step() == pytest.approx(times.step(len(contexts)) + tokens * times.context)


def test_scale_shortens_everything():
    full, tenth = (forward_time(MODEL, MACHINE, replace(PLAIN, scale=scale), Side(tp=2)) for scale in (1.0, 0.1))
    assert tenth.prefill([(5, 50)]) == pytest.approx(full.prefill([(5, 50)]) / 10)
    assert tenth.step(3) == pytest.approx(full.step(3) / 10)
    assert tenth.context == pytest.approx(full.context / 10)


def test_without_gpus_the_hosts_compute_is_assumed():
    hosts = replace(MACHINE, gpus=0, gpu=None, interconnect=Interconnect(kind="none", rate=0.0))
    times = forward_time(MODEL, hosts, PLAIN, Side(tp=2))
    assert times.flops == HOST_FLOPS * 0.5
    assert times.memory_rate == 1e11 * 0.5


def test_a_decode_batch_passes_all_pipeline_stages():
    plain = replace(PLAIN, allreduce_latency=0.0)
    one, two = (forward_time(MODEL, MACHINE, plain, Side(tp=1, pp=pp)) for pp in (1, 2))
    # bound by weights, each stage reads its half for both halves of the batch; bound by arithmetic, both GPUs share
    # it
    assert two.step(2) == pytest.approx(2 * (one.weight_bytes / 2 / 0.5e12 + 1e-3))
    assert two.step(10000) - 2e-3 == pytest.approx((one.step(10000) - 1e-3) / 2)
    assert two.context == pytest.approx(one.context / 2)


def test_products_walk_along_their_inner_width_once_a_turn():
    # 300 rows are three tiles of 128, 1000 columns eight: 24 tiles, on ten multiprocessors three turns.
    work = product(300, 1000, 64, 2, 128, 128, 10)
    assert work == (2.0 * 384 * 1000 * 64, 2 * (300 * 64 + 1000 * 64) + 2 * 300 * 1000, 3, 3 * 64)
    assert product(300, 1000, 64, 2, 0, 0, 10)[0] == 2.0 * 300 * 1000 * 64
    roof = Roof(launch=1e-6, tile=128, columns=128, block=1e-6, walk=1e-9)
    peaks = Peaks(1e15, 1e15, 1e12, processors=132)
    one, two = (roof.seconds(product(1, n, 1000, 2, *roof.cut(), 132), peaks) for n in (132 * 128, 132 * 128 + 1))
    assert one == pytest.approx(1e-6 + 1e-6 + 1e-6)
    assert two == pytest.approx(1e-6 + 2 * (1e-6 + 1e-6))
    # Five experts of 200 rows: two tiles of rows each; 2 x 96 columns are two tiles, 512 are four.
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


def test_decode_attention_splits_below_eight_fifths_tiles_a_multiprocessor():
    assert whole_sequences(32, 8, 132)
    assert not whole_sequences(26, 8, 132)
    assert not whole_sequences(1000, 8, 0)


def test_an_all_reduce_takes_16_bits_on_all_links():
    mesh = replace(MACHINE, interconnect=replace(MACHINE.interconnect, kind="mesh"))
    switch, links = (forward_time(MODEL, machine, PLAIN, Side(tp=8)).token_allreduce for machine in (MACHINE, mesh))
    assert switch == pytest.approx(7 * links)
    assert switch == forward_time(replace(MODEL, dtype_bytes=1), MACHINE, PLAIN, Side(tp=8)).token_allreduce
