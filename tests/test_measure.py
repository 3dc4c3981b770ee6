"""Running analyses: clustered errors, heads chosen on one half, nulls, and what is refused."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import perturbed, some_tokens, tiny, tiny_config

import interp
from interp import registry
from interp.data.repeated import TokenBatch, induction_targets, latest_copies
from interp.errors import AnalysisError
from interp.evidence import select_heads, sequence_statistics
from interp.inputs import random_inputs, token_inputs
from interp.measure import measure, null_values, score_heads, score_together, sequence_documents

# Sums of a few float64 numbers in another order.
ROUNDING = 1e-12

# --- standard errors --------------------------------------------------------------------------


def test_sequences_of_one_document_count_as_one_in_the_error():
    """Four copies of each of three numbers: the error is that of the three."""
    three = np.array([0.1, 0.5, 0.9])
    values = np.repeat(three, 4)[None, :, None]
    mean, error, n = sequence_statistics(values, np.repeat(np.arange(3), 4))
    assert (mean.item(), n.item()) == (pytest.approx(0.5), 12)
    assert error.item() == pytest.approx(three.std(ddof=1) / 3**0.5, abs=ROUNDING)
    # As independent sequences they would look twice as sharp.
    assert sequence_statistics(values)[1].item() < 0.6 * error.item()


def test_the_error_of_documents_of_one_sequence_is_the_usual_one():
    values = np.random.default_rng(0).normal(size=(2, 9, 3))
    alone = sequence_statistics(values, np.arange(9)[::-1])[1]
    assert alone == pytest.approx(values.std(axis=1, ddof=1) / 3, abs=ROUNDING)
    assert np.array_equal(alone, sequence_statistics(values)[1])


def test_clustered_errors_are_those_of_a_loop_over_documents_with_gaps():
    rng = np.random.default_rng(1)
    values = rng.normal(size=(2, 20, 3))
    values[rng.random(values.shape) < 0.3] = np.nan
    values[0, :, 2] = np.nan
    documents = rng.integers(5, size=20) * 7
    mean, error, n = sequence_statistics(values, documents)
    for layer, head in np.ndindex(2, 3):
        own = values[layer, :, head]
        real = ~np.isnan(own)
        assert n[layer, head] == real.sum()
        if not real.any():
            assert np.isnan([mean[layer, head], error[layer, head]]).all()
            continue
        average = own[real].mean()
        sums = [
            (own[real & (documents == document)] - average).sum()
            for document in np.unique(documents[real])
        ]
        c = len(sums)
        expected = np.sqrt(c / (c - 1) * np.square(sums).sum()) / real.sum()
        assert mean[layer, head] == pytest.approx(average, abs=ROUNDING)
        assert error[layer, head] == pytest.approx(expected, abs=ROUNDING)


def test_a_single_document_has_a_mean_and_no_error():
    mean, error, n = sequence_statistics(np.ones((1, 6, 1)), np.zeros(6, dtype=int))
    assert (mean.item(), n.item()) == (1.0, 6)
    assert np.isnan(error.item())


def test_sequences_without_documents_are_their_own():
    tokens = some_tokens(3, 5)
    batch = TokenBatch(tokens, torch.full_like(tokens, -1))
    assert sequence_documents([batch, batch]).tolist() == [0, 1, 2, 3, 4, 5]
    read = TokenBatch(tokens, batch.targets, documents=torch.tensor([4, 4, 9]))
    assert sequence_documents([read]).tolist() == [4, 4, 9]


# --- heads selected on one half ---------------------------------------------------------------


def selected(values, null, effect=0.1, documents=None):
    """What `select_heads` makes of `[sequence, head]` values and one null for each head."""
    values = np.asarray(values, dtype=float)[None]
    documents = np.arange(values.shape[1]) if documents is None else np.asarray(documents)
    nulls = np.broadcast_to(np.asarray(null, dtype=float), values.shape)
    table = pd.DataFrame({"score": values.mean(axis=1).ravel(), "score_null": null})
    select_heads(table, values, nulls, documents, "score", effect)
    return table["selected"].tolist(), table["score_held_out"].tolist()


def test_a_head_is_chosen_on_one_half_and_estimated_on_the_other():
    # Sequences 0 and 2 choose, 1 and 3 estimate.
    rows = [[0.9, 0.0], [0.4, 0.8], [0.7, 0.0], [0.2, 0.6]]
    chosen, held_out = selected(rows, [0.1, 0.1])
    assert chosen == [True, False]
    assert held_out == pytest.approx([0.3, 0.7])


def test_a_head_has_to_pass_the_largest_null_of_any_head():
    rows = [[0.5, 0.5]] * 4
    assert selected(rows, [0.0, 0.0])[0] == [True, True]
    assert selected(rows, [0.0, 0.6])[0] == [False, False]
    # Above the largest null, but the second head is hardly above its own.
    assert selected(rows, [0.0, 0.45])[0] == [True, False]


def test_an_effect_of_exactly_the_bound_counts_and_less_does_not():
    rows = [[0.75, 0.7]] * 2
    assert selected(rows, [0.25, 0.25], effect=0.5)[0] == [True, False]


def test_documents_are_never_split_between_the_halves():
    rows = [[1.0], [1.0], [0.0], [0.0], [1.0], [0.0]]
    chosen, held_out = selected(rows, [0.0], documents=[5, 5, 8, 8, 5, 8])
    assert (chosen, held_out) == ([True], [0.0])


def test_one_sequence_selects_nothing():
    assert selected([[1.0]], [0.0])[0] == [False]
    model = tiny("mha")
    scores = interp.analyze(model, "previous-token", [[1, 2, 3, 4]])
    assert not scores.table["selected"].any()
    assert scores.table["previous_token_held_out"].isna().all()


def test_selection_is_printed_with_its_threshold_which_is_a_parameter():
    model = tiny("mha")
    tokens = some_tokens(8, 14, d_vocab=5)
    every = interp.analyze(model, "previous-token", tokens, effect=-1.0)
    assert every.params["effect"] == -1.0
    assert every.params["called"] == "previous-token head"
    null = every.table["previous_token_null"]
    assert every.summary["largest_null"] == null.max()
    assert every.summary["selected"] == every.table["selected"].sum()
    none = interp.analyze(model, "previous-token", tokens, effect=2.0)
    assert none.summary["selected"] == 0


@pytest.mark.parametrize("name", ["induction", "previous-token", "sinks"])
def test_an_untrained_model_has_no_head_worth_a_name(name):
    for seed in range(3):
        model = interp.Transformer(tiny_config(n_ctx=128, d_vocab=200), seed=seed)
        scores = interp.analyze(model, name)
        assert scores.summary["selected"] == 0


# --- nulls, parameters, finish ----------------------------------------------------------------


def constant(attention, batch, *, level: float = 0.5, **_):
    shape = (len(batch.tokens), attention.n_heads)
    return {"made_up": torch.full(shape, level), "beside": torch.full(shape, 2.0)}


def made_up(null="uniform", measured=constant, **more):
    parameters = (registry.Parameter("level", float, 0.5),)
    return registry.Analysis(
        "made-up", "1", null, measured, parameters=parameters, params={"level": 0.5}, **more
    )


def test_parameters_reach_the_measure_and_stand_in_the_result():
    model = tiny("mha")
    inputs = token_inputs(model, some_tokens(2, 6))
    scores = score_heads(model, made_up().with_params({"level": 0.25}), inputs)
    assert scores.table["made_up"].tolist() == [0.25] * 8
    assert scores.table["beside"].tolist() == [2.0] * 8
    assert scores.params["level"] == 0.25
    assert "selected" not in scores.table


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"levle": 1.0}, "made-up has no parameter 'levle'; did you mean 'level'? it has level"),
        ({"level": "much"}, "level = 'much' should be of type float"),
        ({"level": True}, "level = True should be of type float"),
    ],
)
def test_a_parameter_that_is_not_there_or_of_another_type_is_refused(given, message):
    with pytest.raises(AnalysisError) as refused:
        made_up().with_params(given)
    assert str(refused.value) == message


def test_a_whole_number_is_a_number():
    assert made_up().with_params({"level": 1}).params["level"] == 1.0


def test_an_analysis_may_tell_its_own_null():
    def own(attention, batch):
        shape = (len(batch.tokens), attention.n_heads)
        return {"made_up": torch.ones(shape), "made_up_null": torch.full(shape, 0.125)}

    model = tiny("mha")
    inputs = token_inputs(model, some_tokens(2, 6))
    scores = score_heads(model, made_up("own", own), inputs)
    assert scores.table["made_up_null"].tolist() == [0.125] * 8
    with pytest.raises(AnalysisError, match="returned no column 'made_up_null', its null"):
        score_heads(model, made_up("own"), inputs)


def test_finish_sees_every_sequence_and_adds_columns_and_figures():
    def counting(attention, batch):
        shape = (len(batch.tokens), attention.n_heads)
        return {
            "made_up": torch.ones(shape),
            "counts": torch.ones((*shape, 3), dtype=torch.int16) * attention.layer,
        }

    def finish(found):
        assert found.columns["counts"].shape == (2, 2, 4, 3)
        assert found.columns["counts"].dtype == np.int16
        text = [[found.token_text(7)] * 4] * 2
        return {"total": found.columns["counts"].sum(axis=(1, 3)), "text": text}, {"figure": 1}

    model = tiny("mha")
    scores = score_heads(
        model, made_up(measured=counting, finish=finish), token_inputs(model, some_tokens(2, 6))
    )
    assert scores.table["total"].tolist() == [0] * 4 + [6] * 4
    assert scores.table["text"].tolist() == ["7"] * 8
    assert "counts" not in scores.table
    assert scores.summary["figure"] == 1


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({}, "returned the columns []; the first has to be 'made_up'"),
        ({"other": torch.ones(2, 4)}, "returned the columns ['other']"),
        ({"made_up": torch.ones(4, 2)}, "returned [4, 2] for 'made_up'"),
        ({"made_up": torch.ones(2)}, "returned [2] for 'made_up'"),
        ({"made_up": 1.0}, "returned float for 'made_up'"),
        (
            {"made_up": torch.ones(2, 4), "layer": torch.ones(2, 4)},
            "returned the columns ['layer'], which every table has: rename them",
        ),
    ],
)
def test_an_analysis_that_returns_something_else_is_told_what_is_wrong(returned, message):
    model = tiny("mha")
    analysis = made_up(measured=lambda attention, batch: returned)
    with pytest.raises(AnalysisError) as refused:
        measure(model, [analysis], token_inputs(model, some_tokens(2, 6)).batches)
    assert message in str(refused.value)


def test_the_uniform_null_keeps_to_each_layers_window():
    """An even head looks back as far as its layer lets it."""
    model = tiny("rotary", attention={"window": 4, "windowed_layers": [1]})
    inputs = random_inputs(model, seed=0)
    windows = [block.attn.window for block in model.blocks]
    analysis = registry.get("previous-token")
    values = measure(model, [analysis], inputs.batches)
    null = null_values(model, [analysis], inputs, values)["previous-token"]
    (batch,) = inputs.batches
    n_pos = batch.tokens.shape[1]
    for layer, window in enumerate(windows):
        expected = np.mean([1 / min(q + 1, window or n_pos) for q in range(1, n_pos)])
        assert null[layer] == pytest.approx(np.full_like(null[layer], expected), abs=1e-6)
    assert windows == [None, 4]


def test_scores_together_are_those_one_by_one_to_the_bit():
    model = perturbed(tiny_config(n_ctx=64, d_vocab=100))
    inputs = random_inputs(model)
    names = ["induction", "previous-token", "sinks"]
    analyses = [registry.get(name) for name in names]
    for scores in score_together(model, analyses, inputs):
        alone = interp.analyze(model, scores.analysis)
        assert scores.to_json() == alone.to_json()


# --- where tokens stood before ------------------------------------------------------------------


def test_targets_of_a_pair_twice_do_not_wrap_around():
    tokens = torch.tensor([[4, 5, 4, 5]])
    assert latest_copies(tokens).tolist() == [[-1, -1, 0, 1]]
    assert induction_targets(tokens).tolist() == [[-1, -1, 1, 2]]
    # The second x directly follows the first: its target would be itself.
    assert induction_targets(torch.tensor([[4, 4, 6]])).tolist() == [[-1, -1, -1]]


def test_latest_copies_are_those_of_a_loop_and_padding_has_none():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        tokens = torch.randint(4, (3, 13), generator=generator)
        mask = torch.rand(3, 13, generator=generator) < 0.7
        found = latest_copies(tokens, mask)
        for row, q in np.ndindex(3, 13):
            before = [k for k in range(q) if mask[row, k] and tokens[row, k] == tokens[row, q]]
            expected = before[-1] if before and mask[row, q] else -1
            assert found[row, q] == expected


# --- padding and BOS never count (two rows of six and three tokens) ---------------------------


def rows_of_six_and_three(side, pad):
    """BOS = 0 leads both; the second row has three tokens and padding."""
    long, short = [0, 5, 6, 5, 6, 7], [0, 5, 5]
    if side == "left":
        return [long, [pad] * 3 + short], [[1] * 6, [0, 0, 0, 1, 1, 1]]
    return [long, [*short, pad, pad, pad]], [[1] * 6, [1, 1, 1, 0, 0, 0]]


COLUMN_NAMES = ["previous-token", "induction", "duplicate-token", "entropy", "distance"]


@pytest.mark.parametrize("exclude_bos", [False, True])
@pytest.mark.parametrize("name", COLUMN_NAMES)
def test_means_do_not_depend_on_what_padding_holds_or_on_its_side(name, exclude_bos):
    model = tiny("rotary", bos_token_id=0)
    found = []
    for side in ("left", "right"):
        for pad in (0, 3, 5):
            tokens, mask = rows_of_six_and_three(side, pad)
            scores = interp.analyze(
                model,
                name,
                tokens,
                attention_mask=torch.tensor(mask),
                exclude_bos=exclude_bos,
            )
            found.append(scores.table.select_dtypes("number").to_numpy())
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_bos_that_is_left_out_is_no_query_and_no_key_wherever_it_stands(side):
    model = tiny("gqa", bos_token_id=0)
    tokens, mask = rows_of_six_and_three(side, 3)
    mask = torch.tensor(mask)
    _, cache = model.run_with_cache(torch.tensor(tokens), attention_mask=mask)
    scores = {
        name: interp.analyze(model, name, tokens, attention_mask=mask, exclude_bos=True).table
        for name in ("previous-token", "entropy")
    }
    for layer in range(2):
        pattern = cache["pattern", layer].double().numpy()
        for head in range(4):
            previous, entropies = [], []
            for b in range(2):
                real = [q for q in range(6) if mask[b, q]]
                after_bos = real[1:]
                pairs = list(itertools.pairwise(after_bos))
                previous.append(np.mean([pattern[b, head, q, k] for k, q in pairs]))
                rows = [pattern[b, head, q][real] for q in after_bos]
                entropies.append(
                    np.mean([-(row[row > 0] * np.log(row[row > 0])).sum() for row in rows])
                )
            place = (scores["entropy"]["layer"] == layer) & (scores["entropy"]["head"] == head)
            assert scores["previous-token"].loc[place, "previous_token"].item() == pytest.approx(
                np.mean(previous), abs=1e-5
            )
            assert scores["entropy"].loc[place, "entropy"].item() == pytest.approx(
                np.mean(entropies), abs=1e-5
            )


def test_leaving_bos_out_is_said_and_needs_one():
    tokens = [[0, 1, 2, 1, 2]]
    scores = interp.analyze(tiny("mha", bos_token_id=0), "entropy", tokens, exclude_bos=True)
    assert scores.inputs.endswith("; BOS left out of every mean")
    assert scores.params["exclude_bos"] is True
    with pytest.raises(AnalysisError, match="custom has no BOS token to leave out"):
        interp.analyze(tiny("mha"), "entropy", tokens, exclude_bos=True)


def test_sinks_without_bos_are_those_on_the_first_token_after_it():
    model = tiny("mha", bos_token_id=0)
    tokens = torch.cat((torch.zeros(2, 1).long(), some_tokens(2, 13) % 18 + 1), dim=1)
    _, cache = model.run_with_cache(tokens)
    table = interp.analyze(model, "sinks", tokens, exclude_bos=True).table
    # Queries with eight keys after BOS.
    expected = cache["pattern", 0].double()[:, :, 8:, 1].mean(dim=(0, 2))
    np.testing.assert_allclose(table["sinks"][:4], expected, atol=1e-6)
