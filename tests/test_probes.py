"""Probes: which losses count for what, and that measuring changes nothing."""

import itertools
import math

import numpy as np
import pytest
import torch
from tiny_models import some_tokens, tiny

from interp.config import ProbeConfig, RepeatedDataConfig
from interp.data.repeated import RepeatedStream, repeated_tokens
from interp.measure import analyze
from interp.models.losses import next_token_losses
from interp.training.probes import IclScore, Probe, copy_losses, split_copies, token_losses
from interp.training.run_folder import HEAD_COLUMNS

# Float32 sums in another order differ by about 1e-6 of losses of order 3.
FLOAT32 = 1e-5
N, V = 8, 64


def oracle_logits(tokens, known):
    """Logits that are sure of the next token at the positions `known`, and uniform elsewhere."""
    logits = torch.zeros(*tokens.shape, V)
    for p in known:
        logits[range(len(tokens)), p, tokens[:, p + 1]] = 100.0
    return logits


# --- which losses count ---------------------------------------------------------------------


@pytest.mark.parametrize("bos", [None, 0], ids=["no_bos", "bos"])
def test_an_oracle_of_the_predictable_tokens_has_no_loss_on_the_second_copy(bos):
    """The predictable tokens of the second copy are n - 1: its first one is a surprise."""
    batch = repeated_tokens(3, N, V, seed=0, bos=bos)
    lead = int(bos is not None)
    # Element p predicts token p + 1; tokens n + lead + 1 .. 2n + lead - 1 can be known.
    known = range(N + lead, 2 * N + lead - 1)
    assert len(known) == N - 1
    losses = next_token_losses(oracle_logits(batch.tokens, known), batch.tokens)
    assert losses.shape == (3, 2 * N + lead - 1)
    first, second = split_copies(losses, batch)
    assert second < 1e-6
    assert first == pytest.approx(math.log(64), abs=1e-6)
    assert first == pytest.approx(4.1589, abs=1e-4)


@pytest.mark.parametrize("bos", [None, 0], ids=["no_bos", "bos"])
def test_one_index_more_on_either_side_would_show(bos):
    batch = repeated_tokens(1, N, V, seed=0, bos=bos)
    lead = int(bos is not None)
    n_losses = 2 * N + lead - 1
    for index in range(n_losses):
        losses = torch.zeros(1, n_losses)
        losses[0, index] = 1.0
        first, second = split_copies(losses, batch)
        # Without BOS nothing predicts r_1, so the first copy has one loss less.
        assert first == pytest.approx((index < N + lead - 1) / (N + lead - 1), abs=1e-7)
        assert second == pytest.approx((index >= N + lead) / (N - 1), abs=1e-7)
    # Counting the surprise among n losses would give at least this.
    assert math.log(64) / N == pytest.approx(0.52, abs=5e-3)


def test_copy_losses_are_those_of_the_model():
    model = tiny("mha", bos_token_id=0)
    batch = repeated_tokens(20, 6, 19, seed=0, bos=0)  # more than one forward pass holds
    losses = model(batch.tokens, return_type="loss", loss_per_token=True)
    first, second = copy_losses(model, batch)
    assert first == pytest.approx(losses[:, :6].mean().item(), abs=FLOAT32)
    assert second == pytest.approx(losses[:, 7:12].mean().item(), abs=FLOAT32)
    assert token_losses(model, batch.tokens).shape == (20, 12)


def test_the_icl_score_is_late_minus_early_at_positions_counted_as_documented():
    """Position p is where token p is predicted: its loss is element p - 1."""
    losses = torch.arange(1.0, 16.0)[None]  # element p - 1 holds p
    assert IclScore((2, 2), (9, 9))(losses).tolist() == [7.0]
    assert IclScore((1, 3), (10, 15))(losses).tolist() == [12.5 - 2.0]
    assert IclScore((1, 15), (1, 15))(losses).tolist() == [0.0]


def test_the_icl_score_is_below_zero_where_context_helps_and_has_one_value_a_sequence():
    falling = torch.linspace(5, 1, 15).expand(3, -1)
    score = IclScore((1, 2), (14, 15))(falling)
    assert score.shape == (3,)
    assert (score < 0).all()


# --- a probe of a model ---------------------------------------------------------------------


def made_probe(model, sequences=20, blocks=(4, 6)):
    config = ProbeConfig(icl_early=(1, 3), icl_late=(10, 15), blocks=blocks, repeats=3)
    stream = RepeatedStream(
        RepeatedDataConfig(span=(3, 6)), model.cfg.n_ctx, model.cfg.d_vocab, model.cfg.bos_token_id
    )
    held_out = stream.held_out(sequences)
    return Probe(config, model.config, held_out), held_out


@pytest.mark.parametrize("bos", [None, 0])
def test_metrics_equal_those_computed_from_the_losses(bos):
    model = tiny("shortformer", bos_token_id=bos)
    probe, held_out = made_probe(model)
    metrics = probe.measure(model).metrics
    losses = model(held_out, return_type="loss", loss_per_token=True).double().detach().numpy()
    early, late = losses[:, 0:3].mean(), losses[:, 9:15].mean()
    known = np.zeros(losses.shape, bool)
    for b, row in enumerate(held_out.tolist()):
        seen = set()
        for p, pair in enumerate(itertools.pairwise(row)):
            known[b, p] = pair in seen
            seen.add(pair)
    expected = {
        "loss": losses.mean(),
        "icl_score": late - early,
        "predictable_loss": losses[known].mean(),
        "other_loss": losses[~known].mean(),
        "predictable_share": known.mean(),
    }
    copies = [
        copy_losses(model, repeated_tokens(3, block, 19, seed=0, bos=bos)) for block in (4, 6)
    ]
    expected["first_copy_loss"] = np.mean([first for first, _ in copies])
    expected["second_copy_loss"] = np.mean([second for _, second in copies])
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=FLOAT32), name
    assert 0.3 < metrics["predictable_share"] < 0.9
    share = metrics["predictable_share"]
    mixture = share * metrics["predictable_loss"] + (1 - share) * metrics["other_loss"]
    assert mixture == pytest.approx(metrics["loss"], abs=FLOAT32)


@pytest.mark.parametrize("bos", [None, 0])
def test_heads_are_scored_as_by_the_analyses(bos):
    model = tiny("gqa", bos_token_id=bos)
    probe, held_out = made_probe(model)
    rows = probe.measure(model).heads
    assert [(row["layer"], row["head"]) for row in rows] == [
        (layer, head) for layer in range(2) for head in range(4)
    ]
    assert all(set(row) == set(HEAD_COLUMNS) - {"step", "tokens"} for row in rows)
    alone = {
        "induction": analyze(model, "induction", blocks=[4, 6], batch=3, seed=0),
        "previous_token": analyze(model, "previous-token", held_out),
        "sink": analyze(model, "sinks", held_out),
    }
    for column, scores in alone.items():
        expected = scores.table[scores.score].to_numpy()
        assert [row[column] for row in rows] == pytest.approx(expected, abs=1e-12), column


@pytest.mark.parametrize("training", [False, True])
def test_measuring_keeps_the_mode_and_the_random_state_and_is_the_same_again(training):
    model = tiny("mha", dropout=0.5).train(training)
    probe, _ = made_probe(model)
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = probe.measure(model)
    assert model.training is training
    assert all(module.training is training for module in model.modules())
    assert probe.measure(model) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert not any(point.has_hooks() for point in model.hook_dict.values())
    assert all(parameter.grad is None for parameter in model.parameters())
    # Dropout would have shown in the loss.
    assert probe.measure(model.eval()) == first


def test_the_sequences_of_a_probe_do_not_depend_on_the_model_but_its_numbers_do():
    first, second = tiny("mha", seed=0), tiny("mha", seed=1)
    probe, other = made_probe(first)[0], made_probe(second)[0]
    assert probe.measure(first) == other.measure(first)
    assert probe.measure(first) != probe.measure(second)


def test_a_model_that_copies_is_told_apart_from_one_that_does_not():
    """Head 1.0 is made to look after the previous copy, every other head at its own token."""
    model = tiny("mha")
    probe, _ = made_probe(model)

    def look(pattern, hook):
        n_pos = pattern.shape[-1]
        made = torch.eye(n_pos).expand_as(pattern).clone()
        if hook.name.startswith("blocks.1.") and n_pos in (8, 12):
            block = n_pos // 2
            made[:, 0, block:] = 0
            for p in range(block, n_pos):
                made[:, 0, p, p - block + 1] = 1
        return made

    model.add_hook(lambda name: name.endswith("hook_pattern"), look)
    rows = {(row["layer"], row["head"]): row for row in probe.measure(model).heads}
    assert rows[1, 0]["induction"] == pytest.approx(1.0, abs=1e-6)
    assert all(row["induction"] == 0.0 for head, row in rows.items() if head != (1, 0))
    assert all(row["previous_token"] == 0.0 for row in rows.values())


def test_held_out_sequences_in_which_nothing_is_predictable_have_no_such_loss():
    model = tiny("mha")
    config = ProbeConfig(icl_early=(1, 3), icl_late=(10, 15), blocks=(4,), repeats=1)
    held_out = torch.arange(16)[None]
    metrics = Probe(config, model.config, held_out).measure(model).metrics
    assert math.isnan(metrics["predictable_loss"])
    assert metrics["predictable_share"] == 0.0
    assert metrics["other_loss"] == pytest.approx(metrics["loss"], abs=1e-7)


def test_token_losses_are_shifted_once():
    """Logits sure of the true next token have no loss; of the one after it, a large one."""
    tokens = some_tokens(2, 10, d_vocab=V)
    sure = oracle_logits(tokens, range(9))
    assert next_token_losses(sure, tokens).max() < 1e-4
    ahead = torch.zeros(2, 10, V)
    ahead[:, :8] = 100.0 * torch.nn.functional.one_hot(tokens[:, 2:], V)
    assert next_token_losses(ahead, tokens)[:, :8].mean() > 50
    uniform = next_token_losses(torch.zeros(2, 10, V), tokens)
    assert uniform.shape == (2, 9)
    assert uniform.numpy() == pytest.approx(math.log(V), abs=1e-6)
