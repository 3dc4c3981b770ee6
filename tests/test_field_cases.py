"""Faults that people really hit with head scores, on models whose answers are known by hand.

Heads of a fixed offset are built as weights, so that what is tested is the whole way from tokens to
a verdict: the fused pass, the formula, the null and the selection.
"""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny_models import perturbed, some_tokens, tiny, tiny_config
from tiny_tokenizers import KINDS, gpt2_like, reader, wrapped
from typer.testing import CliRunner

import interp
from interp import measure as measure_module
from interp import registry
from interp.cli import app
from interp.config import ModelConfig
from interp.data.pretrained_tokenizer import PretrainedVocabulary
from interp.errors import AnalysisError
from interp.models.transformer import Transformer
from interp.views.report import result_page

# Scores of 60 against 0: what is left over is e^-60 a key.
SHARP = 60.0
ROUNDING = 1e-5
FIRST = 10**6
"""An offset that always ends at the first token."""
EVERY = tuple(registry.names())
GIVEN = {"retrieval": {"needle": "1:3", "question": "8:10"}}
"""Parameters without which an analysis refuses given tokens."""


def offset_model(*offsets, n_ctx=128, d_vocab=300, bos=0, vocabulary=None, stop_at=0):
    """One layer, whose head h looks `offsets[h]` tokens back, or evenly where that is None.

    It reads positions alone, so no token means anything to it. Targets lie at `stop_at` or later.
    """
    model = Transformer(
        ModelConfig(
            n_layers=1,
            d_model=n_ctx,
            n_ctx=n_ctx,
            d_vocab=d_vocab,
            bos_token_id=bos,
            attention={"n_heads": len(offsets), "d_head": n_ctx, "bias": False},
            normalization_type="none",
        ),
        vocabulary=vocabulary,
    )
    with torch.no_grad():
        model.embed.weight.zero_()
        model.pos_embed.weight.copy_(torch.eye(n_ctx))
        attention = model.blocks[0].attn
        queries, keys = torch.zeros(2, len(offsets), n_ctx, n_ctx)
        for head, offset in enumerate(offsets):
            if offset is not None:
                queries[head] = SHARP * math.sqrt(n_ctx) * torch.eye(n_ctx)
                for place in range(n_ctx):
                    keys[head, place, min(place, max(place - offset, stop_at))] = 1.0
        attention.q_proj.weight.copy_(queries.flatten(0, 1))
        attention.k_proj.weight.copy_(keys.flatten(0, 1))
    return model


def column(scores):
    return scores.table[scores.score].tolist()


def null(scores):
    return scores.table[f"{scores.score}_null"].tolist()


def near(*values):
    return pytest.approx(list(values), abs=ROUNDING)


@pytest.fixture
def seen(monkeypatch):
    """The tokens that models are shown, pass by pass."""
    shown = []
    watched = measure_module.watch_attention

    def watch(model, tokens, *given, **named):
        shown.append(tokens)
        return watched(model, tokens, *given, **named)

    monkeypatch.setattr(measure_module, "watch_attention", watch)
    return shown


# --- induction: what is no induction head ---------------------------------------------------------


@pytest.mark.parametrize("bos", [None, 0], ids=["no_bos", "bos"])
def test_on_one_block_length_each_offset_is_what_it_is_and_none_is_called_induction(bos):
    n = 8
    model = offset_model(0, 1, n, n - 1, None, bos=bos)
    induction, previous, duplicate = (
        interp.analyze(model, name, blocks=[n])
        for name in ("induction", "previous-token", "duplicate-token")
    )
    # Query p sees p + 1 keys, and the second copy's queries come last.
    lead = int(bos is not None)
    even = np.mean([1 / (p + 1) for p in range(n + lead, 2 * n + lead)])
    assert column(induction) == near(0, 0, 0, 1, even)
    assert null(induction) == near(0, 0, 0, 1, even)
    assert column(duplicate) == near(0, 0, 1, 0, even)
    assert column(previous)[:2] == near(0, 1)
    assert previous.table["selected"].tolist() == [False, True, False, False, False]
    assert induction.summary["selected"] == duplicate.summary["selected"] == 0


def test_over_the_default_lengths_no_head_without_content_is_selected_for_content():
    offsets = (0, 1, 5, 7, FIRST, None)
    model = offset_model(*offsets)
    for name in ("induction", "prefix-matching", "duplicate-token", "retrieval"):
        scores = interp.analyze(model, name)
        assert scores.summary["selected"] == 0, name
        assert all(-ROUNDING <= value <= 1 + ROUNDING for value in column(scores))
    induction = interp.analyze(model, "induction")
    assert induction.params["blocks"] == [8, 12, 16, 20, 25, 32, 50]
    assert column(induction)[:5] == near(0, 0, 0, 1 / 7, 0)
    # Query p of the second copy parks there.
    assert induction.table["sink"].tolist()[4] == pytest.approx(1.0, abs=ROUNDING)


@pytest.mark.parametrize("tokens", [[list(range(1, 20))], [[5, 5, 6]], [[5, 5, 5, 5]]])
def test_tokens_without_a_repeat_to_look_behind_give_no_verdict(tokens):
    with pytest.raises(AnalysisError, match="induction is not measurable on these tokens"):
        interp.analyze(offset_model(0, 1, 5), "induction", tokens)


def test_a_pair_twice_has_two_targets_and_nothing_in_the_first_column():
    """On `[x, y, x, y]` query 2 has key 1 and query 3 key 2, which is the previous token."""
    model = offset_model(0, 1, 2, FIRST)
    scores = interp.analyze(model, "induction", [[5, 6, 5, 6]] * 2)
    assert column(scores) == near(0, 1, 0, 0)
    assert null(scores) == near(0, 1, 0, 0)
    assert scores.summary["selected"] == 0
    duplicate = interp.analyze(model, "duplicate-token", [[5, 6, 5, 6]] * 2)
    assert column(duplicate) == near(0, 0, 1, 0.5)  # query 2 has its copy at key 0


# --- the tokens that models are shown -------------------------------------------------------------


@pytest.mark.parametrize("bos", [None, 0], ids=["no_bos", "bos"])
def test_a_block_of_ten_stands_twice_behind_one_bos_or_none(seen, bos):
    scores = interp.analyze(offset_model(1, bos=bos), "induction", blocks=[10], batch=3)
    lead = int(bos is not None)
    assert scores.params["bos"] == bos
    repeated, unrepeated = seen
    assert repeated.shape == unrepeated.shape == (3, 20 + lead)
    assert torch.equal(repeated[:, lead : 10 + lead], repeated[:, 10 + lead :])
    for tokens in seen:
        assert (tokens[:, :lead] == 0).all()
    for row in unrepeated:
        assert len(set(row.tolist())) == 20 + lead


@pytest.mark.parametrize("prepend_bos", [None, False])
@pytest.mark.parametrize("kind", [*KINDS, "none"])
@pytest.mark.parametrize("name", EVERY)
def test_no_analysis_draws_a_special_token_or_an_id_without_text(seen, name, kind, prepend_bos):
    if kind == "none":
        model = tiny(d_vocab=24, n_ctx=40, bos_token_id=7)
        size, special = 24, {7}
    else:
        vocabulary = PretrainedVocabulary(wrapped(kind))
        model = reader(vocabulary=vocabulary, d_vocab=280)  # a padded embedding
        size, special = len(vocabulary), vocabulary.special_ids
        assert size < 280
    interp.analyze(model, name, prepend_bos=prepend_bos, batch=20)
    assert seen
    for tokens in seen:
        assert int(tokens.max()) < size
        assert not torch.isin(tokens[:, 1:], torch.tensor(sorted(special), dtype=torch.long)).any()
        if prepend_bos is False:
            assert not torch.isin(tokens, torch.tensor(sorted(special), dtype=torch.long)).any()


@pytest.mark.parametrize("command", [*EVERY, "scores", "ablate"])
@pytest.mark.parametrize("block", ["1", "2", "8,2"])
def test_a_block_on_which_every_head_looks_like_induction_is_refused(command, block):
    result = CliRunner().invoke(app, [command, "nowhere", "--block", block])
    assert result.exit_code == 2
    assert "with 1 the induction target is the query itself, with 2 it is the previous token" in (
        result.stderr
    )


# --- sinks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_pos", "with_row_0"), [(8, 0.340), (16, 0.211), (64, 0.074)])
def test_a_uniform_head_is_no_sink_at_any_length_and_a_first_token_head_is(n_pos, with_row_0):
    tokens = some_tokens(4, n_pos, d_vocab=300)
    scores = interp.analyze(offset_model(None, FIRST), "sinks", tokens)
    even = np.mean([1 / (p + 1) for p in range(7, n_pos)])
    assert column(scores) == near(even, 1)
    assert null(scores) == near(even, even)
    assert scores.table["selected"].tolist() == [False, True]
    assert scores.table["gu_alpha"].tolist() == pytest.approx([with_row_0, 1.0], abs=5e-4)
    assert scores.summary["heads_raw"] == 1


def test_four_tokens_say_nothing_of_sinks():
    with pytest.raises(AnalysisError, match="sinks is not measurable"):
        interp.analyze(offset_model(None, FIRST), "sinks", some_tokens(4, 4, d_vocab=300))


def test_a_sink_on_a_line_break_inside_a_text_is_found_with_its_place_and_text():
    vocabulary = PretrainedVocabulary(gpt2_like())
    model = offset_model(
        FIRST, FIRST, bos=None, d_vocab=280, vocabulary=vocabulary, stop_at=3, n_ctx=32
    )
    with torch.no_grad():  # the second head looks everywhere
        model.blocks[0].attn.q_proj.weight[32:].zero_()
    text = "xyz\n" + "abcdefghijklmnopq"
    ids = vocabulary.encode(text, prepend_bos=False)[0]
    assert vocabulary.token_texts(ids[3:4]) == ["\n"]
    scores = interp.analyze(model, "sinks", [ids, ids])
    assert scores.table["anywhere"].tolist()[0] == pytest.approx(1.0, abs=ROUNDING)
    assert (scores.table["position"].tolist()[0], scores.table["token"].tolist()[0]) == (3, "\\n")
    assert column(scores)[0] == pytest.approx(0.0, abs=ROUNDING)
    assert not scores.table["selected"].any()
    (listed,) = scores.summary["sink_tokens"]
    assert listed == {"position": 3, "token": "\\n", "heads": 1, "sequences": 2}


# --- heads, caches and the caller's state ---------------------------------------------------------


@pytest.mark.parametrize("family", ["gqa", "mqa", "llama"])
def test_no_analysis_averages_over_heads(family):
    model = tiny(family, n_ctx=40, d_vocab=60)
    tokens = some_tokens(4, 20, d_vocab=9)
    _, cache = model.run_with_cache(tokens)
    pattern = cache["blocks.1.attn.hook_pattern"]
    assert pattern.shape[1] == 4
    for one, other in itertools.combinations(range(4), 2):
        assert (pattern[:, one] - pattern[:, other]).abs().max() > 1e-3
    for name in EVERY:
        scores = interp.analyze(model, name, tokens, **GIVEN.get(name, {}))
        assert scores.table[["layer", "head"]].to_numpy().tolist() == [
            [layer, head] for layer in range(2) for head in range(4)
        ]
        assert scores.table[scores.score].nunique() == 8, name


@pytest.mark.parametrize("dense", [False, True], ids=["fused", "pattern"])
def test_any_order_of_analyses_leaves_cache_model_and_random_states_as_they_were(dense):
    model = perturbed(tiny_config(attention={"n_key_value_heads": 2}, dropout=0.2))
    model.train()
    tokens = some_tokens(3, 14, d_vocab=5)
    given = tokens.clone()
    _, cache = model.run_with_cache(tokens)
    before = {name: value.clone() for name, value in cache.items()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    shown = []
    if dense:  # the statistics are then read off the tensor that the hook is given
        for block in model.blocks:
            block.attn.hook_pattern.add_hook(
                lambda pattern, hook: shown.append((pattern, pattern.clone()))
            )
    hooks = {name: point.has_hooks() for name, point in model.hook_dict.items()}
    torch.manual_seed(3)
    np.random.seed(3)
    states = (torch.get_rng_state(), str(np.random.get_state()))
    results = []
    for order in (EVERY, EVERY[::-1]):
        found = {}
        for name in order:
            scores = interp.analyze(model, name, tokens, **GIVEN.get(name, {}))
            found[name] = scores.to_json(), result_page(scores)
        results.append(found)
    assert results[0] == results[1]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert str(np.random.get_state()) == states[1]
    assert model.training
    assert torch.equal(tokens, given)
    assert {name: point.has_hooks() for name, point in model.hook_dict.items()} == hooks
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    for name, value in cache.items():
        assert torch.equal(value, before[name]), name
    assert bool(shown) == dense
    for pattern, copied in shown:
        assert torch.equal(pattern, copied)
        assert torch.allclose(pattern.sum(-1), torch.ones(()), atol=1e-5)


def test_pythons_own_random_state_is_left_alone():
    code = (
        "import random, interp\n"
        "from interp import registry\n"
        "from interp.config import ModelConfig\n"
        "from interp.models.transformer import Transformer\n"
        "from interp.views.report import result_page\n"
        "sizes = dict(n_layers=1, d_model=8, n_ctx=40, d_vocab=40)\n"
        "model = Transformer(ModelConfig(**sizes, attention={'n_heads': 2}))\n"
        "before = random.getstate()\n"
        "for name in registry.names():\n"
        "    result_page(interp.analyze(model, name, batch=2))\n"
        "assert random.getstate() == before\n"
    )
    # A process of its own: the checks of types in tests draw from that state themselves.
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("exclude_bos", [False, True])
def test_pads_change_no_mean_and_bos_is_left_out_by_its_id_on_either_side(exclude_bos):
    """One row of six tokens and one of three, each led by BOS."""
    model = tiny("rotary", bos_token_id=0)
    rows = [[0, 5, 6, 5, 6, 7], [0, 8, 8]]
    expected = None
    for side, filler in itertools.product(("left", "right"), (0, 3)):
        tokens, mask = torch.full((2, 6), filler), torch.zeros(2, 6, dtype=torch.long)
        for place, row in enumerate(rows):
            where = slice(6 - len(row), 6) if side == "left" else slice(0, len(row))
            tokens[place, where], mask[place, where] = torch.tensor(row), 1
        found = {}
        for name in ("confidence", "copying", "distance", "entropy", "previous-token"):
            scores = interp.analyze(
                model, name, tokens, attention_mask=mask, exclude_bos=exclude_bos
            )
            assert scores.table["n"].tolist() == [2] * 8, name
            found[name] = column(scores)
        expected = expected or found
        for name, values in found.items():
            assert values == pytest.approx(expected[name], abs=ROUNDING), (name, side, filler)
    alone = [interp.analyze(model, "entropy", [row], exclude_bos=exclude_bos) for row in rows]
    assert expected["entropy"] == pytest.approx(
        np.mean([column(scores) for scores in alone], axis=0), abs=ROUNDING
    )
