"""Head scores on trial: an oracle of loops for every analysis, models built by hand, extremes.

The oracle reads the pattern that `run_with_cache` keeps and shares no code with interp.
"""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import error, padding, some_tokens, tiny

from interp.config import ModelConfig
from interp.errors import AnalysisError
from interp.evidence import head_table, select_heads
from interp.inputs import token_inputs
from interp.measure import analyze
from interp.models.layer_attention import LayerAttention
from interp.models.masks import AttentionMask
from interp.models.patterns import Pattern, QueryKeys
from interp.models.transformer import Transformer

# float32 sums over tens of keys.
BOUND = 1e-5
NAMED = {
    "induction": "unrepeated",
    "prefix-matching": "unrepeated",
    "duplicate-token": "unrepeated",
    "retrieval": "unrepeated",
    "previous-token": "uniform",
    "sinks": "uniform",
}
NAMES = (*NAMED, "entropy", "distance", "confidence", "copying")
MIN_KEYS, EPSILON = 2, 0.3

# --- the oracle ---------------------------------------------------------------------------------


class Seen:
    """One head on one sequence: its pattern, and who may attend to whom."""

    def __init__(self, pattern, tokens, real, window=None, *, causal=True):
        self.pattern, self.tokens, self.real = pattern, tokens, real
        n_pos = len(tokens)
        self.queries = [q for q in range(n_pos) if real[q]]
        self.keys = {
            q: [
                k
                for k in self.queries
                if (k <= q or not causal) and (window is None or q - k < window)
            ]
            for q in self.queries
        }
        self.first = self.queries[0] if self.queries else 0
        self.place = {q: place for place, q in enumerate(self.queries)}

    def earlier(self, q, tokens):
        return [k for k in self.queries if k < q and tokens[k] == tokens[q]]

    def uniform(self):
        even = np.zeros_like(self.pattern)
        for q, keys in self.keys.items():
            even[q, keys] = 1 / len(keys)
        other = Seen(even, self.tokens, self.real)
        other.keys = self.keys
        return other


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def oracle_columns(name, seen, repeating, **more):
    """The columns of one head on one sequence, straight from the definitions."""
    p, first = seen.pattern, seen.first
    several = [q for q in seen.queries if len(seen.keys[q]) >= 2]
    if name == "induction":
        targets = {q: seen.earlier(q, repeating) for q in seen.queries}
        targets = {q: max(ks) + 1 for q, ks in targets.items() if ks and max(ks) + 1 != q}
        return {
            "induction": mean(p[q, k] for q, k in targets.items()),
            "sink": mean(p[q, first] for q in targets),
        }
    if name == "prefix-matching":
        targets = {
            q: [k + 1 for k in seen.earlier(q, repeating) if k + 1 < q] for q in seen.queries
        }
        return {"prefix_matching": mean(sum(p[q, ks]) for q, ks in targets.items() if ks)}
    if name == "duplicate-token":
        copies = {q: max(ks) for q in seen.queries if (ks := seen.earlier(q, repeating))}
        return {
            "duplicate_token": mean(p[q, k] for q, k in copies.items()),
            "sink": mean(p[q, first] for q in copies),
        }
    if name == "previous-token":
        return {"previous_token": mean(p[q, q - 1] for q in seen.queries if q - 1 in seen.queries)}
    if name == "retrieval":
        needle, question = more["needle"], more["question"]
        asked = [q for q in seen.queries if question[0] <= q < question[1]]
        keys = [k for k in range(*needle) if seen.real[k]]
        return {"retrieval": mean(sum(p[q, keys]) for q in asked)}
    if name == "entropy":
        nats = {q: -sum(x * math.log(x) for x in p[q] if x > 0) for q in seen.queries}
        return {
            "entropy": mean(nats.values()),
            "relative": mean(nats[q] / math.log(len(seen.keys[q])) for q in several),
        }
    if name == "distance":
        apart = {
            q: sum(p[q, k] * abs(seen.place[q] - seen.place[k]) for k in seen.queries)
            for q in seen.queries
        }
        even = {q: mean(abs(seen.place[q] - seen.place[k]) for k in seen.keys[q]) for q in several}
        return {
            "distance": mean(apart.values()),
            "relative": mean(apart[q] / even[q] for q in several),
        }
    if name == "confidence":
        return {"confidence": mean(max(p[q]) for q in several)}
    if name == "sinks":
        return _sink_columns(seen, more)
    assert name == "copying"
    return _copying_columns(seen, more)


def _sink_columns(seen, more):
    p, first = seen.pattern, seen.first
    enough = [q for q in seen.queries if len(seen.keys[q]) >= MIN_KEYS]
    counted = [q for q in enough if first in seen.keys[q]]
    columns = {
        "sinks": mean(p[q, first] for q in counted),
        "gu_alpha": mean(p[q, first] for q in seen.queries),
    }
    columns["gu_sink"] = float(columns["gu_alpha"] > EPSILON) if seen.queries else math.nan
    got = {k: [p[q, k] for q in enough if k in seen.keys[q]] for k in seen.queries}
    columns["anywhere"] = max((mean(x) for x in got.values() if len(x) >= MIN_KEYS), default=np.nan)
    if "v" in more:
        lengths = np.linalg.norm(more["v"] @ more["W_O"], axis=-1)
        columns["weighted"] = mean(
            p[q, first] * lengths[first] / sum(p[q] * lengths) for q in counted
        )
        written = np.linalg.norm(more["z"] @ more["W_O"], axis=-1)
        columns["output_norm"] = mean(written[q] for q in seen.queries)
    return columns


def _copying_columns(seen, more):
    W_O, W_U, gain = more["W_O"], more["W_U"], more["gain"]

    def ratio(x, attended):
        written = x @ W_O
        if more["centred"]:
            written = written - written.mean()
        logits = W_U @ (gain * written)
        if not np.abs(x).any():
            return None
        raised = np.maximum(logits - logits.mean(), 0)
        total = sum(raised[t] for t in {seen.tokens[k] for k in seen.queries})
        looked_at = sum(share * raised[seen.tokens[k]] for k, share in attended.items())
        return 2 * (looked_at / total if total > 0 else 0.0) - 1

    written = [ratio(more["z"][q], dict(enumerate(seen.pattern[q]))) for q in seen.queries]
    alone = [ratio(more["v"][k], {k: 1.0}) for k in seen.queries]
    return {
        "copying": mean(x for x in written if x is not None),
        "one_key": mean(x for x in alone if x is not None),
    }


def dense(model, tokens, mask):
    """Patterns, values, outputs and output weights of every layer, in float64."""
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    return [
        {
            kind: cache[f"blocks.{layer}.attn.hook_{kind}"].double().numpy()
            for kind in ("pattern", "v", "z")
        }
        | {"W_O": model.blocks[layer].attn.W_O.detach().double().numpy()}
        for layer in range(model.cfg.n_layers)
    ]


def oracle_values(model, name, tokens, mask, repeating=None, *, uniform=False, look=None, **more):
    """Each column as [layer, sequence, head], by the oracle on dense patterns."""
    repeating = tokens if repeating is None else repeating
    real = np.ones(tokens.shape, bool) if mask is None else mask.numpy().astype(bool)
    group = model.cfg.n_heads // model.cfg.n_key_value_heads
    norm = model.ln_final
    more["W_U"] = model.unembed.weight.detach().double().numpy()
    more["gain"] = norm.w.detach().double().numpy() if hasattr(norm, "w") else 1.0
    more["centred"] = model.cfg.normalization_type == "LN"
    found = {}
    for layer, seen_there in enumerate((look or dense)(model, tokens, mask)):
        window = model.config.window(layer)
        for b in range(len(tokens)):
            for h in range(model.cfg.n_heads):
                seen = Seen(seen_there["pattern"][b, h], tokens[b].tolist(), real[b], window)
                own = {
                    "v": seen_there["v"][b, :, h // group],
                    "z": seen_there["z"][b, :, h],
                    "W_O": seen_there["W_O"][h],
                }
                if uniform:
                    seen, own = seen.uniform(), {}
                columns = oracle_columns(name, seen, repeating[b].tolist(), **{**more, **own})
                for column, value in columns.items():
                    grid = found.setdefault(
                        column, np.full((model.cfg.n_layers, len(tokens), model.cfg.n_heads), None)
                    )
                    grid[layer, b, h] = value
    return {column: grid.astype(float) for column, grid in found.items()}


def averaged(values):
    defined = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return (np.where(defined, values, 0).sum(axis=1) / defined.sum(axis=1)).ravel()


def spans(n_pos):
    """Needle and question of given tokens."""
    half = n_pos // 2
    return (half // 2, half + 1), (half + 1, n_pos)


def settings(name, n_pos):
    """Parameters for `analyze`, and the same for the oracle."""
    if name == "retrieval":
        (start, stop), (first, last) = spans(n_pos)
        return (
            {"needle": f"{start}:{stop}", "question": f"{first}:{last}"},
            {"needle": (start, stop), "question": (first, last)},
        )
    return ({"min_keys": MIN_KEYS}, {}) if name == "sinks" else ({}, {})


CASES = [
    # family, padding, lengths of the rows
    ("mha", "none", (13,) * 3),
    ("gqa", "left", (13, 7, 1)),
    ("mqa", "right", (12, 5, 2)),
    ("rotary", "left", (11, 9, 4)),
    ("windowed", "right", (13, 6, 3)),
    ("llama", "none", (16,) * 2),
    ("rotary_linear", "left", (13, 4, 8)),
    ("qk_norm", "right", (9, 9, 3)),
    ("mha", "none", (3,)),
    ("gqa", "none", (2,)),
    ("mqa", "none", (1,)),
    ("gqa", "left", (6, 3, 6, 5) * 5),
]


@pytest.mark.parametrize(("family", "side", "lengths"), CASES)
@pytest.mark.parametrize("name", NAMES)
def test_every_column_is_that_of_a_loop_over_the_dense_pattern(name, family, side, lengths):
    model, n_pos = tiny(family), max(lengths)
    tokens = some_tokens(len(lengths), n_pos, d_vocab=4)
    mask = padding(side, lengths, n_pos)
    if name == "retrieval" and n_pos < 3:
        return
    given, told = settings(name, n_pos)
    expected = oracle_values(model, name, tokens, mask, **told)
    main = name.replace("-", "_")
    if np.isnan(expected[main]).all():
        with pytest.raises(AnalysisError, match="is not measurable on these tokens"):
            analyze(model, name, tokens, attention_mask=mask, **given)
        return
    table = analyze(model, name, tokens, attention_mask=mask, **given).table
    for column, values in expected.items():
        np.testing.assert_allclose(
            table[column].to_numpy(dtype=float),
            averaged(values),
            rtol=BOUND,
            atol=BOUND,
            err_msg=column,
        )
    assert table["n"].tolist() == (~np.isnan(expected[main])).sum(axis=1).ravel().tolist()
    if name == "copying":
        return
    inputs = token_inputs(model, tokens, mask)
    if NAMED.get(name) == "unrepeated":
        (batch,) = inputs.unrepeated
        null = oracle_values(model, name, batch.tokens, mask, batch.original, **told)
    else:
        null = oracle_values(model, name, tokens, mask, uniform=True, **told)
    np.testing.assert_allclose(
        table[f"{main}_null"], averaged(null[main]), rtol=BOUND, atol=BOUND, err_msg="null"
    )


# --- models built by hand -------------------------------------------------------------------------

D_VOCAB, N_CTX, SHARP = 60, 128, 60.0


def blank(n_layers=1, n_heads=1):
    """A model without norms and MLP that does nothing yet; token ids and positions are one-hot.

    The residual stream is [token id, what heads write, position]; heads are as wide as the context.
    """
    config = ModelConfig(
        n_layers=n_layers,
        d_model=2 * D_VOCAB + N_CTX,
        n_ctx=N_CTX,
        d_vocab=D_VOCAB,
        bos_token_id=0,
        attention={"n_heads": n_heads, "d_head": N_CTX, "bias": False, "scale": 1.0},
        normalization_type="none",
    )
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.weight[:, :D_VOCAB] = torch.eye(D_VOCAB)
        model.pos_embed.weight[:, 2 * D_VOCAB :] = torch.eye(N_CTX)
        model.unembed.weight[:, D_VOCAB : 2 * D_VOCAB] = torch.eye(D_VOCAB)
    return model


@torch.no_grad()
def look_back(attn, offset):
    """Let the first head look `offset` tokens back."""
    here = torch.arange(N_CTX)
    attn.q_proj.weight[here, 2 * D_VOCAB + here] = SHARP
    attn.k_proj.weight[here[offset:], 2 * D_VOCAB + here[: N_CTX - offset]] = 1.0


@torch.no_grad()
def copy_ids(attn, head=0, first_id=0):
    """Let a head write the ids it reads, from `first_id` on, and nothing for those before."""
    ids = torch.arange(first_id, D_VOCAB)
    attn.v_proj.weight[head * N_CTX + ids, ids] = 1.0
    attn.o_proj.weight[D_VOCAB + ids, head * N_CTX + ids] = 1.0


def circuit():
    """A previous-token head, and one that looks where it says the current token was before."""
    model, ids = blank(n_layers=2), torch.arange(D_VOCAB)
    first, second = (block.attn for block in model.blocks)
    look_back(first, 1)
    copy_ids(first)
    with torch.no_grad():
        second.q_proj.weight[ids, ids] = SHARP
        second.k_proj.weight[ids, D_VOCAB + ids] = 1.0
    copy_ids(second)
    return model


def parked(place, sharp=SHARP):
    """Four heads that copy all ids but BOS; the first looks at one place only, others evenly."""
    model = blank(n_heads=4)
    attn = model.blocks[0].attn
    with torch.no_grad():
        attn.q_proj.weight[0, :D_VOCAB] = sharp
        attn.k_proj.weight[0, 2 * D_VOCAB + place] = 1.0
    for head in range(4):
        copy_ids(attn, head, first_id=1)
    return model


def test_a_circuit_of_two_heads_has_one_induction_head_and_one_previous_token_head():
    model = circuit()
    expected = {
        "induction": ([0, 1], [False, True]),
        "prefix-matching": ([0, 1], [False, True]),
        "retrieval": ([0, 1], [False, True]),
        "duplicate-token": ([0, 0], [False, False]),
    }
    for name, (scores, chosen) in expected.items():
        table = analyze(model, name, seed=1).table
        assert table[name.replace("-", "_")].tolist() == pytest.approx(scores, abs=BOUND), name
        assert table["selected"].tolist() == chosen, name
    previous = analyze(model, "previous-token").table
    assert previous["previous_token"].tolist()[0] == pytest.approx(1.0, abs=BOUND)
    assert previous["selected"].tolist() == [True, False]
    copying = analyze(model, "copying").table
    assert copying["one_key"].tolist() == pytest.approx([1.0, 1.0], abs=BOUND)


def test_a_fixed_offset_is_an_induction_head_of_no_block_length():
    model = blank()
    look_back(model.blocks[0].attn, 15)
    one = analyze(model, "induction", blocks=[16]).table.iloc[0]
    assert (one["induction"], one["induction_null"], one["selected"]) == (1.0, 1.0, False)
    several = analyze(model, "induction").table.iloc[0]
    assert several["induction"] == pytest.approx(1 / 7, abs=0.02)
    assert several["induction"] - several["induction_null"] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("blocks", [None, [16, 12], [12, 16], [8, 12, 16]])
def test_a_fixed_offset_is_not_selected_where_halves_hold_other_block_lengths(blocks):
    # One sequence of each length: its own length is in one half only.
    model = blank()
    look_back(model.blocks[0].attn, 15)
    assert not analyze(model, "induction", blocks=blocks, batch=1).table["selected"].any()


@pytest.mark.parametrize("sharp", [30.0, 60.0, 200.0, 1e4])
def test_a_sink_on_a_token_that_says_nothing_weighs_nothing_however_sharp(sharp):
    scores = analyze(parked(0, sharp), "sinks")
    first = scores.table.iloc[0]
    assert (first["sinks"], first["dormant"]) == (pytest.approx(1.0, abs=BOUND), 1.0)
    assert first["weighted"] == pytest.approx(0.0, abs=BOUND)
    assert scores.table["selected"].tolist() == [True, False, False, False]
    assert [scores.summary[f"heads_{kind}"] for kind in ("raw", "weighted", "dormant")] == [1, 0, 1]
    assert scores.summary["gu_metric_percent"] == 25.0


def test_a_sink_at_place_three_is_found_there_and_is_none_of_the_first_token():
    scores = analyze(parked(3), "sinks")
    first = scores.table.iloc[0]
    assert first["sinks"] == pytest.approx(0.0, abs=BOUND)
    assert (first["anywhere"], first["position"]) == (pytest.approx(1.0, abs=BOUND), 3)
    assert not scores.table["selected"].any()


@pytest.mark.parametrize("name", NAMED)
def test_even_and_untrained_heads_have_no_name(name):
    attention = [{"n_heads": 32}, {"n_heads": 8, "n_key_value_heads": 2}, {"n_heads": 4}]
    for seed, heads in enumerate(attention):
        config = ModelConfig(
            n_layers=2, d_model=64, n_ctx=140, d_vocab=200, bos_token_id=0, attention=heads
        )
        model = Transformer(config, seed=seed)
        assert analyze(model, name, seed=seed).summary["selected"] == 0
        with torch.no_grad():
            for block in model.blocks:
                block.attn.q_proj.weight.zero_()
        table = analyze(model, name, seed=seed).table
        assert not table["selected"].any()
        if NAMED[name] == "uniform":
            main = name.replace("-", "_")
            np.testing.assert_allclose(table[main], table[f"{main}_null"], atol=BOUND)


# --- extremes -------------------------------------------------------------------------------------


def exact_dense(model, tokens, mask):
    """`dense`, with the pattern that queries and keys make in float64."""
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    found = dense(model, tokens, mask)
    for layer, seen in enumerate(found):
        q, k = (cache[f"blocks.{layer}.attn.hook_{x}"].double().numpy() for x in "qk")
        group, scale = q.shape[2] // k.shape[2], model.config.attention_scale(layer)
        for b, h, i in np.ndindex(*seen["pattern"].shape[:3]):
            scores = np.array([q[b, i, h] @ k[b, j, h // group] * scale for j in range(i + 1)])
            weights = np.exp(scores - scores.max())
            seen["pattern"][b, h, i, : i + 1] = weights / weights.sum()
    return found


@pytest.mark.parametrize("factor", [30.0, 1e3, 1e8])
def test_scores_of_any_size_leave_every_measure_exact(factor):
    model = tiny("gqa", n_layers=1)
    with torch.no_grad():
        model.blocks[0].attn.q_proj.weight.mul_(factor)
    tokens = some_tokens(3, 13, d_vocab=4)
    for name in NAMES:
        given, told = settings(name, 13)
        table = analyze(model, name, tokens, **given).table
        expected = oracle_values(model, name, tokens, None, look=exact_dense, **told)
        for column, values in expected.items():
            found = table[column].to_numpy(dtype=float)
            np.testing.assert_allclose(
                found, averaged(values), rtol=BOUND, atol=BOUND, err_msg=column
            )


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
def test_half_precision_is_measured_in_float32(dtype, bound):
    # The first layer's queries and keys are the same on both paths: only rounding of z differs.
    model, tokens = tiny("gqa", n_layers=1).to(dtype), some_tokens(3, 13, d_vocab=4)
    for name in NAMES:
        given, told = settings(name, 13)
        table = analyze(model, name, tokens, **given).table
        expected = oracle_values(model, name, tokens, None, look=exact_dense, **told)
        for column, values in expected.items():
            written = column in ("output_norm", "copying")
            np.testing.assert_allclose(
                table[column].to_numpy(dtype=float),
                averaged(values),
                rtol=bound if written else BOUND,
                atol=bound if written else BOUND,
                err_msg=column,
            )


@pytest.mark.parametrize("part", ["q_proj", "k_proj"])
@pytest.mark.parametrize("family", ["mha", "gqa", "windowed"])
def test_a_head_whose_attention_is_nan_has_no_number(family, part):
    model, tokens = tiny(family, n_layers=1), some_tokens(3, 12, d_vocab=4)
    with torch.no_grad():
        getattr(model.blocks[0].attn, part).weight[:6] = math.nan
    affected = 1 if part == "q_proj" else model.cfg.n_heads // model.cfg.n_key_value_heads
    for name in NAMES:
        given, _ = settings(name, 12)
        table = analyze(model, name, tokens, **given).table
        assert table[name.replace("-", "_")].isna().tolist() == [
            head < affected for head in range(model.cfg.n_heads)
        ], name
        if name == "sinks":
            columns = ["gu_alpha", "gu_sink", "anywhere", "weighted", "output_norm"]
            assert table[columns][:affected].isna().to_numpy().all()


@pytest.mark.parametrize("where", ["query", "first key", "last key"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_nan_comes_out_of_the_fused_path_where_it_comes_out_of_the_dense_one(where, side):
    model, tokens = tiny("gqa", n_layers=1), some_tokens(2, 9)
    mask = padding(side, (9, 6), 9)
    real = torch.ones(2, 9).bool() if mask is None else mask.bool()
    place = {"query": 5, "first key": int(real[1].int().argmax()), "last key": 7}[where]

    def spoil(value, hook):
        value[1, place] = math.nan
        return value

    hooks = [(f"blocks.0.attn.hook_{'q' if where == 'query' else 'k'}", spoil)]
    found = []

    def keep(value, hook):
        found.append(value.clone())

    def look(value, hook):
        return None

    for extra in ([], [("blocks.0.attn.hook_pattern", look)]):
        model.run_with_hooks(
            tokens,
            fwd_hooks=[*hooks, *extra, ("blocks.0.attn.hook_z", keep)],
            attention_mask=mask,
        )
    fused, densely = (z.isnan() & real[:, :, None, None] for z in found)
    assert densely.any() or not real[1, place]
    assert torch.equal(fused, densely)


def test_edited_patterns_scores_and_values_are_what_is_measured():
    model, tokens = tiny("gqa", n_layers=1), some_tokens(2, 12, d_vocab=4)
    previous = torch.eye(12).roll(1, 0).tril()
    previous[0, 0] = 1.0

    def even_scores(scores, hook):
        return scores.masked_fill(scores > -math.inf, 0.0)

    name = "blocks.0.attn.hook_"
    model.add_hook(name + "pattern", lambda pattern, hook: previous.expand_as(pattern))
    table = analyze(model, "previous-token", tokens).table
    assert table["previous_token"].tolist() == [1.0] * 4
    model.reset_hooks()
    model.add_hook(name + "attn_scores", even_scores)
    table = analyze(model, "entropy", tokens).table
    np.testing.assert_allclose(table["entropy"], np.log(np.arange(1, 13)).mean(), rtol=BOUND)
    model.reset_hooks()
    model.add_hook(name + "z", lambda z, hook: torch.zeros_like(z))
    assert analyze(model, "sinks", tokens).table["output_norm"].tolist() == [0.0] * 4
    model.reset_hooks()

    def silent_first(v, hook):
        v[:, 0] = 0.0
        return v

    model.add_hook(name + "v", silent_first)
    assert analyze(model, "sinks", tokens).table["weighted"].tolist() == [0.0] * 4


def test_gradients_outside_are_neither_used_nor_kept():
    model, tokens = tiny("gqa").train(), some_tokens(2, 12, d_vocab=4)
    plain = [analyze(model, name, tokens, **settings(name, 12)[0]).to_json() for name in NAMES]
    with torch.enable_grad():
        again = [analyze(model, name, tokens, **settings(name, 12)[0]).to_json() for name in NAMES]
    assert plain == again
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_padding_alone_counts_nowhere(name):
    model, tokens = tiny("gqa"), some_tokens(4, 12, d_vocab=4)
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[3] = 0
    given, _ = settings(name, 12)
    with_empty = analyze(model, name, tokens, attention_mask=mask, **given)
    without = analyze(model, name, tokens[:3], **given)
    main = name.replace("-", "_")
    columns = [main, f"{main}_se", "n"]
    pd.testing.assert_frame_equal(with_empty.table[columns], without.table[columns])
    if name == "sinks":
        assert with_empty.summary["gu_metric_percent"] == without.summary["gu_metric_percent"]


# --- which heads are selected ---------------------------------------------------------------------


def noise_selected(n_sequences, effect, *, repeats=40, n_heads=1000):
    """How many heads of noise are selected each time, and their held-out estimates."""
    rng, numbers, estimates = np.random.default_rng(0), [], []
    for _ in range(repeats):
        values, null = rng.beta(1, 19, (2, 1, n_sequences, n_heads))
        table = head_table(values, null, "score")
        select_heads(table, values, null, np.arange(n_sequences), "score", effect)
        numbers.append(int(table["selected"].sum()))
        estimates += table["score_held_out"][table["selected"]].tolist()
    return numbers, estimates


def test_of_a_thousand_heads_of_noise_about_one_is_selected_without_an_effect():
    # Each of 1,000 heads is above the largest of 1,000 nulls as often as any other: one in 1,001.
    numbers, estimates = noise_selected(8, effect=0.0)
    assert np.mean(numbers) == pytest.approx(1.0, abs=0.6)
    # The mean of this noise is 0.05, and its deviation in four sequences 0.024.
    assert np.mean(estimates) == pytest.approx(0.05, abs=3 * 0.024 / len(estimates) ** 0.5)


def test_of_noise_in_as_many_sequences_as_are_drawn_nothing_has_the_effect():
    assert sum(noise_selected(56, effect=0.1)[0]) == 0


# --- statistics against loops ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_received_expected_distance_and_strongest_are_those_of_loops(seed):
    rng = np.random.default_rng(seed)
    batch, n_pos, groups, group = 2, int(rng.integers(1, 12)), int(rng.integers(1, 4)), 2
    n_heads = groups * group
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(batch, n_pos, n_heads, 5, generator=generator)
    k = torch.randn(batch, n_pos, groups, 5, generator=generator)
    k[:, n_pos // 2] = k[:, 0]  # equal weights: the first of equals counts
    lengths = rng.integers(0, n_pos + 1, batch)
    mask = padding(rng.choice(["none", "left", "right"]), lengths.tolist(), n_pos)
    window = None if rng.random() < 0.6 else int(rng.integers(1, n_pos + 2))
    causal = bool(rng.random() < 0.8)
    real = torch.ones(batch, n_pos, dtype=torch.bool) if mask is None else mask.bool()
    rule = AttentionMask(causal, None if mask is None else real, window if causal else None)
    window = rule.window
    weights = torch.rand(batch, n_pos, generator=generator) * (
        torch.rand(batch, n_pos, generator=generator) < 0.7
    )
    values = torch.randn(batch, n_pos, n_heads, 7, generator=generator)

    pattern = np.zeros((batch, n_heads, n_pos, n_pos))
    for b, h, i in np.ndindex(batch, n_heads, n_pos):
        keys = [
            j
            for j in range(n_pos)
            if real[b, j] and (j <= i or not causal) and (window is None or i - j < window)
        ]
        if keys:
            scores = [0.6 * float(q[b, i, h].double() @ k[b, j, h // group].double()) for j in keys]
            parts = np.exp(np.array(scores) - max(scores))
            pattern[b, h, i, keys] = parts / parts.sum()
    place = [[int(real[b, :j].sum()) for j in range(n_pos)] for b in range(batch)]
    for known in (QueryKeys(q, k, 0.6, rule), Pattern(torch.from_numpy(pattern).float())):
        seen = LayerAttention(0, known, real, causal=causal, window=window)
        got = np.einsum("bq,bhqk->bhk", weights.double().numpy(), pattern)
        assert error(seen.received(weights), got) < BOUND
        meant = np.einsum("bhqk,bkhv->bhqv", pattern, values.double().numpy())
        assert error(seen.expected(values), meant) < BOUND
        top, key = seen.strongest
        assert error(top, pattern.max(axis=-1)) < BOUND
        for b, h, i in np.ndindex(batch, n_heads, n_pos):
            if not pattern[b, h, i].any():
                assert key[b, h, i] == -1
                continue
            at = int(key[b, h, i])
            assert pattern[b, h, i, at] == pytest.approx(pattern[b, h, i].max(), abs=BOUND)
            if at == n_pos // 2 and at != 0:
                assert pattern[b, h, i, 0] == 0
            if real[b, i]:
                apart = sum(
                    pattern[b, h, i, j] * abs(place[b][i] - place[b][j]) for j in range(n_pos)
                )
                assert float(seen.distance[b, h, i]) == pytest.approx(apart, abs=n_pos * BOUND)
