"""The numbers of `conf/collective` are what the samples beside them give, without those that are left out."""

from __future__ import annotations

import pytest

from pdsim.config.compose import compose
from tools.collective_fit import fit, host_times, points, seen

EVERY = points()


@pytest.mark.parametrize("kind", ["plain", "symmetric"])
@pytest.mark.parametrize("name", ["nccl", "symm_mem"])
def test_what_conf_has_is_what_its_samples_give(name, kind):
    pytest.importorskip("scipy", reason="fits need scipy")
    library = compose(["experiment=allgather", "hw=4xh200", f"collective={name}"]).collective
    given = getattr(library, kind)
    found = fit(
        [point for point in EVERY if point.kind == kind and (kind == "plain" or point.library == name)], given
    )
    for key in ("latency", "step", "rate", "own_rate"):
        assert getattr(given, key) == pytest.approx(getattr(found, key), rel=0.01), key


def test_what_calls_keep_the_hosts_for_is_the_same_for_all():
    for name in ("nccl", "symm_mem"):
        library = compose(["experiment=allgather", "hw=4xh200", f"collective={name}"]).collective
        assert (library.symmetric.after_pause, library.symmetric.grown) == pytest.approx(host_times(EVERY), rel=0.01)
        assert library.plain.after_pause == library.symmetric.after_pause


def test_every_other_size_is_left_out_and_what_grew_tells_only_what_grown_is():
    fitted = seen(EVERY)
    assert {point.size for point in fitted if point.warm and point.run == "4xh200"} == {4096, 1 << 20, 256 << 20}
    assert not [point for point in fitted if point.grown and point.batch]
    assert len(EVERY) - len(fitted) == 72
