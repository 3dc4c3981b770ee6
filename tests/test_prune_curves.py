"""Orders of pruning: planted answers, brute force, and what the curves are measured on."""

import dataclasses

import numpy as np
import pytest
import torch
from hf_models import gpt2, native
from pruning_cases import masked
from test_importance import gated_losses
from tiny_models import some_tokens, tiny

import interp
from interp.ablation.importance import head_gradients
from interp.ablation.metrics import METRICS, LogitsFunction, logit_difference
from interp.ablation.pruning import (
    halves,
    head_magnitudes,
    prune_curves,
    removal_counts,
    removal_order,
)
from interp.errors import AnalysisError, ModelError
from interp.inputs import token_inputs
from interp.models.pruning import prune_heads

EVERY = [(layer, head) for layer in range(2) for head in range(4)]
SILENT = [(0, 2), (1, 1), (1, 3)]
LOSS = METRICS["loss"]
# Float32 sums in another order differ by about 1e-6 of losses of order 1.
FLOAT32 = 1e-5


def distance_from(model, tokens):
    """A loss that is 0 without ablation and above 0 where anything that is read has changed."""
    with torch.no_grad():
        known = {tuple(row.tolist()): model(row[None])[0] for row in tokens}

    def distance(logits, batch):
        clean = torch.stack([known[tuple(row.tolist())] for row in batch.tokens])
        return (logits - clean).pow(2).mean(dim=(1, 2))

    return LogitsFunction(distance, "distance", "nats")


# --- known answers --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["importance", "importance-again", "magnitude"])
def test_heads_that_write_nothing_leave_first(name):
    model = masked(tiny("gqa"), SILENT)
    order = removal_order(model, token_inputs(model, some_tokens(4, 9)), name)
    assert order[:3] == SILENT
    assert sorted(order) == EVERY


def test_heads_that_write_nothing_leave_first_by_the_oracle():
    model, tokens = masked(tiny("gqa"), SILENT), some_tokens(4, 9)
    metric = distance_from(model, tokens)
    order = removal_order(model, token_inputs(model, tokens), "oracle", metric=metric)
    # Their effects are rounding, of which one is less than another.
    assert sorted(order[:3]) == SILENT
    assert sorted(order) == EVERY


def test_as_many_heads_as_write_nothing_can_be_pruned():
    model, tokens = masked(tiny(), SILENT), some_tokens(6, 9)
    metric = distance_from(model, tokens)
    curves = prune_curves(
        model, token_inputs(model, tokens), orders=["magnitude"], metric=metric, tolerance=1e-6
    )
    assert curves.summary["prunable_share"] == {"magnitude": 3 / 8}
    first = curves.summary["removal_orders"]["magnitude"].split()[:3]
    assert first == ["0.2", "1.1", "1.3"]
    assert curves.summary["prunable_rule"] == (
        "the largest share up to which the distance is nowhere worse than unablated by more than "
        "1e-06 nats and 2 paired standard errors both"
    )
    by_count = curves.table.set_index("removed")["prune"]
    assert by_count[3] == pytest.approx(0, abs=1e-9)
    assert by_count[4] > 1e-3


def test_of_a_logit_difference_less_is_worse():
    model, tokens = tiny(), some_tokens(4, 9)
    inputs = token_inputs(model, tokens)
    more, less = (
        removal_order(model, inputs, "oracle", metric=logit_difference(*answers))
        for answers in ((3, 5), (5, 3))
    )
    assert more == less[::-1]
    sweep = interp.ablate(model, tokens, metric=logit_difference(3, 5), direct=False)
    helped = sweep.table.sort_values("ablation", ascending=False)
    assert more == list(zip(helped["layer"], helped["head"], strict=True))


# --- oracles --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mha", "gqa", "llama"])
def test_the_oracle_is_the_order_of_single_ablations(family):
    model, tokens = tiny(family), some_tokens(4, 9)
    found = removal_order(model, token_inputs(model, tokens), "oracle")
    model = model.double()
    losses = {head: gated_losses(model, tokens, None, {head: 0.0}).mean() for head in EVERY}
    assert found == sorted(EVERY, key=losses.get)


@pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "wide_heads"])
def test_magnitude_is_the_norm_of_the_whole_product(family):
    model = tiny(family)
    expected = []
    for block in model.blocks:
        attn = block.attn
        group = 4 // attn.W_V.shape[0]
        for head in range(4):
            product = attn.W_V[head // group].double() @ attn.W_O[head].double()
            expected.append(product.pow(2).sum().sqrt().item())
    assert head_magnitudes(model) == pytest.approx(np.array(expected), rel=1e-9)


def test_magnitudes_of_a_pruned_model_are_those_of_the_heads_that_are_left():
    model = tiny("gqa")
    left = prune_heads(model, [(0, 0), (0, 1), (1, 2)])
    kept = [2, 3, 4, 5, 7]
    assert head_magnitudes(left) == pytest.approx(head_magnitudes(model)[kept], rel=1e-6)
    order = removal_order(left, token_inputs(left, some_tokens(2, 9)), "magnitude")
    assert sorted(order) == [(0, 2), (0, 3), (1, 0), (1, 1), (1, 3)]


def test_ranking_again_follows_the_model_without_the_heads_that_are_gone():
    model = tiny("gqa")
    inputs = token_inputs(model, some_tokens(4, 9))
    found = removal_order(model, inputs, "importance-again", step=0.25)
    gone = []
    while len(gone) < 8:
        left = prune_heads(model, gone)
        heads = [head for head in EVERY if head not in gone]
        values = np.abs(head_gradients(left, inputs, LOSS)).mean(axis=1)
        gone += [heads[place] for place in np.argsort(values)][:2]
        if len(gone) == 6:
            gone += [head for head in heads if head not in gone]
    assert found[:6] == gone[:6]
    once = removal_order(model, inputs, "importance")
    assert once[:2] == found[:2]
    assert once != found


def test_each_point_of_a_curve_is_the_loss_without_those_heads_on_the_other_half():
    model, tokens = tiny("gqa"), some_tokens(7, 9)
    curves = prune_curves(model, token_inputs(model, tokens), orders=["importance"])
    ranked, told = tokens[::2], tokens[1::2]
    order = removal_order(model, token_inputs(model, ranked), "importance")
    written = " ".join(f"{layer}.{head}" for layer, head in order)
    assert curves.summary["removal_orders"] == {"importance": written}
    model = model.double()
    clean = gated_losses(model, told, None, {})
    table = curves.table
    assert table["removed"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert table["share"].tolist() == [count / 8 for count in range(9)]
    assert (table["n"] == 3).all()
    for row in table.itertuples():
        losses = gated_losses(model, told, None, dict.fromkeys(order[: row.removed], 0.0))
        change = losses - clean
        assert row.loss == pytest.approx(losses.mean(), abs=FLOAT32)
        assert row.loss_se == pytest.approx(losses.std(ddof=1) / np.sqrt(3), abs=FLOAT32)
        assert row.prune == pytest.approx(change.mean(), abs=FLOAT32)
        assert row.prune_se == pytest.approx(change.std(ddof=1) / np.sqrt(3), abs=FLOAT32)
    assert np.isnan(table["prune_p"][0])
    assert table["prune_p"][1:].between(0, 1).all()
    assert (table["prune_q"][1:] >= table["prune_p"][1:]).all()


def test_every_order_ends_at_the_same_model_without_heads():
    model, tokens = tiny("llama"), some_tokens(6, 9)
    curves = prune_curves(model, token_inputs(model, tokens), step=0.5)
    names = ["oracle", "importance", "importance-again", "random-1", "random-2", "random-3"]
    assert list(dict.fromkeys(curves.table["order"])) == [*names, "magnitude"]
    ends = curves.table[curves.table["removed"] == 8]["loss"]
    bare = gated_losses(model.double(), tokens[1::2], None, dict.fromkeys(EVERY, 0.0)).mean()
    assert ends.to_numpy() == pytest.approx(np.full(7, bare), abs=FLOAT32)
    starts = curves.table[curves.table["removed"] == 0]
    assert (starts["prune"] == 0).all()


# --- properties -----------------------------------------------------------------------------


def test_halves_share_no_document_and_leave_none_out():
    model = tiny()
    inputs = token_inputs(model, some_tokens(7, 9))
    documents = torch.tensor([3, 0, 3, 1, 1, 2, 0])
    batch = dataclasses.replace(inputs.batches[0], documents=documents)
    parts = [
        half.inputs.batches[0]
        for half in halves(dataclasses.replace(inputs, batches=[batch]), LOSS)
    ]
    assert [part.documents.tolist() for part in parts] == [[0, 2, 0], [3, 3, 1, 1]]
    rows = {tuple(row.tolist()) for part in parts for row in part.tokens}
    assert rows == {tuple(row.tolist()) for row in batch.tokens}


def test_answers_of_single_sequences_stay_with_their_sequences():
    model, tokens = tiny(), some_tokens(5, 9)
    right, wrong = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([6, 7, 8, 9, 10])
    metric = logit_difference(right, wrong)
    curves = prune_curves(
        model, token_inputs(model, tokens), orders=["magnitude"], metric=metric, step=1.0
    )
    with torch.no_grad():
        logits = model(tokens)[:, -1]
    told = [(logits[row, right[row]] - logits[row, wrong[row]]).item() for row in (1, 3)]
    assert curves.summary["logit_diff_clean"] == pytest.approx(np.mean(told), abs=FLOAT32)
    assert (curves.unit, curves.score) == ("logits", "prune")


def test_the_same_seed_gives_the_same_curves_and_leaves_random_states_alone():
    model, inputs = tiny(), token_inputs(tiny(), some_tokens(4, 9))
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    one, other = (
        prune_curves(model, inputs, orders=["random", "importance"], seed=5) for _ in range(2)
    )
    assert one.to_json() == other.to_json()
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    draws = [removal_order(model, inputs, f"random-{n}", seed=5) for n in (1, 2, 3)]
    assert draws[0] == removal_order(model, inputs, "random", seed=5)
    assert len({tuple(draw) for draw in draws}) == 3
    assert removal_order(model, inputs, "random", seed=6) != draws[0]


def test_a_bridged_model_has_the_curves_of_ours_but_no_magnitude():
    theirs = gpt2()
    ours, bridged = native(theirs), interp.load_model(theirs, backend="bridge")
    tokens = some_tokens(4, 12, d_vocab=97)
    orders = ["oracle", "importance-again", "random"]
    one, other = (
        prune_curves(model, token_inputs(model, tokens), orders=orders, step=0.5)
        for model in (ours, bridged)
    )
    assert one.summary["removal_orders"] == other.summary["removal_orders"]
    assert one.table["loss"].to_numpy() == pytest.approx(other.table["loss"].to_numpy(), abs=1e-5)
    with pytest.raises(ModelError, match="magnitude needs the native backend"):
        removal_order(bridged, token_inputs(bridged, tokens), "magnitude")


def test_a_curve_survives_its_file(tmp_path):
    curves = prune_curves(tiny(), token_inputs(tiny(), some_tokens(4, 9)), orders=["magnitude"])
    _, record = curves.save(tmp_path)
    again = interp.tables.SetScores.load(record)
    assert again.table["removed"].tolist() == curves.table["removed"].tolist()
    assert again.summary["prunable_share"] == curves.summary["prunable_share"]


def test_progress_is_told_to_the_end():
    told = []
    prune_curves(
        tiny(),
        token_inputs(tiny(), some_tokens(4, 9)),
        orders=["oracle"],
        progress=lambda done, total: told.append((done, total)),
    )
    assert told[-1][0] == told[-1][1]
    assert (8, 8) in told  # the ranking


@pytest.mark.parametrize(
    ("n_heads", "step", "counts"),
    [
        (10, 0.1, list(range(11))),
        (8, 0.25, [0, 2, 4, 6, 8]),
        (8, 0.3, [0, 2, 5, 7, 8]),
        (3, 1.0, [0, 3]),
        (2, 0.1, [0, 1, 2]),
    ],
)
def test_a_curve_goes_in_steps_from_none_to_all(n_heads, step, counts):
    assert removal_counts(n_heads, step) == counts


def test_what_cannot_be_is_refused():
    model = tiny()
    inputs, one = (token_inputs(model, some_tokens(n, 9)) for n in (4, 1))
    with pytest.raises(AnalysisError, match="no order 'best'; known: oracle, importance, "):
        prune_curves(model, inputs, orders=["best"])
    with pytest.raises(AnalysisError, match="no order 'random-0'"):
        removal_order(model, inputs, "random-0")
    with pytest.raises(AnalysisError, match="no order was named"):
        prune_curves(model, inputs, orders=[])
    with pytest.raises(AnalysisError, match=r"step = 1\.5: a share"):
        prune_curves(model, inputs, step=1.5)
    with pytest.raises(AnalysisError, match="two documents, or sequences, are needed"):
        prune_curves(model, one)
    with pytest.raises(AnalysisError, match="whether more is worse"):
        prune_curves(model, inputs, metric=LogitsFunction(lambda logits, batch: logits[:, 0, 0]))
    with pytest.raises(AnalysisError, match="accuracy has none at the unablated model"):
        removal_order(model, inputs, "importance", metric=METRICS["accuracy"])
