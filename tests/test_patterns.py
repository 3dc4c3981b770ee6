"""`Patterns`: what its file holds, how it is rounded, and what is refused."""

import base64
import json
import zlib
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs

from interp.errors import AnalysisError
from interp.patterns import FINE_CELLS, Patterns, _packed
from interp.tables import HeadScores

NASTY = ("<b>", '"', "</script>", "\n", " ", "é", "12", "1.10")


def made(pattern, tokens=None, heads=((0, 1),)):
    """A result of equal patterns, of a model with one layer of two heads."""
    n = len(pattern)
    return Patterns(
        table=pd.DataFrame({"layer": [0, 0], "head": [0, 1], "from_uniform": [0.25, 0.5]}),
        score="from_uniform",
        unit="",
        analysis="attention",
        model="m",
        params={"causal": True, "left_out": ["0.0"]},
        inputs="a text",
        seed=0,
        summary={},
        versions={},
        tokens=tuple(tokens or map(str, range(n))),
        weights={head: np.asarray(pattern, dtype=np.float32) for head in heads},
    )


def triangle(n, seed=0):
    rng = np.random.default_rng(seed)
    raw = np.tril(rng.random((n, n)) ** 4 + 1e-3)
    return raw / raw.sum(axis=1, keepdims=True)


def test_a_small_file_holds_16_bits_row_by_row():
    pattern = [[1.0, 0.0], [0.25, 0.75]]
    patterns = made(pattern)
    (code,) = patterns.coded
    assert patterns.bits == 16
    assert np.frombuffer(zlib.decompress(base64.b64decode(code)), "<u2").tolist() == [
        65535,
        0,
        16384,
        49151,
    ]


def test_a_large_file_holds_8_bits_finer_where_weights_are_small(monkeypatch):
    monkeypatch.setattr("interp.patterns.FINE_CELLS", 2)
    patterns = made([[1.0, 0.0], [0.04, 0.96]])
    (code,) = patterns.coded
    assert patterns.bits == 8
    codes = np.frombuffer(zlib.decompress(base64.b64decode(code)), np.uint8)
    assert codes.tolist() == [255, 0, 51, 250]  # 255 * sqrt(0.96) = 249.8


def test_a_very_large_file_holds_6_bits(monkeypatch):
    monkeypatch.setattr("interp.patterns.FINE_CELLS", 2)
    monkeypatch.setattr("interp.patterns.COARSE_CELLS", 2)
    patterns = made([[1.0, 0.0], [0.04, 0.96]])
    (code,) = patterns.coded
    assert patterns.bits == 6
    codes = np.frombuffer(zlib.decompress(base64.b64decode(code)), np.uint8)
    assert codes.tolist() == [63, 0, 13, 62]  # 63 * sqrt(0.96) = 61.7


def test_the_limits_count_the_weights_that_queries_see():
    side, both = 1024, ((0, 0), (0, 1))
    assert side * side == FINE_CELLS
    causal = made(np.eye(side))
    assert causal.bits == 16
    assert made(np.eye(side), heads=both).bits == 8
    encoder = replace(causal, params={"causal": False})
    assert encoder.bits == 16
    assert replace(encoder, weights={head: np.eye(side) for head in both}).bits == 8


@pytest.mark.parametrize(("causal", "bits"), [(True, 8), (False, 6)])
def test_144_heads_on_512_tokens_stay_below_25_mb_even_where_attention_is_noise(causal, bits):
    """Squared normal numbers are the noise that takes most room at a given mean."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((512, 512)) ** 2
    noise = np.tril(noise) if causal else noise
    one = (noise / noise.sum(axis=1, keepdims=True)).astype(np.float32)
    heads = [(layer, head) for layer in range(12) for head in range(12)]
    patterns = replace(made(one), params={"causal": causal}, weights=dict.fromkeys(heads, one))
    assert patterns.bits == bits
    code = _packed(one, bits)
    page = 144 * len(code) + len(get_plotlyjs().encode())
    assert page < 25e6


@pytest.mark.parametrize(("limit", "error"), [(FINE_CELLS, 0.5 / 65535 + 1e-7), (1, 0.00393)])
def test_what_is_loaded_is_what_was_saved_to_its_rounding(tmp_path, monkeypatch, limit, error):
    monkeypatch.setattr("interp.patterns.FINE_CELLS", limit)
    patterns = made(triangle(8), NASTY)
    assert [path.name for path in patterns.save(tmp_path)] == ["attention.csv", "attention.json"]
    loaded = Patterns.load(tmp_path / "attention.json")
    assert loaded.tokens == NASTY
    assert loaded.drawn == [(0, 1)]
    assert np.abs(loaded.pattern(0, 1) - triangle(8)).max() < error
    assert loaded.coded == patterns.coded
    assert loaded.to_json() == patterns.to_json()
    assert loaded.table.equals(patterns.table)


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=4, max_size=4), st.booleans())
def test_rounding_twice_is_rounding_once(weights, fine):
    pattern = np.reshape(weights, (2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("interp.patterns.FINE_CELLS", 4 if fine else 2)
        once = made(pattern).to_json()
        assert Patterns._given(json.loads(once))["weights"][0, 1].shape == (2, 2)
        again = made(Patterns._given(json.loads(once))["weights"][0, 1]).to_json()
    assert json.loads(once)["patterns"] == json.loads(again)["patterns"]


def test_a_pattern_that_does_not_fit_its_tokens_names_both_numbers():
    with pytest.raises(AnalysisError, match="L0H1: a pattern of 12 x 12 for 10 tokens"):
        made(np.eye(12), list("abcdefghij"))


def test_heads_that_were_left_out_are_refused_by_name():
    with pytest.raises(AnalysisError, match=r"no pattern of head 0\.0; there are 1: 0\.1"):
        made(np.eye(2)).pattern(0, 0)


@pytest.mark.parametrize(
    "damage",
    [
        {"bits": 7},
        {"data": ["AAAA"]},
        {"data": ["not base64!"]},
        {"data": []},
        {"heads": ["0.*"]},
        {"heads": ["x"]},
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, damage):
    path = made(np.eye(2)).save(tmp_path)[1]
    record = json.loads(path.read_text())
    record["patterns"] |= damage
    path.write_text(json.dumps(record))
    with pytest.raises(AnalysisError, match=r"attention\.json: not a file of attention patterns"):
        Patterns.load(path)


def test_a_file_of_scores_is_no_file_of_patterns(tmp_path):
    scores = HeadScores(
        pd.DataFrame({"layer": [0], "head": [0], "sinks": [0.5]}),
        *("sinks", "", "sinks", "m", {}, "", 0, {}, {}),
    )
    path = scores.save(tmp_path)[1]
    with pytest.raises(AnalysisError, match="not a file of attention patterns"):
        Patterns.load(path)
