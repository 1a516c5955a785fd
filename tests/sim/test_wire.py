"""What a wire of an engine is made of."""

from tests.sim.test_engine import Bench


def test_what_connects_while_its_link_is_cut_is_as_fast_as_others_afterwards():
    bench = Bench(overlap=True, pipelined=True)
    link = bench.out.links[0]
    bench.network.set_capacity(link, 0.0)
    lane = bench.new_lane("a>c")
    bench.network.set_capacity(link, 100.0)
    bench.post("posting", nbytes=50, lane=lane)
    assert bench.run() == [(2.625, "posting")]
