"""Every metric against loops over float64 logits, and the logits at places that it is made of."""

import copy
import itertools
import math

import numpy as np
import pytest
import reference
import torch
from tiny_models import D_VOCAB, error, oracle, padding, some_tokens, tiny

import interp
from interp.ablation import metrics as metrics_module
from interp.ablation.interventions import Intervention
from interp.ablation.metrics import (
    METRICS,
    LogitsFunction,
    Metric,
    logit_difference,
    loss_function,
    loss_metric,
)
from interp.ablation.passes import chunks, passes
from interp.errors import AnalysisError
from interp.inputs import token_inputs, without_bos
from interp.models import place_logits
from interp.models.place_logits import HeldLogits, UnembeddedLogits

# Float32 logits of two layers err by about 1e-6 of the largest; a sum over them as much again.
FLOAT32 = 1e-5
SIDES = pytest.mark.parametrize("side", ["none", "left", "right"])
LENGTHS = (9, 5, 7)


def repeating(*, bos=False):
    """Sequences in which pairs of tokens do repeat, of tokens other than 0 but for a BOS."""
    tokens = some_tokens(3, 9, d_vocab=4) + 1
    tokens[0] = torch.tensor([1, 2, 3, 1, 4, 2, 3, 1, 2])
    if bos:
        tokens[:, 4] = 0  # inside the padded ones where they are padded on the left
    return tokens


def real_places(tokens, mask):
    """The columns of each sequence's real tokens, in their order."""
    return [
        [p for p in range(tokens.shape[1]) if mask is None or mask[row, p]]
        for row in range(len(tokens))
    ]


def without_head(model, layer, head):
    """A model whose head writes nothing, because its part of the output weight is 0."""
    silent = copy.deepcopy(model)
    width = model.cfg.d_head
    with torch.no_grad():
        weight = silent.blocks[layer].attn.o_proj.weight
        weight[:, head * width : (head + 1) * width] = 0
    return silent


def measured(model, inputs, metric, head=(0, 1)):
    """The metric of each sequence, clean and with one head ablated."""
    (chunk,) = chunks(model, inputs.batches)
    with torch.no_grad():
        run = passes(model, chunk, metric)
        ((ablated, _),) = run.ablated([Intervention((head,))])
    return run.clean.numpy(), ablated.numpy()


def mean_over(rows):
    """The mean of each row's values, NaN where it has none."""
    return np.array([sum(row) / len(row) if row else np.nan for row in rows])


def log_probs(row):
    return row - reference._log_sum_exp(row)


# --- what each metric is --------------------------------------------------------------------


def by_hand(name, logits, clean, tokens, mask, counted):
    """Each sequence's metric from its definition."""
    rows = []
    for row, real in enumerate(real_places(tokens, mask)):
        ids, values = tokens[row].tolist(), []
        pairs = [(p, q) for p, q in itertools.pairwise(real) if q == p + 1]
        for p, q in pairs:
            if not (counted[row][p] and counted[row][q]):
                continue
            own = log_probs(logits[row, p])
            if name in ("loss", "last-token"):
                value = -own[ids[q]]
            elif name == "second-copy-loss":
                copies = [j for j in real if j < p and ids[j] == ids[p]]
                # The token behind the latest copy has to come next; right before p that is p.
                if not copies or copies[-1] + 1 == p or ids[copies[-1] + 1] != ids[q]:
                    continue
                value = -own[ids[q]]
            elif name == "kl":
                before = log_probs(clean[row, p])
                value = sum(math.exp(b) * (b - a) for b, a in zip(before, own, strict=True))
            else:
                assert name == "accuracy"
                value = float(int(np.argmax(logits[row, p])) == ids[q])
            values.append((q, value))
        if name == "last-token":
            values = [(q, value) for q, value in values if q == real[-1]]
        rows.append([value for _, value in values])
    return mean_over(rows)


@SIDES
@pytest.mark.parametrize("exclude_bos", [False, True])
@pytest.mark.parametrize("name", list(METRICS))
def test_a_metric_is_its_definition_in_float64(name, exclude_bos, side):
    model = tiny("gqa", bos_token_id=0)
    tokens = repeating(bos=exclude_bos)
    mask = padding(side, LENGTHS, 9)
    inputs = token_inputs(model, tokens, mask)
    counted = np.ones((3, 9), dtype=bool)
    if exclude_bos:
        inputs = without_bos(model, inputs)
        counted = tokens.numpy() != 0
    clean = oracle(model, tokens, mask)["logits"]
    ablated = oracle(without_head(model, 0, 1), tokens, mask)["logits"]
    found = measured(model, inputs, METRICS[name])
    for own, logits in zip(found, (clean, ablated), strict=True):
        expected = by_hand(name, logits, clean, tokens, mask, counted)
        np.testing.assert_allclose(own, expected, atol=FLOAT32)
    if name == "kl":
        assert found[0] == pytest.approx(0, abs=FLOAT32)
        assert (found[1] > 0.01).all()
    assert not np.isnan(found[0]).all()


@SIDES
def test_the_logit_difference_is_read_after_the_last_token(side):
    model, tokens = tiny("gqa"), some_tokens(3, 9)
    mask = padding(side, LENGTHS, 9)
    inputs = token_inputs(model, tokens, mask)
    clean = oracle(model, tokens, mask)["logits"]
    ablated = oracle(without_head(model, 0, 1), tokens, mask)["logits"]
    last = [real[-1] for real in real_places(tokens, mask)]
    for answers, others in (([4, 5, 6], [7, 7, 1]), ([3, 3, 3], [8, 8, 8]), ([2, 9, 4], [1, 1, 1])):
        one_answer, one_other = (len(set(ids)) == 1 for ids in (answers, others))
        metric = logit_difference(
            answers[0] if one_answer else torch.tensor(answers),
            others[0] if one_other else torch.tensor(others),
        )
        found = measured(model, inputs, metric)
        for own, logits in zip(found, (clean, ablated), strict=True):
            expected = [
                logits[row, last[row], answers[row]] - logits[row, last[row], others[row]]
                for row in range(3)
            ]
            assert error(own, np.array(expected)) < FLOAT32


def test_answers_follow_their_sequences_into_every_part_of_the_data():
    """More sequences than go through the model together."""
    model, tokens = tiny("mha"), some_tokens(18, 9)
    answers, others = some_tokens(18, 1, seed=1)[:, 0], some_tokens(18, 1, seed=2)[:, 0]
    table = interp.ablate(
        model,
        tokens,
        metric="logit-diff",
        answer=answers.tolist(),
        against=others.tolist(),
        heads="0.1",
    ).table
    logits = oracle(model, tokens)["logits"][:, -1]
    expected = np.mean([logits[n, answers[n]] - logits[n, others[n]] for n in range(18)])
    assert table["logit_diff_clean"][0] == pytest.approx(expected, abs=FLOAT32)


@pytest.mark.parametrize("n_answers", [2, 4])
def test_as_many_answers_as_sequences_are_needed(n_answers):
    model, tokens = tiny("mha"), some_tokens(3, 9)
    with pytest.raises(AnalysisError) as caught:
        interp.ablate(model, tokens, metric="logit-diff", answer=list(range(n_answers)), against=5)
    assert str(caught.value) == f"{n_answers} answers were given for 3 sequences"


# --- where it reads -------------------------------------------------------------------------

CHOSEN = [
    ([0], [0]),
    ([-1], [-1]),
    ([1, -2], [1, -2]),
    ([slice(2, None)], range(2, 99)),
    ([slice(None, 2), 3], [0, 1, 3]),
    ([slice(-2, None)], [-2, -1]),
    ([slice(0, None, 3)], [0, 3, 6]),
]


@SIDES
@pytest.mark.parametrize(("positions", "numbers"), CHOSEN)
def test_positions_number_the_predictions_of_each_sequence_from_either_end(
    positions, numbers, side
):
    model, tokens = tiny("gqa"), some_tokens(3, 9)
    mask = padding(side, (9, 4, 6), 9)
    logits = oracle(model, tokens, mask)["logits"]
    rows = []
    for row, real in enumerate(real_places(tokens, mask)):
        pairs = list(itertools.pairwise(real))
        chosen = {n % len(pairs) for n in numbers if -len(pairs) <= n < len(pairs)}
        rows.append(
            [
                -log_probs(logits[row, pairs[n][0]])[int(tokens[row, pairs[n][1]])]
                for n in sorted(chosen)
            ]
        )
    clean, _ = measured(model, token_inputs(model, tokens, mask), loss_metric(positions))
    np.testing.assert_allclose(clean, mean_over(rows), atol=FLOAT32)


def test_results_tell_which_positions_were_read():
    given = [3, -1, slice(2, None), slice(None, 5), slice(0, 8, 2)]
    assert loss_metric(given).params == {"positions": [3, -1, "2:", ":5", "0:8:2"]}


def test_a_position_whose_token_is_left_out_reads_nothing():
    model = tiny("mha", bos_token_id=0)
    tokens = some_tokens(3, 9) % (D_VOCAB - 1) + 1
    tokens[:2, 0] = 0
    inputs = without_bos(model, token_inputs(model, tokens))
    clean, _ = measured(model, inputs, loss_metric([0]))
    assert np.isnan(clean).tolist() == [True, True, False]


def test_sequences_without_a_place_are_left_out_of_the_mean():
    model, tokens = tiny("mha"), some_tokens(4, 9)
    mask = padding("right", (9, 1, 4, 1), 9)
    result = interp.ablate(model, tokens, attention_mask=mask)
    alone = interp.ablate(model, tokens[[0, 2]], attention_mask=mask[[0, 2]])
    assert result.table["n"].eq(2).all()
    assert error(result.table.to_numpy(float), alone.table.to_numpy(float)) < FLOAT32
    assert result.summary["loss_clean"] == pytest.approx(alone.summary["loss_clean"], abs=FLOAT32)


@pytest.mark.parametrize(
    ("tokens", "mask"),
    [([[1]], None), ([[1, 2, 3], [1, 2, 3]], [[1, 0, 0], [0, 0, 1]])],
    ids=["one_token", "one_real_token"],
)
def test_a_metric_that_reads_nowhere_is_refused(tokens, mask):
    mask = None if mask is None else torch.tensor(mask)
    with pytest.raises(AnalysisError) as caught:
        interp.ablate(tiny("mha"), tokens, attention_mask=mask)
    assert str(caught.value) == (
        "the metric loss is defined nowhere in these sequences: no place is read"
    )


def test_slices_of_places_do_not_change_a_metric(monkeypatch):
    model, tokens = tiny("gqa"), repeating()
    inputs = token_inputs(model, tokens)
    whole = {name: measured(model, inputs, metric) for name, metric in METRICS.items()}
    monkeypatch.setattr(metrics_module, "PLACES", 5)
    monkeypatch.setattr(metrics_module, "SLICE_NUMBERS", 3 * D_VOCAB)
    monkeypatch.setattr(place_logits, "VOCABULARY_TILE", 4)
    for name, metric in METRICS.items():
        for own, expected in zip(measured(model, inputs, metric), whole[name], strict=True):
            np.testing.assert_allclose(own, expected, atol=FLOAT32)


# --- the user's own -------------------------------------------------------------------------


def test_a_function_of_the_logits_gets_all_of_them_and_the_batch():
    model, tokens = tiny("gqa"), some_tokens(18, 9)  # more than go through the model together
    mask = padding("left", [9, 5, 7] * 6, 9)
    seen = []

    def largest(logits, batch):
        assert not logits.requires_grad
        seen.append((logits, batch))
        return logits[:, -1].amax(dim=1)

    result = interp.ablate(
        model, tokens, attention_mask=mask, metric=largest, heads="0.1", direct=False
    )
    clean = oracle(model, tokens, mask)["logits"]
    ablated = oracle(without_head(model, 0, 1), tokens, mask)["logits"]
    first, batch = seen[0]
    assert first.shape == (*batch.tokens.shape, D_VOCAB)
    assert error(first, clean[: len(first)]) < FLOAT32
    assert torch.equal(batch.tokens, tokens[: len(first)])
    top = [logits[:, -1].max(axis=1) for logits in (clean, ablated)]
    row = result.table.iloc[0]
    assert row["ablation"] == pytest.approx((top[1] - top[0]).mean(), abs=FLOAT32)
    assert row["largest_clean"] == pytest.approx(top[0].mean(), abs=FLOAT32)
    assert (result.params["metric"], result.unit) == ("largest", "")


@pytest.mark.parametrize(
    ("value", "told"),
    [(lambda logits: logits.mean(), "[]"), (lambda logits: logits[0], "[9, 19]"), (float, "float")],
)
def test_a_function_that_gives_no_number_for_each_sequence_is_refused(value, told):
    def wrong(logits, batch):
        return value(logits) if value is not float else 1.0

    with pytest.raises(AnalysisError) as caught:
        interp.ablate(tiny("mha"), some_tokens(2, 9), metric=LogitsFunction(wrong, "wrong"))
    assert str(caught.value) == (
        f"the metric wrong returned {told}; one number for each of the 2 sequences is needed"
    )


@SIDES
def test_a_function_of_the_losses_sees_one_for_each_next_token_and_nan_elsewhere(side):
    model, tokens = tiny("gqa"), some_tokens(3, 9)
    mask = padding(side, LENGTHS, 9)
    seen = []

    def later(losses):
        seen.append(losses)
        return losses[:, 4:].nanmean(dim=1)

    clean, _ = measured(model, token_inputs(model, tokens, mask), loss_function(later, "later"))
    logits = oracle(model, tokens, mask)["logits"]
    expected = np.full((3, 8), np.nan)
    for row, real in enumerate(real_places(tokens, mask)):
        for p, q in itertools.pairwise(real):
            expected[row, p] = -log_probs(logits[row, p])[int(tokens[row, q])]
    np.testing.assert_allclose(seen[0].numpy(), expected, atol=FLOAT32)
    np.testing.assert_allclose(
        clean, mean_over([[v for v in row[4:] if v == v] for row in expected]), atol=FLOAT32
    )


def test_a_metric_of_ones_own_is_read_where_it_says():
    model, tokens = tiny("gqa"), some_tokens(3, 9)
    third = Metric(
        "third",
        "logits",
        lambda batch: (torch.arange(9) == 2).expand(batch.tokens.shape),
        lambda reading: reading.logits.of(torch.zeros_like(reading.next_tokens)),
    )
    clean, ablated = measured(model, token_inputs(model, tokens), third)
    assert error(clean, oracle(model, tokens)["logits"][:, 2, 0]) < FLOAT32
    silent = oracle(without_head(model, 0, 1), tokens)["logits"]
    assert error(ablated, silent[:, 2, 0]) < FLOAT32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"metric": "perplexity"},
            "no metric 'perplexity'; known: loss, second-copy-loss, last-token, kl, accuracy, "
            "logit-diff",
        ),
        (
            {"metric": "logit-diff"},
            "logit-diff needs the tokens of an answer and of one against it",
        ),
        (
            {"metric": "loss", "answer": 1, "against": 2},
            "answer and against go together, and belong to logit-diff",
        ),
        (
            {"metric": "logit-diff", "answer": 1},
            "answer and against go together, and belong to logit-diff",
        ),
        ({"metric": "kl", "positions": [1]}, "positions belong to the metric loss"),
        (
            {"metric": "logit-diff", "answer": 19, "against": 2},
            "answers should be within 0 and d_vocab - 1 = 18",
        ),
        (
            {"metric": "logit-diff", "answer": 2**70, "against": 2},
            "answers are token ids, or text: Overflow when unpacking long long",
        ),
    ],
)
def test_settings_of_another_metric_are_refused(given, message):
    with pytest.raises(AnalysisError) as caught:
        interp.ablate(tiny("mha"), some_tokens(2, 5), **given)
    assert str(caught.value) == message


# --- logits at places -----------------------------------------------------------------------


def unembedded(n_places=3, d_vocab=2 * place_logits.VOCABULARY_TILE + 5, *, bias, dtype, scale=1.0):
    """Logits of random numbers, and the same in float64 from the same rounded parts."""
    generator = torch.Generator().manual_seed(0)
    final = scale * torch.randn(n_places, 8, generator=generator)
    weight = torch.randn(d_vocab, 8, generator=generator)
    own_bias = torch.randn(d_vocab, generator=generator) if bias else None
    final, weight = final.to(dtype), weight.to(dtype)
    own_bias = None if own_bias is None else own_bias.to(dtype)
    exact = final.double().numpy() @ weight.double().numpy().T
    if own_bias is not None:
        exact = exact + own_bias.double().numpy()
    return UnembeddedLogits(final, weight, own_bias), exact


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_places", [1, 3])
@pytest.mark.parametrize("d_vocab", [3, place_logits.VOCABULARY_TILE, 2 * 2048 + 5])
def test_tiles_of_the_vocabulary_give_the_logits_of_whole_rows(d_vocab, n_places, bias):
    logits, exact = unembedded(n_places, d_vocab, bias=bias, dtype=torch.float32)
    assert error(logits.all(), exact) < FLOAT32
    sums = np.array([reference._log_sum_exp(row) for row in exact])
    assert error(logits.logsumexp(), sums) < FLOAT32
    tokens = torch.tensor([d_vocab - 1, 0, d_vocab // 2][:n_places])
    picked = exact[np.arange(n_places), tokens.numpy()]
    assert error(logits.of(tokens), picked) < FLOAT32
    held = HeldLogits(torch.from_numpy(exact).float())
    assert error(held.logsumexp(), sums) < FLOAT32
    assert error(held.of(tokens), picked) < FLOAT32


@pytest.mark.parametrize("bias", [False, True])
def test_bfloat16_logits_are_reduced_in_float32(bias):
    logits, exact = unembedded(bias=bias, dtype=torch.bfloat16)
    assert logits.all().dtype == logits.logsumexp().dtype == torch.float32
    sums = np.array([reference._log_sum_exp(row) for row in exact])
    # A bfloat16 product errs by 2^-9 of each logit; summed in bfloat16 too, 4101 terms would be
    # off by whole units.
    assert error(logits.logsumexp(), sums) < 2**-7
    tokens = torch.tensor([4100, 0, 2050])
    assert error(logits.of(tokens), exact[np.arange(3), tokens.numpy()]) < FLOAT32


def test_huge_logits_do_not_overflow():
    logits, exact = unembedded(bias=False, dtype=torch.float32, scale=1e6)
    assert np.abs(exact).max() > 1e6
    assert logits.logsumexp().isfinite().all()
    assert error(logits.logsumexp(), exact.max(axis=1)) < FLOAT32
    losses = logits.logsumexp() - logits.of(torch.from_numpy(exact.argmax(axis=1)))
    # The difference of two numbers of 1e7 in float32.
    assert losses.abs().max() <= 4e-7 * np.abs(exact).max()


def test_one_vocabulary_entry_has_the_log_sum_exp_of_itself():
    logits, exact = unembedded(2, 1, bias=True, dtype=torch.float32)
    assert error(logits.logsumexp(), exact[:, 0]) < FLOAT32
