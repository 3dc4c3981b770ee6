"""Head scores: hand-made patterns with known answers, an oracle in numpy, and what is refused."""

import ast
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from tiny_models import padding, perturbed, some_tokens, tiny, tiny_config

import interp
from interp import measure as measure_module
from interp import registry
from interp.data.repeated import TokenBatch, induction_targets, repeated_tokens
from interp.errors import AnalysisError, ModelError, ShapeError
from interp.evidence import sequence_statistics
from interp.inputs import random_inputs, token_inputs
from interp.measure import analyze, score_heads
from interp.models.layer_attention import LayerAttention, uniform_attention
from interp.models.patterns import Pattern
from interp.models.watch import watch_attention
from interp.text_inputs import text_inputs

# Sums of a few float32 probabilities in another order.
ROUNDING = 1e-6
NAMES = ("induction", "previous-token", "sinks")

# --- hand-made patterns ---------------------------------------------------------------------


def one_key(keys):
    """A pattern in which query q puts everything on keys[q]."""
    n = len(keys)
    return torch.nn.functional.one_hot(torch.tensor(keys), n).float()


def hand_made(kind, n, lead, *, first_copy=0):
    """The pattern of one head on `[BOS] r_1..r_n r_1..r_n`, `lead` tokens of BOS."""
    n_pos = 2 * n + lead
    second = range(n + lead, n_pos)
    q = range(n_pos)
    if kind == "induction":
        return one_key([p - n + 1 if p in second else min(first_copy, p) for p in q])
    if kind == "previous-token":
        return one_key([max(p - 1, 0) for p in q])
    if kind == "self":
        return one_key(list(q))
    if kind == "first-token sink":
        return one_key([0] * n_pos)
    if kind == "duplicate-token":
        return one_key([p - n if p in second else 0 for p in q])
    if kind == "offset-5":
        return one_key([max(p - 5, 0) for p in q])
    if kind == "uniform":
        rows = torch.ones(n_pos, n_pos).tril()
        return rows / rows.sum(-1, keepdim=True)
    raise AssertionError(kind)


KINDS = (
    "induction",
    "previous-token",
    "self",
    "first-token sink",
    "duplicate-token",
    "offset-5",
    "uniform",
)


def scores_of(name, pattern, batch):
    """The score of each head of `[head, query, key]` patterns, the same for every sequence."""
    n_sequences = len(batch.tokens)
    real = torch.ones_like(batch.tokens, dtype=torch.bool)
    attention = LayerAttention(0, Pattern(pattern.expand(n_sequences, -1, -1, -1)), real)
    measured = registry.get(name).measure(attention, batch)
    assert next(iter(measured)) == registry.get(name).score
    values = measured[registry.get(name).score]
    assert values.shape == (n_sequences, len(pattern))
    assert torch.equal(values[0], values[-1])
    return dict(zip(KINDS, values[0].tolist(), strict=False))


@pytest.mark.parametrize("lead", [0, 1], ids=["no_bos", "bos"])
def test_each_pattern_scores_what_it_was_made_for_and_nothing_else(lead):
    n = 8
    n_pos = 2 * n + lead
    batch = repeated_tokens(2, n, 40, seed=0, bos=0 if lead else None)
    patterns = torch.stack([hand_made(kind, n, lead) for kind in KINDS])
    assert torch.equal(patterns, patterns.tril())
    # Query p sees p + 1 keys.
    spread = {p: 1 / (p + 1) for p in range(n_pos)}
    expected = {
        "induction": {
            "induction": 1.0,
            "uniform": np.mean([spread[p] for p in range(n + lead, n_pos)]),
        },
        "previous-token": {
            "previous-token": 1.0,
            # Query 1 of these has key 0 before it, and nothing else to look at.
            "induction": 1 / (n_pos - 1),
            "first-token sink": 1 / (n_pos - 1),
            "duplicate-token": 1 / (n_pos - 1),
            "offset-5": 1 / (n_pos - 1),
            "uniform": np.mean([spread[p] for p in range(1, n_pos)]),
        },
        "sinks": {
            "first-token sink": 1.0,
            # Queries 7 and on have 8 keys; those of the first copy look at key 0.
            "induction": (n + lead - 7) / (n_pos - 7),
            "duplicate-token": (n + lead - 7 + (not lead)) / (n_pos - 7),
            "uniform": np.mean([spread[p] for p in range(7, n_pos)]),
        },
    }
    for name in NAMES:
        found = scores_of(name, patterns, batch)
        for kind in KINDS:
            assert found[kind] == pytest.approx(expected[name].get(kind, 0.0), abs=ROUNDING), (
                name,
                kind,
            )


def test_a_score_does_not_depend_on_what_first_copy_queries_do():
    """Perfect induction at n = 4 with BOS is 1, not 4/9 of all rows."""
    batch = repeated_tokens(2, 4, 40, seed=0, bos=0)
    patterns = torch.stack([hand_made("induction", 4, 1, first_copy=key) for key in (0, 1, 3)])
    real = torch.ones_like(batch.tokens, dtype=torch.bool)
    attention = LayerAttention(0, Pattern(patterns.expand(2, -1, -1, -1)), real)
    found = registry.get("induction").measure(attention, batch)["induction"]
    assert torch.equal(found, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("n_pos", "with_row_0", "without_row_0"),
    [(4, None, 0.361), (8, 0.340, 0.245), (16, 0.211, None), (64, 0.074, None), (512, 0.013, None)],
)
def test_a_uniform_head_is_no_sink_at_any_length(n_pos, with_row_0, without_row_0):
    """Mass on key 0 of a uniform causal head: large on short inputs, unless short rows are out."""
    rows = 1 / np.arange(1, n_pos + 1)
    if with_row_0:
        assert rows.mean() == pytest.approx(with_row_0, abs=5e-4)
    if without_row_0:
        assert rows[1:].mean() == pytest.approx(without_row_0, abs=5e-4)
    tokens = some_tokens(2, n_pos)
    batch = TokenBatch(tokens, torch.full_like(tokens, -1))
    attention = uniform_attention(torch.ones_like(tokens, dtype=torch.bool))
    found = registry.get("sinks").measure(attention, batch)["sinks"]
    if n_pos < 8:
        assert found.isnan().all()
    else:
        assert found.max() <= 1 / 8
        assert found[0, 0].item() == pytest.approx(rows[7:].mean(), abs=ROUNDING)


@pytest.mark.parametrize("n_pos", [8, 9, 64])
def test_a_first_token_sink_is_one_at_every_length(n_pos):
    tokens = some_tokens(1, n_pos)
    batch = TokenBatch(tokens, torch.full_like(tokens, -1))
    found = scores_of("sinks", one_key([0] * n_pos)[None], batch)
    assert list(found.values()) == [1.0]


def test_the_first_real_token_is_the_sink_where_padding_is_on_the_left():
    tokens = some_tokens(2, 14)
    mask = padding("left", (10, 6), 14).bool()
    pattern = torch.stack([one_key([4] * 14), one_key([8] * 14)])[:, None]
    attention = LayerAttention(0, Pattern(pattern), mask)
    batch = TokenBatch(tokens, torch.full_like(tokens, -1), mask)
    found = registry.get("sinks").measure(attention, batch)["sinks"]
    # The second sequence has six tokens, so no query has eight keys.
    assert found[0].item() == 1.0
    assert found[1].isnan()


def test_probability_is_read_at_one_key_a_query_and_is_zero_without_one():
    pattern = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4)
    attention = LayerAttention(0, Pattern(pattern), torch.ones(2, 4, dtype=torch.bool))
    keys = torch.tensor([[0, -1, 2, 3], [-1, -1, 0, 1]])
    found = attention.prob_at(keys)
    for b, h, q in np.ndindex(2, 3, 4):
        key = keys[b, q]
        assert found[b, h, q] == (0 if key < 0 else pattern[b, h, q, key])


# --- an oracle on real models ---------------------------------------------------------------


def oracle_scores(name, patterns, tokens, mask):
    """Scores `[sequence, head]` of one layer by loops over queries, from what was published."""
    n_sequences, n_heads, n_pos, _ = patterns.shape
    found = np.full((n_sequences, n_heads), np.nan)
    for b in range(n_sequences):
        real = [p for p in range(n_pos) if mask[b, p]]
        mass = []
        for place, q in enumerate(real):
            if name == "sinks" and place >= 7:
                mass.append(patterns[b, :, q, real[0]])
            if name == "previous-token" and place >= 1:
                mass.append(patterns[b, :, q, real[place - 1]])
            if name == "induction":
                copies = [k for k in real[:place] if tokens[b, k] == tokens[b, q]]
                if copies and copies[-1] + 1 < q:
                    mass.append(patterns[b, :, q, copies[-1] + 1])
        if mass:
            found[b] = np.mean(mass, axis=0)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["mha", "gqa", "shortformer", "llama"])
def test_scores_equal_a_loop_over_cached_patterns(family, side, name):
    model = tiny(family)
    # 20 sequences are more than one forward pass holds.
    tokens = some_tokens(20, 15, d_vocab=7)
    mask = padding(side, [15, 9, 12, 3] * 5, 15)
    scores = analyze(model, name, tokens, attention_mask=mask)
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    real = np.ones((20, 15), bool) if mask is None else mask.numpy().astype(bool)
    column = name.replace("-", "_")
    for layer in range(2):
        patterns = cache[f"blocks.{layer}.attn.hook_pattern"].numpy()
        expected = oracle_scores(name, patterns, tokens.numpy(), real)
        n = (~np.isnan(expected)).sum(axis=0)
        rows = scores.table[scores.table["layer"] == layer]
        assert rows["head"].tolist() == [0, 1, 2, 3]
        assert rows["n"].tolist() == n.tolist()
        assert rows[column].to_numpy() == pytest.approx(np.nanmean(expected, axis=0), abs=ROUNDING)
        spread = np.nanstd(expected, axis=0, ddof=1) / np.sqrt(n)
        assert rows[f"{column}_se"].to_numpy() == pytest.approx(spread, abs=ROUNDING)
    if side != "none" and name == "sinks":
        assert scores.table["n"].tolist() == [15] * 8  # rows of three tokens do not count
    assert np.isfinite(scores.table.to_numpy(dtype=float)).all()


@pytest.mark.parametrize("name", NAMES)
def test_what_padding_holds_and_on_which_side_changes_no_score(name):
    model = tiny("rotary")
    tokens = some_tokens(3, 12, d_vocab=5)
    lengths = (12, 9, 10)
    tables = []
    for side in ("left", "right"):
        for filler in (0, 1):
            padded = torch.full((3, 16), filler)
            for row, length in enumerate(lengths):
                start = 16 - length if side == "left" else 0
                padded[row, start : start + length] = tokens[row, :length]
            mask = padding(side, lengths, 16)
            tables.append(analyze(model, name, padded, attention_mask=mask).table)
    column = name.replace("-", "_")
    for table in tables[1:]:
        assert table[column].to_numpy() == pytest.approx(tables[0][column].to_numpy(), abs=1e-5)
        assert table["n"].tolist() == [3] * 8


def test_a_sequence_without_the_measure_is_left_out_and_one_alone_has_no_standard_error():
    model = tiny("mha")
    repeats, none = [1, 2, 3, 1, 2, 3], [1, 2, 3, 4, 5, 6]
    both = analyze(model, "induction", [repeats, none]).table
    alone = analyze(model, "induction", [repeats]).table
    assert both["n"].tolist() == [1] * 8
    assert both["induction_se"].isna().all()
    assert both["induction"].to_numpy() == pytest.approx(alone["induction"].to_numpy(), abs=1e-6)


def test_mean_standard_error_and_n_over_defined_sequences_only():
    nan = math.nan
    values = np.array([[[1.0, nan, 5.0], [2.0, nan, nan], [6.0, 3.0, 7.0]]])
    mean, standard_error, n = sequence_statistics(values)
    assert mean[0].tolist() == [3.0, 3.0, 6.0]
    assert n[0].tolist() == [3, 1, 2]
    # Deviations -2, -1, 3: variance 7, over 3 sequences.
    assert standard_error[0, 0] == pytest.approx(math.sqrt(7 / 3), rel=1e-12)
    assert math.isnan(standard_error[0, 1])
    assert standard_error[0, 2] == pytest.approx(1.0, rel=1e-12)


# --- nulls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_pos", [8, 16, 64])
def test_the_null_of_attention_alone_is_a_uniform_head(n_pos):
    model = tiny("mha", n_ctx=64)
    tokens = some_tokens(2, n_pos)
    rows = 1 / np.arange(1, n_pos + 1)
    sinks = analyze(model, "sinks", tokens)
    previous = analyze(model, "previous-token", tokens)
    assert sinks.table["sinks_null"].to_numpy() == pytest.approx(rows[7:].mean(), abs=ROUNDING)
    assert previous.table["previous_token_null"].to_numpy() == pytest.approx(
        rows[1:].mean(), abs=ROUNDING
    )
    assert sinks.params["null"] == previous.params["null"] == "uniform"
    assert sinks.summary["largest_null"] == pytest.approx(rows[7:].mean(), abs=ROUNDING)


class HandMade:
    """A model whose patterns are made by hand from the tokens: one layer, no arithmetic."""

    # What no analysis asks for.
    vocabulary = source = run_with_cache = None
    hook_dict: ClassVar = {}
    blocks = (SimpleNamespace(attn=SimpleNamespace(window=None)),) * 4

    def to_tokens(self, text):
        raise AssertionError

    def __init__(self, *heads, n_ctx=128, d_vocab=500, bos=0, device="cpu"):
        self.heads = heads
        self.seen = []
        self.cfg = SimpleNamespace(
            n_layers=1,
            n_heads=len(heads),
            pruned_heads={},
            heads=lambda layer: tuple(range(len(heads))),
            n_ctx=n_ctx,
            d_vocab=d_vocab,
            bos_token_id=bos,
            attention_dir="causal",
            device=device,
            model_name="by hand",
        )

    def modules(self):
        return iter(())

    def run_with_hooks(self, tokens, *, fwd_hooks, return_type, attention_mask=None):
        self.seen.append(tokens)
        pattern = torch.stack([torch.stack([head(row) for head in self.heads]) for row in tokens])
        for name, hook in fwd_hooks:
            assert name == "blocks.0.attn.hook_pattern"
            hook(pattern, hook=SimpleNamespace(name=name))


def offset_head(offset):
    """Always `offset` tokens back, whatever the tokens are."""
    return lambda row: one_key([max(p - offset, 0) for p in range(len(row))])


def content_head(row):
    """True induction: to the token after the latest copy, else to the first token."""
    return one_key([max(key, 0) for key in induction_targets(row[None])[0].tolist()])


def test_a_fixed_offset_scores_on_one_block_length_and_its_null_says_so():
    model = HandMade(offset_head(7), content_head)
    table = analyze(model, "induction", blocks=[8]).table
    assert table["induction"].tolist() == [1.0, 1.0]
    assert table["induction_null"].tolist() == [1.0, 0.0]


def test_over_several_block_lengths_a_fixed_offset_scores_only_its_share():
    model = HandMade(offset_head(7), content_head)
    scores = analyze(model, "induction")
    assert scores.params["blocks"] == [8, 12, 16, 20, 25, 32, 50]
    assert scores.table["induction"].tolist() == pytest.approx([1 / 7, 1.0], abs=ROUNDING)
    assert (scores.table["induction"] - scores.table["induction_null"]).tolist() == pytest.approx(
        [0.0, 1.0], abs=ROUNDING
    )
    assert scores.table["n"].tolist() == [56, 56]
    assert scores.summary["best_head"] == "0.1"
    assert scores.summary["best"] == 1.0


def test_heads_without_content_are_never_the_best_induction_head():
    heads = [offset_head(0), offset_head(1), offset_head(5), offset_head(10**6), content_head]
    table = analyze(HandMade(*heads), "induction").table
    assert table["induction"].tolist() == pytest.approx([0, 0, 0, 0, 1], abs=ROUNDING)


def test_the_null_of_given_tokens_keeps_their_places_but_not_their_repeats():
    model = HandMade(content_head, offset_head(3), bos=None)
    table = analyze(model, "induction", [[5, 6, 7, 8, 5, 6, 7, 8]]).table
    assert table["induction"].tolist() == [1.0, 1.0]
    assert table["induction_null"].tolist() == [0.0, 1.0]
    given, null = model.seen
    assert len(set(null[0].tolist())) == null.numel() == given.numel()


def test_an_analysis_gets_its_batch_where_the_attention_is(monkeypatch):
    # The meta device stands for an accelerator: it shares no storage with the CPU.
    places = []

    def record(attention, batch):
        places.extend((batch.tokens.device.type, batch.targets.device.type))
        return {"recorded": torch.zeros(len(batch.tokens), 1)}

    analysis = registry.Analysis("recorded", "1", "uniform", record)
    tokens = some_tokens(2, 4)
    model = HandMade(lambda row: torch.zeros(4, 4), device="meta")
    model.run_with_hooks = lambda tokens, *, fwd_hooks, **_: fwd_hooks[0][1](
        torch.zeros(2, 1, 4, 4), hook=None
    )
    measure_module.measure(model, [analysis], [TokenBatch(tokens, torch.full_like(tokens, -1))])
    assert places == ["meta", "meta"]


# --- the sequences an analysis makes --------------------------------------------------------


def test_default_blocks_are_those_that_fit():
    assert random_inputs(tiny("mha", d_vocab=60), None, 2, 0).params["blocks"] == [8]
    assert random_inputs(tiny("mha", d_vocab=60, bos_token_id=0), None, 2, 0).params == {
        "blocks": [7],
        "batch": 2,
        "bos": 0,
    }
    inputs = random_inputs(HandMade(content_head, n_ctx=41, d_vocab=18), None, 3, 0)
    assert inputs.params["blocks"] == [8, 12, 16]
    assert [len(batch.tokens) for batch in inputs.batches] == [3, 3, 3]
    assert inputs.description == (
        "[BOS = 0] + blocks of 8, 12, 16 distinct random tokens twice, 3 sequences of each"
    )


class FewTokens:
    """A vocabulary smaller than the embedding, with a special id."""

    bos_token_id = None
    special_ids = frozenset({3})

    def __len__(self):
        return 12

    def encode(self, text, *, prepend_bos=None):
        texts = [text] if isinstance(text, str) else text
        return [[ord(c) - ord("a") for c in one] for one in texts]

    def decode(self, ids):
        return "".join(chr(i + ord("a")) for i in ids)

    def token_texts(self, ids):
        return list(self.decode(ids))

    def single_token(self, text):
        return self.encode(text)[0][0]


def test_random_tokens_are_those_that_have_a_text():
    model = perturbed(tiny_config(d_vocab=19, n_ctx=40), vocabulary=FewTokens())
    inputs = random_inputs(model, [8, 11], 50, 0)
    for batches in (inputs.batches, inputs.unrepeated):
        used = set(torch.cat([batch.tokens.flatten() for batch in batches]).tolist())
        assert used == set(range(12)) - {3}


def test_a_text_is_cut_into_windows_and_what_is_left_over_is_not_used(tmp_path):
    model = perturbed(tiny_config(d_vocab=19, n_ctx=4), vocabulary=FewTokens())
    path = tmp_path / "x.txt"
    path.write_text("abcdabcdab")
    inputs = text_inputs(model, path)
    assert inputs.batches[0].tokens.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert inputs.description == "2 windows of 4 tokens from x.txt"
    assert inputs.params == {"shape": [2, 4], "text": "x.txt", "bos": None}
    path.write_text("ab")
    assert text_inputs(model, path).batches[0].tokens.tolist() == [[0, 1]]
    path.write_text("a")
    with pytest.raises(
        AnalysisError, match=r"x\.txt: a text of 1 tokens says nothing of attention"
    ):
        text_inputs(model, path)
    path.write_text("abcd")
    with pytest.raises(ModelError) as caught:
        text_inputs(tiny("mha"), path)
    assert str(caught.value) == "this model has no tokenizer: give --tokens, not text"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"blocks": [9]}, "block = 9: 18 tokens are longer than n_ctx = 16; at most 8"),
        ({"blocks": [8, 9]}, "block = 9: 18 tokens are longer than n_ctx = 16; at most 8"),
        ({"blocks": [2]}, "block = 2 should be at least 3: with 1 the induction target"),
        ({"batch": 0}, "batch = 0: at least one sequence is needed"),
    ],
)
def test_sequences_that_cannot_be_made_are_refused(given, message):
    with pytest.raises(AnalysisError) as caught:
        analyze(tiny("mha"), "induction", **given)
    assert str(caught.value).startswith(message)


# --- analyze --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bos", [None, 0])
def test_the_same_call_gives_the_same_bytes_and_leaves_everything_as_it_was(name, bos):
    model = tiny("gqa", bos_token_id=bos)
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    tokens = some_tokens(3, 12, d_vocab=4)
    given = tokens.clone()
    texts = [analyze(model, name, t, seed=3).to_json() for t in (None, None, tokens, tokens)]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert torch.equal(tokens, given)
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(point.has_hooks() for point in model.hook_dict.values())


def test_a_model_left_in_training_mode_is_scored_without_dropout():
    dropping, plain = (tiny("mha", dropout=dropout) for dropout in (0.5, 0.0))
    dropping.train()
    assert analyze(dropping, "sinks").table.equals(analyze(plain, "sinks").table)
    assert dropping.training


def test_another_seed_draws_other_tokens():
    model = tiny("mha")
    first, second = (analyze(model, "induction", seed=seed) for seed in (0, 1))
    assert (first.seed, second.seed) == (0, 1)
    assert first.table["induction"].tolist() != second.table["induction"].tolist()


def test_scores_say_what_they_are_and_where_they_come_from():
    model = perturbed(tiny_config(), model_name="my model")
    scores = interp.analyze(model, "previous-token", batch=3)
    column = "previous_token"
    assert list(scores.table) == [
        *("layer", "head", column, f"{column}_se", f"{column}_null", "n"),
        *("selected", f"{column}_held_out"),
    ]
    assert [scores.table[c].dtype.kind for c in ("layer", "head", "n")] == ["i", "i", "i"]
    assert (scores.score, scores.unit, scores.analysis) == (
        column,
        "attention probability",
        "previous-token",
    )
    assert (scores.model, scores.seed) == ("my model", 0)
    assert scores.params == {
        "blocks": [8],
        "batch": 3,
        "bos": None,
        "effect": 0.3,
        "called": "previous-token head",
        "null": "uniform",
    }
    assert scores.inputs == "no BOS, blocks of 8 distinct random tokens twice, 3 sequences of each"
    assert {"interp", "torch", "transformer-lens", "numpy"} <= scores.versions.keys()
    json.loads(scores.to_json())


def test_a_column_of_ids_is_one_sequence_and_lists_arrays_and_tensors_are_the_same():
    model = tiny("mha")
    row = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    given = [row, [row], np.array([row], dtype=np.int16), torch.tensor([row], dtype=torch.int32)]
    texts = {analyze(model, "sinks", tokens).to_json() for tokens in given}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("tokens", "kind", "message"),
    [
        (torch.zeros(1, 17).long(), ShapeError, "sequence 17 > n_ctx 16"),
        ([[0, 19]], ShapeError, "token ids should be within 0 and d_vocab - 1 = 18"),
        ([[0, -1]], ShapeError, "token ids should be within 0 and d_vocab - 1 = 18"),
        ([[0.0, 1.0]], ShapeError, "token ids should be integers, got float64"),
        (torch.zeros(1, 4), ShapeError, "token ids should be integers, got torch.float32"),
        (torch.ones(1, 4).bool(), ShapeError, "token ids should be integers, got torch.bool"),
        (
            [[1, 2], [1]],
            ShapeError,
            "the sequences differ in length: pad them and give an attention_mask",
        ),
        ([], ShapeError, "the tokens are empty"),
        ([[[1]]], ShapeError, "token ids should be [batch, pos], got [1, 1, 1]"),
        ("text", ModelError, "this model has no tokenizer: give token ids, not text"),
    ],
)
def test_tokens_that_do_not_fit_the_model_are_refused(tokens, kind, message):
    with pytest.raises(kind) as caught:
        analyze(tiny("mha"), "sinks", tokens)
    assert str(caught.value) == message


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ShapeError) as caught:
        analyze(tiny("mha"), "sinks", some_tokens(2, 9), attention_mask=torch.ones(2, 8))
    assert str(caught.value) == "attention_mask [2, 8] for tokens [2, 9]"


def test_tokens_of_exactly_n_ctx_are_taken():
    assert np.isfinite(analyze(tiny("mha"), "sinks", some_tokens(1, 16)).summary["best"])


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("induction", [[1, 2, 3, 4, 5, 6]]),
        ("induction", [[1, 1, 1, 1]]),
        ("sinks", [[1, 2, 3, 4, 5, 6, 7]]),
        ("previous-token", [[1]]),
    ],
)
def test_tokens_in_which_a_measure_is_not_defined_give_no_verdict(name, tokens):
    with pytest.raises(AnalysisError) as caught:
        analyze(tiny("mha"), name, tokens)
    n_pos = len(tokens[0])
    assert str(caught.value) == (
        f"{name} is not measurable on these tokens: 1 given sequence of {n_pos} "
        f"token{'' if n_pos == 1 else 's'} has no query it applies to"
    )


def test_a_batch_with_rows_that_see_nothing_stays_finite():
    model = tiny("mha")
    tokens = some_tokens(2, 10, d_vocab=4)
    mask = padding("left", (10, 3), 10)
    for name in NAMES:
        table = analyze(model, name, tokens, attention_mask=mask).table
        assert np.isfinite(table[name.replace("-", "_")]).all()


# --- the registry ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [("sink", "did you mean 'sinks'? "), ("inducton", "did you mean 'induction'? "), ("zzz", "")],
)
def test_an_unknown_analysis_is_answered_with_a_near_and_all_known_names(name, hint):
    with pytest.raises(AnalysisError) as caught:
        analyze(tiny("mha"), name)
    known = ", ".join(registry.names())
    assert str(caught.value) == f"no analysis {name!r}; {hint}known: {known}"


def test_names_are_read_without_importing_anything_heavy():
    code = (
        "import interp.registry, sys, json\n"
        "names = interp.registry.names()\n"
        "heavy = {'torch', 'numpy', 'pandas', 'transformer_lens'} & sys.modules.keys()\n"
        "print(json.dumps([names, sorted(heavy)]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr == ""
    names, heavy = json.loads(result.stdout)
    assert heavy == []
    assert names == registry.names()
    assert set(NAMES) <= names.keys()


def test_names_are_exactly_what_is_registered_and_each_has_a_meaning():
    for name, meaning in registry.names().items():
        analysis = registry.get(name)
        assert analysis.name == name
        assert analysis.score.isidentifier()
        assert meaning.endswith(".")
        assert meaning == (analysis.measure.__doc__ or "").split("\n")[0]
    registered = {name for name in registry._registered if name != "recorded"}
    assert registered == registry.names().keys()


def test_every_analysis_file_is_named_as_its_analysis():
    folder = Path(registry.__file__).parent / "analyses"
    found = {}
    for path in folder.glob("[!_]*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "analysis":
                found[path.stem] = node.args[0].value
    assert sorted(found) == sorted(path.stem for path in folder.glob("[!_]*.py"))
    assert all(stem == name.replace("-", "_") for stem, name in found.items())


def test_watching_reduces_each_layer_in_order_and_keeps_the_model_free_of_hooks():
    model = tiny("mha", n_layers=3)
    tokens = some_tokens(2, 6)
    seen = []

    def reduce(attention):
        seen.append((attention.layer, attention.n_heads))
        return {"mass": attention.received(torch.ones(2, 6)).sum(dim=2)}

    reduced = watch_attention(model, tokens, reduce)
    assert seen == [(layer, 4) for layer in range(3)]
    # Six queries, each with a total of one.
    assert all((layer["mass"] - 6).abs().max() < 1e-5 for layer in reduced)
    assert not any(point.has_hooks() for point in model.hook_dict.values())
    with pytest.raises(ZeroDivisionError):
        watch_attention(model, tokens, lambda attention: {"mass": 1 / 0})
    assert not any(point.has_hooks() for point in model.hook_dict.values())


def test_scores_of_given_inputs_are_those_of_analyze():
    model = tiny("mha")
    tokens = some_tokens(3, 12, d_vocab=4)
    inputs = token_inputs(model, tokens)
    whole = analyze(model, "sinks", tokens)
    assert score_heads(model, registry.get("sinks"), inputs).to_json() == whole.to_json()
