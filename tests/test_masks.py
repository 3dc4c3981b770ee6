"""The rule of who may attend to whom, as tensors of any part of it."""

import numpy as np
import pytest
import torch
from attention_cases import KINDS, LargestTensor, case, some_keys

from interp.models.masks import AttentionMask

CPU = torch.device("cpu")


def test_a_window_counts_the_query_itself():
    allowed = AttentionMask(window=2).allowed(4, 4, CPU)[0, 0]
    wanted = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert allowed.int().tolist() == wanted


def test_fewer_queries_than_keys_are_the_latest():
    allowed = AttentionMask().allowed(2, 4, CPU)[0, 0]
    assert allowed.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_a_bidirectional_window_hides_only_what_lies_behind():
    allowed = AttentionMask(causal=False, window=1).allowed(3, 3, CPU)[0, 0]
    assert allowed.int().tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]


def test_a_window_as_long_as_the_sequence_hides_nothing():
    mask = AttentionMask(window=5)
    assert [mask.windowed(n) for n in (4, 5, 6)] == [False, False, True]
    assert not AttentionMask().windowed(10)
    assert torch.equal(mask.allowed(5, 5, CPU), AttentionMask().allowed(5, 5, CPU))


@pytest.mark.parametrize("kind", KINDS)
def test_allowed_is_the_rule_one_query_and_key_at_a_time(kind):
    given = case(kind)
    n_query, n_key = given.q.shape[1], given.k.shape[1]
    allowed = given.mask.allowed(n_query, n_key, CPU)
    assert np.array_equal(np.broadcast_to(allowed, given.allowed().shape), given.allowed())
    for rows in (slice(0, 1), slice(1, n_query), slice(n_query - 1, n_query)):
        part = given.mask.allowed(n_query, n_key, CPU, rows)
        assert torch.equal(part, allowed[:, :, rows]), rows


@pytest.mark.parametrize("kind", KINDS)
def test_allows_is_the_rule_for_one_key_of_each_query(kind):
    given = case(kind)
    n_key = given.k.shape[1]
    wanted = given.allowed()
    for keys in (some_keys(given), torch.zeros_like(some_keys(given))):
        found = given.mask.allows(keys, n_key).expand(wanted.shape[:3])
        for b, h, i in np.ndindex(wanted.shape[:3]):
            j = int(keys[b, i])
            assert bool(found[b, h, i]) == (j >= 0 and wanted[b, h, i, j]), (b, h, i, j)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "custom" not in kind])
def test_n_allowed_counts_the_rows_of_the_rule(kind):
    given = case(kind)
    counts = given.mask.n_allowed(given.q.shape[1], given.k.shape[1], CPU)
    wanted = given.allowed()[:, 0].sum(axis=2)
    assert np.array_equal(np.broadcast_to(counts, wanted.shape), wanted)


def test_counting_and_looking_up_need_no_square():
    n_pos = 2048
    for kind in ("causal", "right-padded", "window"):
        given = case(kind, n_pos=n_pos, batch=2)
        with LargestTensor() as largest:
            given.mask.n_allowed(n_pos, n_pos, CPU)
            given.mask.allows(some_keys(given), n_pos)
        assert largest.numbers <= 4 * n_pos, kind
