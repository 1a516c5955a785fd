# SPDX-License-Identifier: Apache-2.0
"""A batch that breaks a rule is refused before anything moves."""

import pytest

from pdsim.testing import programs

pytestmark = pytest.mark.core


def test_bad_batches_are_refused_and_nothing_is_written(job):
    """Each batch breaks one rule of `pdsim.transfer.Batch` or of `Endpoint.write`.

    It is refused before it is posted, so the target stays as it was and hears of nothing.
    """
    outcome = job(
        {
            "writer": (programs.write_nonsense, {"to": "target"}),
            "target": (programs.be_spared, {"by": "writer"}),
        }
    )
    found = outcome.ranks["writer"].value
    unknown_local = found.pop("unknown local region")
    assert unknown_local in ("InvalidBatch", "RegistrationError")  # never registered is also not registered any more
    assert found == dict.fromkeys(found, "InvalidBatch")
    assert outcome.ranks["target"].value["wrong"] in (0, None)
    assert outcome.ranks["target"].value["notifications"] == 0
