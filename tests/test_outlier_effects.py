"""`interp.outlier_effects`: what changing the massive activations does, and how many change."""

import math

import hf_models
import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import padding, some_tokens, tiny

import interp
from interp.activation_tables import OutlierEffects
from interp.activations.changes import Tally, every_change
from interp.activations.effects import MEANINGS, outlier_effects_in
from interp.activations.massive import massive_cells
from interp.activations.sinks import cell_rows
from interp.errors import AnalysisError, ModelError
from interp.inputs import token_inputs
from interp.models.pruning import prune_heads

SPIKE, DIMENSION, SIZE = 11, 6, 5000.0
DRAWN = ("move", "random-direction", "random-cells")


def spiked(family="gqa", **changes):
    """A model in which one token's embedding has a huge value in one dimension."""
    model = tiny(family, **{"n_layers": 3, **changes})
    with torch.no_grad():
        model.embed.weight[SPIKE, DIMENSION] = SIZE
    return model


def written():
    """A model without norms or heads that matter: a stream is the embedding and known biases.

    The spike's cell is 5000 before block 0, and each of three blocks adds 40 to it.
    """
    model = tiny("attention_only", normalization_type="none", n_layers=3)
    with torch.no_grad():
        model.embed.weight[SPIKE, DIMENSION] = SIZE
        model.pos_embed.weight[:, DIMENSION] = 0
        # Logits of the size of ordinary ones.
        model.unembed.weight[:, DIMENSION] *= 1e-3
        for block in model.blocks:
            block.attn.o_proj.weight.zero_()
            block.attn.o_proj.bias[DIMENSION] = 40.0
    return model


def spiked_tokens(batch=3, n_pos=14):
    """Random tokens without the spike's, but for one of it in each sequence, further in each."""
    tokens = some_tokens(batch, n_pos, d_vocab=10)
    for row in range(batch):
        tokens[row, 2 * row] = SPIKE
    return tokens


def loss_of(model, final, tokens):
    """The mean next-token loss of each sequence of a last stream, in float64."""
    logits = final.double() @ model.unembed.weight.detach().double().T
    logits = logits + (0 if model.unembed.bias is None else model.unembed.bias.detach().double())
    chosen = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return -chosen.mean(dim=1)


def row_of(result, change, draw=0):
    table = result.table
    ((_, row),) = table[(table["change"] == change) & (table["draw"] == draw)].iterrows()
    return row


# --- known answers ----------------------------------------------------------------------------


def test_each_change_leaves_in_the_last_stream_what_it_says():
    model, tokens = written(), spiked_tokens()
    with torch.no_grad():
        final = model.run_with_cache(tokens)[1]["blocks.2.hook_resid_post"].double()
    result = interp.outlier_effects(model, tokens, seed=3)
    spike = tokens == SPIKE
    at = (*spike.nonzero(as_tuple=True), DIMENSION)
    whole = SIZE + 3 * 40
    assert final[at].tolist() == pytest.approx([whole] * 3)

    def change(value):
        edited = final.clone()
        edited[at] = value
        return edited

    median = torch.tensor([float(np.median(final[b].numpy())) for b in range(3)]).double()
    moved = {}
    for draw in range(3):
        note = row_of(result, "move", draw)["note"]
        to = int(note.removeprefix("dimension 6 to "))
        moved[draw] = change(0.0)
        moved[draw][spike.nonzero()[:, 0], spike.nonzero()[:, 1], to] += whole
    expected = {
        ("zero", 0): change(0.0),
        ("mean", 0): final,
        ("resample", 0): final,
        ("median", 0): change(median),
        ("flip", 0): change(-whole),
        **{("move", draw): own for draw, own in moved.items()},
    }
    base = loss_of(model, final, tokens)
    assert result.summary["loss"] == pytest.approx(float(base.mean()), rel=1e-5)
    for (name, draw), stream in expected.items():
        after = loss_of(model, stream, tokens)
        row = row_of(result, name, draw)
        assert row["loss"] == pytest.approx(float(after.mean()), rel=1e-4), name
        difference = (after - base).numpy()
        assert row["loss_change"] == pytest.approx(difference.mean(), rel=1e-3, abs=1e-5), name
        error = difference.std(ddof=1) / math.sqrt(3)
        assert row["loss_change_se"] == pytest.approx(error, rel=1e-3, abs=1e-5), name
        assert row["cells"] == 4 * 3  # layers 0 to 3
        assert row["changed"] == (0 if name in ("mean", "resample") else 12), name


def test_the_median_is_that_of_the_tokens_layer_and_sequence():
    model, tokens = written(), spiked_tokens()
    with torch.no_grad():
        model.unembed.weight[:, DIMENSION] *= 2e4
        model.embed.weight += 1.5
        model.embed.weight[0] += 2.0  # so that sequences differ
        model.embed.weight[SPIKE, DIMENSION] = 2 * SIZE
        final = model.run_with_cache(tokens)[1]["blocks.2.hook_resid_post"].double()
    result = interp.outlier_effects(model, tokens, draws=1)
    at = (*(tokens == SPIKE).nonzero(as_tuple=True), DIMENSION)
    edited = final.clone()
    medians = [float(np.median(own.numpy())) for own in final]
    assert min(medians) > 1
    edited[at] = torch.tensor(medians).double()
    expected = float(loss_of(model, edited, tokens).mean())
    assert row_of(result, "median")["loss"] == pytest.approx(expected, rel=1e-4)
    assert row_of(result, "zero")["loss"] != pytest.approx(expected, rel=1e-3)


def test_mean_and_resample_of_the_same_vector_say_that_no_cells_changed():
    model = spiked(bos_token_id=0)
    with torch.no_grad():
        model.embed.weight[0, DIMENSION] = SIZE
    tokens = 1 + some_tokens(4, 12, d_vocab=9)
    tokens[:, 0] = 0
    result = interp.outlier_effects(model, tokens)
    for name in ("mean", "resample"):
        row = row_of(result, name)
        assert (row["cells"], row["changed"]) == (result.summary["cells"], 0)
        assert row["note"] == "no cells changed"
        assert row["loss_change"] == pytest.approx(0, abs=1e-6)
    assert row_of(result, "zero")["changed"] == result.summary["cells"] >= 12
    assert "no cells" not in row_of(result, "zero")["note"]


def test_mean_and_resample_take_cells_with_the_same_layer_dimension_and_token_alone():
    model = written()
    with torch.no_grad():
        model.embed.weight[12, DIMENSION] = -SIZE
        model.pos_embed.weight[:, DIMENSION] = torch.arange(16.0) * 5
    tokens = some_tokens(3, 8, d_vocab=10)
    tokens[0, 1] = tokens[1, 2] = tokens[1, 5] = tokens[2, 4] = SPIKE
    tokens[2, 6] = 12  # nothing is like it
    cells = massive_cells(model, token_inputs(model, tokens).batches[0])
    (rows,) = cell_rows([token_inputs(model, tokens).batches[0]], [cells])
    batches = token_inputs(model, tokens).batches
    medians = [torch.zeros(len(cells))]
    changes = every_change(model, batches, [cells], rows, medians, draws=1, seed=0)
    named = {change.name: change for change in changes}
    first = (cells.layer == 0).numpy()
    places = list(zip(rows["sequence"][first], rows["position"][first], strict=True))
    assert places == [(0, 1), (1, 2), (1, 5), (2, 4), (2, 6)]
    value = {place: SIZE + 5 * place[1] for place in places[:4]}
    mean = np.mean(list(value.values()))
    (means,), (others,) = (named[name].rules[0].args for name in ("mean", "resample"))
    assert means[first].tolist() == pytest.approx([mean] * 4 + [-SIZE + 30])
    following = [value[1, 2], value[2, 4], value[2, 4], value[0, 1], -SIZE + 30]
    assert others[first].tolist() == pytest.approx(following)
    assert named["mean"].note == "4 of 20 cells have no like in another sequence"


# --- what is left in the stream -------------------------------------------------------------------


def streams(model, tokens, change):
    """The stream after the last block with a change in place, and without."""
    kept = []

    def keep(value, hook=None):
        kept.append(value.detach().clone())

    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    tally = Tally()
    hooks = [] if change is None else change.hooks(model, 0, 0, len(tokens), tally)
    with torch.no_grad():
        model.run_with_hooks(tokens, fwd_hooks=[*hooks, (last, keep)], return_type=None)
    return kept[-1], tally


def changes_of(model, tokens, **given):
    batches = token_inputs(model, tokens).batches
    cells = [massive_cells(model, batch) for batch in batches]
    rows = pd.concat(cell_rows(batches, cells), ignore_index=True)
    medians = [torch.zeros(len(own)) for own in cells]
    return every_change(
        model, batches, cells, rows, medians, **{"draws": 3, "seed": 0, **given}
    ), cells


def test_a_random_direction_is_as_long_as_what_the_cells_held_and_leaves_them_at_0():
    model, tokens = written(), spiked_tokens()
    with torch.no_grad():  # a second dimension: the length is that of both
        model.embed.weight[SPIKE, 9] = -3000.0
        model.pos_embed.weight[:, 9] = 0
        for block in model.blocks:
            block.attn.o_proj.bias[9] = 0
    before, _ = streams(model, tokens, None)
    changes, _ = changes_of(model, tokens)
    directions = []
    for change in changes:
        if change.name == "random-direction":
            after, tally = streams(model, tokens, change)
            at = tokens == SPIKE
            without = before[at].clone()
            without[:, [DIMENSION, 9]] = 0
            added = after[at] - without
            length = math.hypot(SIZE + 120, 3000)
            assert added.norm(dim=1).tolist() == pytest.approx([length] * 3, rel=1e-4)
            assert after[at][:, [DIMENSION, 9]].abs().max() == 0
            assert torch.equal(after[~at], before[~at])
            assert (tally.cells, tally.changed) == (
                3 * 4 * 2,
                3 * (4 + 1),
            )  # nobody adds to the second
            directions.append(added[0] / length)
    assert len(directions) == 3
    assert abs(float(directions[0] @ directions[1])) < 0.9


def test_a_move_conserves_the_sum_of_each_token():
    model, tokens = written(), spiked_tokens()
    before, _ = streams(model, tokens, None)
    changes, _ = changes_of(model, tokens)
    moves = [change for change in changes if change.name == "move"]
    assert len(moves) == 3
    for change in moves:
        after, _ = streams(model, tokens, change)
        assert after.sum(-1).flatten().tolist() == pytest.approx(
            before.sum(-1).flatten().tolist(), rel=1e-4, abs=1e-2
        )
        assert after[tokens == SPIKE][:, DIMENSION].abs().max() == 0


def test_random_cells_are_as_many_in_the_same_layers_and_sequences_and_never_found_ones():
    model, tokens = spiked(), spiked_tokens()
    changes, (cells,) = changes_of(model, tokens, draws=5)
    controls = [change.cells[0] for change in changes if change.name == "random-cells"]
    drawn = set()
    for own in controls:
        assert sorted(zip(own.layer.tolist(), own.row.tolist(), strict=True)) == sorted(
            zip(cells.layer.tolist(), cells.row.tolist(), strict=True)
        )
        assert not bool((tokens[own.row, own.column] == SPIKE).any())
        assert DIMENSION not in own.dimension.tolist()
        drawn.add((tuple(own.column.tolist()), tuple(own.dimension.tolist())))
    assert len(drawn) == 5


def test_a_sequence_without_other_tokens_has_fewer_random_cells_and_that_is_said():
    model = spiked()
    tokens = some_tokens(2, 10, d_vocab=10)
    tokens[0, 3] = SPIKE
    tokens[1] = SPIKE
    result = interp.outlier_effects(model, tokens, draws=1)
    alone = interp.outlier_effects(model, tokens[:1], draws=1)
    row = row_of(result, "random-cells")
    assert row["cells"] == alone.summary["cells"] > 0
    short = result.summary["cells"] - alone.summary["cells"]
    assert row["note"] == f"{short} cells have no other token to be replaced by"


def test_a_cell_that_is_massive_in_some_layers_only_is_left_alone_in_the_others():
    model, tokens = written(), spiked_tokens()
    with torch.no_grad():
        model.blocks[0].attn.o_proj.bias[:] = 40.0  # of the median it is 100 times then
    result = interp.outlier_effects(model, tokens)
    assert result.summary["layers"] == [0]
    changes, _ = changes_of(model, tokens)
    (flip,) = [change for change in changes if change.name == "flip"]
    after, tally = streams(model, tokens, flip)
    at = tokens == SPIKE
    assert after[at][:, DIMENSION].tolist() == pytest.approx([-SIZE + 120] * 3, rel=1e-5)
    assert tally.changed == 3


# --- an oracle ----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["gqa", "llama", "rotary_smeared"])
def test_losses_and_sinks_are_those_of_hooks_written_by_hand(family, side):
    """In float64, one sequence at a time, without padding: nothing of the package but the model."""
    model, tokens = spiked(family), spiked_tokens()
    mask = padding(side, [12, 14, 13], 14)
    result = interp.outlier_effects(model, tokens, attention_mask=mask, draws=2)
    precise = spiked(family).double()
    to = {
        draw: int(row_of(result, "move", draw)["note"].removeprefix("dimension 6 to "))
        for draw in range(2)
    }

    def hook_for(name, draw, state):
        def hook(x, hook=None):
            for p in state["places"]:
                old = float(x[0, p, DIMENSION])
                if name == "zero":
                    x[0, p, DIMENSION] = 0
                elif name == "flip":
                    left = state.get(p, 0.0)
                    x[0, p, DIMENSION] = state[p] = left - (old - left)
                elif name == "move":
                    x[0, p, DIMENSION] = 0
                    x[0, p, to[draw]] += old
            return x

        return hook

    rows = [("none", 0), ("zero", 0), ("flip", 0), ("move", 0), ("move", 1)]
    for name, draw in rows:
        losses, sinks = [], []
        for b in range(3):
            ids = tokens[b] if mask is None else tokens[b][mask[b].bool()]
            state = {"places": (ids == SPIKE).nonzero()[:, 0].tolist()}
            hook = hook_for(name, draw, state)
            names = [f"blocks.{layer}.hook_resid_pre" for layer in range(3)]
            names += ["blocks.2.hook_resid_post"]
            seen = [f"blocks.{layer}.attn.hook_pattern" for layer in range(3)]
            with torch.no_grad(), precise.hooks(fwd_hooks=[(own, hook) for own in names]):
                loss, cache = precise.run_with_cache(
                    ids[None], names_filter=seen, return_type="loss"
                )
            losses.append(float(loss))
            sinks.append([[float(h[7:, 0].mean()) for h in cache[own][0]] for own in seen])
        heads = result.heads
        own = heads[(heads["change"] == name) & (heads["draw"] == draw)]
        expected = np.mean(sinks, axis=0).ravel()
        assert own["sinks"].tolist() == pytest.approx(expected.tolist(), abs=2e-4), name
        told = result.summary["loss"] if name == "none" else row_of(result, name, draw)["loss"]
        assert told == pytest.approx(np.mean(losses), rel=1e-3), name
        if name != "none":
            row = row_of(result, name, draw)
            assert row["sink_heads"] == int((expected > 0.3).sum())
            assert row["outlier_mass"] == pytest.approx(own["outlier_mass"].mean())


def test_the_unchanged_model_has_the_sinks_of_the_analysis_and_the_mass_of_outlier_sinks():
    model, tokens = spiked(), spiked_tokens()
    heads = interp.outlier_effects(model, tokens).heads
    own = heads[heads["change"] == "none"]
    sinks = interp.analyze(model, "sinks", tokens).table["sinks"]
    mass = interp.outlier_sinks(model, tokens).table["outlier_sinks"]
    assert own["sinks"].tolist() == pytest.approx(sinks.tolist(), rel=1e-6)
    assert own["outlier_mass"].tolist() == pytest.approx(mass.tolist(), rel=1e-6)
    assert len(heads) == 12 * (1 + 5 + 3 * 3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_detected_coordinates_of_an_architecture_behind_the_bridge_are_changed(name):
    """CASES H11: nothing is fixed per model, and the number of changed cells is returned."""
    hf = getattr(hf_models, name)()
    with torch.no_grad():
        if name == "gpt2":  # whose embedding is its unembedding, too
            hf.transformer.wpe.weight[2, DIMENSION] = SIZE
        else:
            hf.get_input_embeddings().weight[SPIKE, DIMENSION] = SIZE
    tokens = spiked_tokens(2, 12)
    bridged = interp.load_model(hf, backend="bridge")
    result = interp.outlier_effects(bridged, tokens, draws=1)
    assert result.summary["dimensions"] == [DIMENSION]
    n_cells = 2 * (bridged.cfg.n_layers + 1)
    assert row_of(result, "zero")["changed"] == row_of(result, "zero")["cells"] == n_cells
    assert row_of(result, "zero")["loss_change"] != pytest.approx(0, abs=1e-4)
    assert not any(point.has_hooks() for point in bridged.hook_dict.values())
    if name != "gpt_neox":
        ours = interp.outlier_effects(hf_models.native(hf), tokens, draws=1)
        numbers = ["cells", "changed", "loss", "loss_change", "outlier_mass", "sink_heads"]
        for column in numbers:
            assert result.table[column].tolist() == pytest.approx(
                ours.table[column].tolist(), rel=1e-3, abs=1e-4
            ), column


# --- properties ----------------------------------------------------------------------------------


def test_batches_of_unlike_lengths_share_their_means_and_their_error():
    model = spiked()
    with torch.no_grad():
        model.pos_embed.weight[:, DIMENSION] = torch.arange(16.0) * 5
    both = [
        token_inputs(model, spiked_tokens(2, 14)),
        token_inputs(model, spiked_tokens(2, 11).flip(0)),
    ]
    inputs = type(both[0])([*both[0].batches, *both[1].batches], [], "both", {})
    result = outlier_effects_in(model, inputs, draws=1)
    alone = [outlier_effects_in(model, own, draws=1) for own in both]
    whole = row_of(result, "zero")
    assert whole["n"] == 4
    assert whole["loss"] == pytest.approx(np.mean([row_of(a, "zero")["loss"] for a in alone]))
    assert whole["cells"] == sum(row_of(a, "zero")["cells"] for a in alone)
    assert row_of(result, "mean")["changed"] > 0


def test_sequences_one_by_one_or_together_give_the_same_table(monkeypatch):
    model, tokens = spiked(), spiked_tokens()
    whole = interp.outlier_effects(model, tokens)
    monkeypatch.setattr("interp.activations.massive.sequences_at_once", lambda model, n_pos: 1)
    parts = interp.outlier_effects(model, tokens)
    assert whole.table["note"].tolist() == parts.table["note"].tolist()
    for column in ("cells", "changed", "loss", "loss_change", "outlier_mass", "sink_heads"):
        assert parts.table[column].tolist() == pytest.approx(
            whole.table[column].tolist(), rel=1e-4, abs=1e-5
        ), column


def test_a_sequence_without_a_found_token_keeps_its_loss():
    model, tokens = spiked(), spiked_tokens()
    tokens[1] = some_tokens(1, 14, d_vocab=10, seed=9)
    result = interp.outlier_effects(model, tokens)
    assert result.summary["sequences"] == 2
    alone = interp.outlier_effects(model, tokens[[0, 2]])
    for row, own in zip(result.table.itertuples(), alone.table.itertuples(), strict=True):
        if row.change not in DRAWN:
            assert row.loss_change * 3 == pytest.approx(own.loss_change * 2, rel=1e-4, abs=1e-6)


def test_one_seed_gives_one_table_and_another_seed_other_draws():
    model, tokens = spiked(), spiked_tokens()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, same, other = (interp.outlier_effects(model, tokens, seed=s) for s in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    pd.testing.assert_frame_equal(one.table, same.table)
    pd.testing.assert_frame_equal(one.heads, same.heads)
    kept = ~one.table["change"].isin(DRAWN)
    assert one.table[kept].equals(other.table[kept])
    for name in DRAWN:
        drawn = [t["loss"][t["change"] == name].tolist() for t in (one.table, other.table)]
        assert drawn[0] != drawn[1], name
        assert len(set(drawn[0])) == 3, name


def test_the_changes_are_listed_in_order_with_their_meanings():
    result = interp.outlier_effects(spiked(), spiked_tokens(), draws=2)
    assert list(dict.fromkeys(result.table["change"])) == list(MEANINGS)
    assert result.params["changes"] == MEANINGS
    assert result.table["draw"].tolist() == [0] * 5 + [0, 1] * 3


def test_the_model_is_left_as_it_was():
    model, tokens = spiked().train(), spiked_tokens()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = tokens.clone()
    interp.outlier_effects(model, tokens, draws=1)
    assert model.training
    assert torch.equal(tokens, given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(point.has_hooks() for point in model.hook_dict.values())


def test_a_hook_that_fails_leaves_nothing_behind(monkeypatch):
    model, tokens = spiked(), spiked_tokens()

    def fail(values, places):
        def write(x, which):
            raise RuntimeError("no")

        return write

    monkeypatch.setattr("interp.activations.changes._set", fail)
    with pytest.raises(RuntimeError, match="no"):
        interp.outlier_effects(model, tokens)
    assert not any(point.has_hooks() for point in model.hook_dict.values())


def test_a_pruned_model_has_rows_for_the_heads_that_are_left():
    model = prune_heads(spiked("gqa"), [(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)])
    result = interp.outlier_effects(model, spiked_tokens(), draws=1)
    assert len(result.heads) == 9 * 7
    assert result.summary["heads"] == 7
    assert result.params["pruned_heads"] == ["0.1", "1.0", "1.1", "1.2", "1.3"]


def test_a_file_gives_the_result_back(tmp_path):
    result = interp.outlier_effects(spiked(), spiked_tokens(), draws=1)
    table, record, heads = result.save(tmp_path)
    assert (table.name, heads.name) == ("outlier_effects.csv", "outlier_effects_heads.csv")
    again = OutlierEffects.load(record)
    pd.testing.assert_frame_equal(again.table, result.table)
    pd.testing.assert_frame_equal(again.heads, result.heads)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"draws": 0}, "draws = 0: at least one is needed"),
        ({"ratio": -1.0}, "ratio = -1: a threshold is 0 or above"),
        ({"magnitude": 1e6}, "no activation of the residual stream is massive: the largest is 5"),
        ({"magnitude": 0, "ratio": 0}, "all 24 dimensions hold massive activations"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given, said):
    with pytest.raises(AnalysisError, match=said):
        interp.outlier_effects(spiked(), spiked_tokens(), **given)


def test_a_loss_that_is_not_finite_before_any_change_is_refused_and_not_left_out():
    model, tokens = written(), spiked_tokens()
    tokens[0, 3] = 12
    with torch.no_grad():
        model.embed.weight[12, 7] = 1e15
        model.unembed.weight[:, 7] = 1e25
    said = "the loss of the unchanged model is not finite on these tokens"
    with pytest.raises(AnalysisError, match=said):
        interp.outlier_effects(model, tokens)
    with torch.no_grad():
        model.unembed.weight[:] = math.nan
    with pytest.raises(AnalysisError, match=said):
        interp.outlier_effects(model, tokens)


def test_what_has_no_next_token_is_refused():
    tokens = torch.tensor([[SPIKE]])
    model = spiked()
    with pytest.raises(AnalysisError, match="has no next token to predict"):
        interp.outlier_effects(model, tokens)
    bridged = interp.load_model(hf_models.bert(), backend="bridge")
    with pytest.raises(ModelError, match="is an encoder"):
        interp.outlier_effects(bridged, torch.arange(12).reshape(2, 6))
