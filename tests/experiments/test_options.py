"""Options of experiments that the schema refuses: each names the key, the value and the rule."""

import pytest

from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError


@pytest.mark.parametrize(
    ("experiment", "word", "message"),
    [
        ("capacity", "router=nobodys", "router=nobodys is provided by no installed package"),
        ("compare_engines", "metadata=[mail]", r"metadata\[0\] must be one of policy, batch, write, control, got"),
        ("handoff", "tp=[1-2]", r"tp\[0\]: '1-2' is not a pair of numbers of ranks; write one such as 1to2"),
        ("seed_nixl_staging", "tp=[2to2]", r"tp\[0\]: '2to2' has equal sides; write unlike ones such as 4to1"),
        ("seed_mooncake_tcp", "tp=[1to2]", r"tp\[0\]: '1to2' has sides of different TP; write equal ones"),
        ("transfer", "patterns=[star]", r"patterns\[0\]: 'star' is not a pattern; there are pair, pairs, .*"),
        ("transfer", "patterns=['pair:2']", "'pair:2' has a count that it cannot have; write pair, or pairs:2"),
        ("transfer", "patterns=['cross:2x']", "'cross:2x' has a count that it cannot have; write cross:2 or cross:"),
        ("transfer", "size=[]", "size must be non-empty, got"),
        ("transfer", "schedule=[late]", r"schedule\[0\] must be one of free, .*, got 'late'"),
        ("validate_live", "bounds={ttft: 0.1}", "bounds must be one of ttft_p50, .*, got 'ttft'"),
    ],
)
def test_an_option_out_of_range_is_refused(experiment, word, message):
    with pytest.raises(ConfigError, match=rf"experiment\.(\w+\[0\]: )?{message}"):
        compose([f"experiment={experiment}", f"++experiment.{word}"])
