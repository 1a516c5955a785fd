"""Prompts are of exact length, the same for one seed, and equal where hash ids are."""

import json

import numpy as np

from backends.live.prompts import encoded, token_ids
from pdsim.serving.workload import Request


def test_equal_hash_ids_are_equal_blocks_and_the_rest_differs():
    one = token_ids(Request(0.0, 1300, 1, None, (4, 9, 11)), 0, 7, 32000)
    two = token_ids(Request(0.0, 1400, 1, None, (4, 9, 12)), 1, 7, 32000)
    assert (len(one), len(two)) == (1300, 1400)
    assert np.array_equal(one[:1024], two[:1024])
    assert not np.array_equal(one[1024:], two[1024:1300])


def test_a_prompt_without_hash_ids_is_its_own():
    request = Request(0.0, 300, 1)
    assert np.array_equal(token_ids(request, 3, 7, 32000), token_ids(request, 3, 7, 32000))
    assert not np.array_equal(token_ids(request, 3, 7, 32000), token_ids(request, 4, 7, 32000))
    assert not np.array_equal(token_ids(request, 3, 7, 32000), token_ids(request, 3, 8, 32000))


def test_a_prompt_longer_than_its_hash_ids_goes_on():
    assert len(token_ids(Request(0.0, 700, 1, None, (1,)), 0, 0, 512)) == 700


def test_ids_stay_away_from_special_tokens():
    ids = token_ids(Request(0.0, 5000, 1), 0, 0, 512)
    assert ids.min() >= 32
    assert ids.max() < 512


def test_a_prompt_is_json_as_ids_or_as_words():
    request = Request(0.0, 5, 1)
    assert json.loads(encoded(request, 0, 0, 512, "ids")) == token_ids(request, 0, 0, 512).tolist()
    assert len(json.loads(encoded(request, 0, 0, 512, "text")).split()) == 5
