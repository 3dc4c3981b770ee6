"""Entropy, confidence and distance: hand-made heads, an oracle in float64, properties."""

import numpy as np
import pytest
import torch
from hf_models import bert
from tiny_models import oracle, padding, some_tokens, tiny

import interp
from interp import registry
from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError
from interp.inputs import token_inputs
from interp.measure import analyze, measure
from interp.models.layer_attention import LayerAttention, uniform_attention
from interp.models.patterns import Pattern

# Sums of a few float32 probabilities in another order.
ROUNDING = 1e-6
# Float32 through a whole tiny model, against float64.
MODEL_ROUNDING = 1e-5

NAMES = ("entropy", "confidence", "distance")
N_POS = 20


def columns_of(name, pattern, mask=None, *, causal=True, **settings):
    """The columns of one head's pattern, of one sequence."""
    n_pos = len(pattern)
    tokens = some_tokens(1, n_pos)
    real = torch.ones(1, n_pos, dtype=torch.bool) if mask is None else mask[None]
    attention = LayerAttention(0, Pattern(pattern[None, None].float()), real, causal=causal)
    batch = TokenBatch(tokens, torch.full_like(tokens, -1), None if mask is None else real)
    return registry.get(name).measure(attention, batch, **settings)


def looking(offset, n_pos=N_POS):
    """All weight so many tokens away, and on the token itself where that is outside."""
    pattern = torch.zeros(n_pos, n_pos)
    for query in range(n_pos):
        key = query + offset
        pattern[query, key if 0 <= key < n_pos else query] = 1.0
    return pattern


def even(n_pos=N_POS):
    rows = torch.ones(n_pos, n_pos).tril()
    return rows / rows.sum(-1, keepdim=True)


def table_of(name, *patterns, **settings):
    """What `finish` makes of heads with these patterns, one sequence each for every length."""
    analysis = registry.get(name).with_params(settings)
    columns = {}
    for n_pos in (len(patterns[0]), len(patterns[0]) - 5):
        stacked = torch.stack([pattern[:n_pos, :n_pos] for pattern in patterns])[None]
        tokens = some_tokens(1, n_pos)
        real = torch.ones(1, n_pos, dtype=torch.bool)
        attention = LayerAttention(0, Pattern(stacked), real)
        batch = TokenBatch(tokens, torch.full_like(tokens, -1))
        for column, value in analysis.measure(attention, batch, **analysis.arguments).items():
            columns.setdefault(column, []).append(value.numpy())
    joined = {column: np.concatenate(parts)[None] for column, parts in columns.items()}
    return analysis.finish(registry.Found(joined, analysis.params, str))


# --- known answers --------------------------------------------------------------------------


def test_a_head_that_spreads_its_attention_evenly_scores_what_its_keys_allow():
    q = np.arange(N_POS)
    entropy = columns_of("entropy", even())
    assert entropy["entropy"].item() == pytest.approx(np.log(q + 1).mean(), abs=ROUNDING)
    assert entropy["relative"].item() == pytest.approx(1.0, abs=ROUNDING)
    confidence = columns_of("confidence", even())
    assert confidence["confidence"].item() == pytest.approx((1 / (q[1:] + 1)).mean(), abs=ROUNDING)
    distance = columns_of("distance", even())
    assert distance["distance"].item() == pytest.approx((q / 2).mean(), abs=MODEL_ROUNDING)
    assert distance["relative"].item() == pytest.approx(1.0, abs=ROUNDING)


def test_the_entropy_of_an_even_row_is_the_logarithm_of_its_keys():
    attention = uniform_attention(torch.ones(1, 64, dtype=torch.bool))
    expected = np.log(np.arange(1, 65))
    assert attention.entropy[0, 0].numpy() == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.parametrize(
    ("pattern", "distance", "relative"),
    [
        (looking(0), 0.0, 0.0),
        (looking(-1), 19 / 20, np.mean([1 / (q / 2) for q in range(1, 20)])),
        (looking(-19), 19 / 20, 2 / 19),
        (torch.eye(1, N_POS).expand(N_POS, -1), 19 / 2, 2.0),
    ],
    ids=["itself", "previous", "first_of_last", "first"],
)
def test_heads_of_one_key_have_no_entropy_full_confidence_and_their_distance(
    pattern, distance, relative
):
    assert columns_of("entropy", pattern)["entropy"].item() == 0.0
    assert columns_of("entropy", pattern)["relative"].item() == 0.0
    assert columns_of("confidence", pattern)["confidence"].item() == 1.0
    found = columns_of("distance", pattern)
    assert found["distance"].item() == pytest.approx(distance, abs=ROUNDING)
    assert found["relative"].item() == pytest.approx(relative, abs=ROUNDING)


def test_a_sequence_of_one_token_says_nothing_of_how_attention_is_spread():
    for name in NAMES:
        columns = columns_of(name, torch.ones(1, 1))
        main, beside = columns[name], columns.get("relative", columns[name])
        assert beside.isnan().all()
        assert main.isnan().all() == (name == "confidence")


# --- positional heads -----------------------------------------------------------------------


def test_a_head_is_positional_where_its_largest_weight_is_at_one_offset_nine_times_in_ten():
    mostly = looking(-1)
    for query in (4, 8, 12):  # 3 of 19 and 14 queries look elsewhere
        mostly[query] = torch.eye(N_POS)[query]
    made, figures = table_of("confidence", looking(-1), looking(0), mostly, even(), looking(-3))
    assert made["offset"][0].tolist()[:3] == [-1, 0, -1]
    # 19 and 14 queries have several keys; the last head's first two look at themselves.
    shares = [1.0, 1.0, 27 / 33, 29 / 33]
    assert made["offset_share"][0, [0, 1, 2, 4]].tolist() == pytest.approx(shares, abs=ROUNDING)
    assert made["positional"][0].tolist() == [True, True, False, False, False]
    assert figures == {"positional": 2}


def test_the_share_and_the_farthest_offset_are_parameters():
    patterns = (looking(-3), looking(-1))
    made, _ = table_of("confidence", *patterns, positional_share=0.85)
    assert made["positional"][0].tolist() == [True, True]
    made, figures = table_of("confidence", *patterns, largest_offset=2)
    # Three tokens back is beyond: the two queries that look at themselves are left.
    assert made["offset"][0].tolist() == [0, -1]
    assert made["offset_share"][0].tolist() == pytest.approx([4 / 33, 1.0], abs=ROUNDING)
    assert figures == {"positional": 1}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"positional_share": 0.0}, "positional_share = 0.0 should be above 0, at most 1"),
        ({"positional_share": 1.5}, "positional_share = 1.5 should be above 0, at most 1"),
        ({"largest_offset": 0}, "largest_offset = 0 should be 1 to 1024"),
    ],
)
def test_settings_without_a_meaning_are_refused(given, message):
    with pytest.raises(AnalysisError) as caught:
        analyze(tiny("mha"), "confidence", some_tokens(1, 8), **given)
    assert str(caught.value) == message


def test_an_offset_is_counted_in_real_tokens_and_stays_below_zero_in_a_causal_model():
    mask = torch.tensor([True] * 5 + [False] * 2 + [True] * 5)
    pattern = torch.zeros(12, 12)
    places = [p for p in range(12) if mask[p]]
    for before, query in zip([places[0], *places], places, strict=False):
        pattern[query, before] = 1.0
    counts = columns_of("confidence", pattern, mask)["offset_counts"][0, 0]
    assert counts.sum() == counts[15] == 9
    assert columns_of("distance", pattern, mask)["distance"].item() == pytest.approx(0.9)


def test_an_encoder_looks_ahead_and_its_last_token_is_left_out():
    ahead = looking(1)
    columns = columns_of("confidence", ahead, causal=False)
    counts = columns["offset_counts"][0, 0]
    assert counts[17] == counts.sum() == N_POS - 1
    n = N_POS
    even_rows = torch.full((n, n), 1 / n)
    distance = columns_of("distance", even_rows, causal=False)
    expected = np.abs(np.arange(n)[:, None] - np.arange(n)).mean()
    assert distance["distance"].item() == pytest.approx(expected, abs=MODEL_ROUNDING)
    assert distance["relative"].item() == pytest.approx(1.0, abs=ROUNDING)


# --- an oracle on real models ---------------------------------------------------------------


def oracle_columns(patterns, mask, window, *, causal=True):
    """Every column of each sequence and head by loops over queries."""
    n_sequences, n_heads = patterns.shape[:2]
    names = ("entropy", "distance", "confidence", "relative entropy", "relative distance")
    found = {name: np.full((n_sequences, n_heads), np.nan) for name in names}
    found["counts"] = np.zeros((n_sequences, n_heads, 34), int)
    for b in range(n_sequences):
        real = [p for p in range(len(mask[b])) if mask[b, p]]
        for h in range(n_heads):
            lists = {name: [] for name in names}
            for i, q in enumerate(real):
                seen = [
                    (j, k)
                    for j, k in enumerate(real)
                    if not causal or q - (window or 10**9) < k <= q
                ]
                weights = [patterns[b, h, q, k] for _, k in seen]
                nats = -sum(w * np.log(w) for w in weights if w > 0)
                away = sum(w * abs(i - j) for w, (j, _) in zip(weights, seen, strict=True))
                lists["entropy"].append(nats)
                lists["distance"].append(away)
                if len(seen) < 2:
                    continue
                lists["relative entropy"].append(nats / np.log(len(seen)))
                lists["relative distance"].append(away / np.mean([abs(i - j) for j, _ in seen]))
                if not causal and i == len(real) - 1:
                    continue
                lists["confidence"].append(max(weights))
                offset = seen[int(np.argmax(weights))][0] - i
                found["counts"][b, h, offset + 16 if abs(offset) <= 16 else 33] += 1
            for name, values in lists.items():
                if values:
                    found[name][b, h] = np.mean(values)
    return found


def differing(found, expected, layer):
    """The columns of a layer that are not those of the oracle."""
    main = {name: found[name][name][layer] for name in NAMES}
    main["relative entropy"] = found["entropy"]["relative"][layer]
    main["relative distance"] = found["distance"]["relative"][layer]
    main["counts"] = found["confidence"]["offset_counts"][layer]
    return [
        name
        for name, values in main.items()
        if values != pytest.approx(expected[name], abs=MODEL_ROUNDING, nan_ok=True)
    ]


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "wide_heads", "llama", "windowed"])
def test_every_column_equals_a_loop_in_float64(family, side):
    model = tiny(family, n_ctx=24)
    tokens = some_tokens(3, 24, d_vocab=7)
    mask = padding(side, [24, 11, 1], 24)
    real = np.ones((3, 24), bool) if mask is None else mask.numpy().astype(bool)
    analyses = [registry.get(name) for name in NAMES]
    found = measure(model, analyses, token_inputs(model, tokens, mask).batches)
    seen = oracle(model, tokens, mask)
    window = 3 if family == "windowed" else None
    for layer in range(2):
        patterns = seen[f"blocks.{layer}.attn.hook_pattern"]
        assert differing(found, oracle_columns(patterns, real, window), layer) == []


def test_every_column_of_an_encoder_equals_a_loop_over_its_patterns():
    model = interp.load_model(bert(), backend="bridge")
    tokens = some_tokens(2, 20, d_vocab=90)
    analyses = [registry.get(name) for name in NAMES]
    found = measure(model, analyses, token_inputs(model, tokens).batches)
    _, cache = model.run_with_cache(tokens)
    for layer in range(2):
        patterns = cache[f"blocks.{layer}.attn.hook_pattern"].double().numpy()
        wanted = oracle_columns(patterns, np.ones((2, 20), bool), None, causal=False)
        assert differing(found, wanted, layer) == []


# --- properties -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_null_is_an_even_head_and_relative_figures_stay_in_their_range(name):
    model = tiny("rotary", n_ctx=40)
    tokens = some_tokens(3, 40)
    scores = analyze(model, name, tokens)
    q = np.arange(40)
    null = {
        "entropy": np.log(q + 1).mean(),
        "confidence": (1 / (q[1:] + 1)).mean(),
        "distance": (q / 2).mean(),
    }[name]
    assert scores.table[f"{name}_null"].to_numpy() == pytest.approx(null, abs=MODEL_ROUNDING)
    if name == "entropy":
        assert (scores.table["entropy"] < null).all()
    if name == "confidence":
        assert (scores.table["confidence"] > null).all()
        assert scores.table["offset"].between(-16, 0).all()
    if "relative" in scores.table:
        highest = {"entropy": 1.0, "distance": 2.0}[name]
        assert scores.table["relative"].between(0.0, highest + ROUNDING).all()


def test_heads_stay_apart():
    table = analyze(tiny("mha"), "entropy", some_tokens(4, 16)).table
    assert table.groupby("layer")["entropy"].std().min() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_scoring_twice_gives_the_same_and_leaves_the_pattern_alone(name):
    pattern = torch.rand(12, 12).tril()
    pattern /= pattern.sum(-1, keepdim=True)
    before = pattern.clone()
    once, twice = columns_of(name, pattern), columns_of(name, pattern)
    assert torch.equal(pattern, before)
    assert all(torch.equal(once[column], twice[column]) for column in once)
