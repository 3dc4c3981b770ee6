"""Importance: derivatives of gates, held against finite differences and true ablations."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hf_models import gpt2, llama, native
from pruning_cases import masked
from tiny_models import error, padding, some_tokens, tiny
from torch.profiler import ProfilerActivity, profile

import interp
from interp.ablation.importance import head_gradients, head_importance, rank_correlation
from interp.ablation.metrics import METRICS, LogitsFunction, logit_difference
from interp.errors import AnalysisError
from interp.inputs import token_inputs
from interp.models.pruning import prune_heads

FAMILIES = pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "wide_heads", "llama"])
EVERY = [(layer, head) for layer in range(2) for head in range(4)]
LOSS = METRICS["loss"]


def gated_losses(model, tokens, mask, gates):
    """Mean loss of each sequence where heads' values are scaled, in float64."""

    def scale_in(layer):
        def hook(z, hook):
            scales = [gates.get((layer, head), 1.0) for head in range(z.shape[2])]
            return z * torch.tensor(scales, dtype=z.dtype)[:, None]

        return f"blocks.{layer}.attn.hook_z", hook

    hooks = [scale_in(layer) for layer in range(2)]
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=hooks, attention_mask=mask)
    means = []
    for b, row in enumerate(tokens):
        real = [p for p in range(len(row)) if mask is None or mask[b, p]]
        log_probs = logits[b].log_softmax(-1)
        means.append(np.mean([-log_probs[p, row[q]].item() for p, q in itertools.pairwise(real)]))
    return np.array(means)


def by_differences(model, tokens, mask, removed=()):
    """The derivative of each sequence's loss by each gate, from both sides of it."""
    h = 1e-5
    rows = []
    for head in EVERY:
        gates = dict.fromkeys(removed, 0.0)
        there = gates.get(head, 1.0)
        above = gated_losses(model, tokens, mask, {**gates, head: there + h})
        below = gated_losses(model, tokens, mask, {**gates, head: there - h})
        rows.append((above - below) / (2 * h))
    return np.stack(rows)


# --- known answers --------------------------------------------------------------------------


def test_where_the_metric_is_linear_in_the_heads_attribution_is_the_ablation():
    """One layer without norms or MLP: a logit is a sum over heads."""
    model = tiny("no_norm", mlp=None, n_layers=1)
    inputs = token_inputs(model, some_tokens(6, 9))
    scores = head_importance(model, inputs, logit_difference(3, 5))
    sweep = interp.ablate(model, some_tokens(6, 9), metric=logit_difference(3, 5), direct=False)
    effect = sweep.table["ablation"].to_numpy()
    assert np.abs(effect).min() > 0.01
    assert scores.table["attribution"].to_numpy() == pytest.approx(effect, abs=1e-5)
    assert scores.table["attribution_se"].to_numpy() == pytest.approx(
        sweep.table["ablation_se"].to_numpy(), abs=1e-5
    )
    assert scores.summary["rank_correlation_signed"] == pytest.approx(1.0)
    assert scores.unit == "logits"


def test_the_absolute_value_is_inside_the_mean():
    """Two equal sequences whose metrics have opposite signs: nothing is left of the mean."""
    model, tokens = tiny(), some_tokens(1, 9).repeat(2, 1)

    def opposed(logits, batch):
        return logits[:, -1, 3] * torch.tensor([1.0, -1.0])

    scores = head_importance(model, token_inputs(model, tokens), LogitsFunction(opposed))
    table = scores.table
    assert (table["importance"] > 1e-3).all()
    assert table["attribution"].to_numpy() == pytest.approx(np.zeros(8), abs=1e-6)
    assert (table["attribution_size"] < 1e-6).all()
    assert table["importance_se"].to_numpy() == pytest.approx(np.zeros(8), abs=1e-6)


def test_a_head_that_writes_nothing_has_no_importance():
    model = masked(tiny("gqa"), [(0, 1), (1, 2)])
    table = interp.importance(model, some_tokens(3, 9)).table
    nothing = [tuple(row) in ((0, 1), (1, 2)) for row in table[["layer", "head"]].to_numpy()]
    assert (table.loc[nothing, "importance"] == 0).all()
    assert (table.loc[np.invert(nothing), "importance"] > 1e-3).all()


def test_normalised_importance_has_length_one_in_each_layer_and_is_the_score():
    tokens = some_tokens(3, 9)
    plain = interp.importance(tiny(), tokens)
    scores = interp.importance(tiny(), tokens, normalize=True)
    assert (plain.score, scores.score) == ("importance", "importance_normalized")
    assert "importance_normalized" not in plain.table
    for layer in range(2):
        own = scores.table[scores.table["layer"] == layer]
        raw = own["importance"].to_numpy()
        assert own["importance_normalized"].to_numpy() == pytest.approx(
            raw / np.sqrt((raw**2).sum())
        )
    assert {"importance_normalized_se", "importance_normalized_null"} <= set(scores.table)


def test_a_layer_that_changes_nothing_has_no_share_of_its_norm():
    model = masked(tiny(), [(1, head) for head in range(4)])
    table = interp.importance(model, some_tokens(3, 9), normalize=True).table
    assert table["importance_normalized"].tolist()[4:] == [0.0] * 4


# --- oracles --------------------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_gradients_equal_finite_differences_in_float64(family, side):
    model, tokens = tiny(family).double(), some_tokens(3, 9)
    mask = padding(side, [9, 7, 4], 9)
    found = head_gradients(model, token_inputs(model, tokens, mask), LOSS)
    expected = by_differences(model, tokens, mask)
    assert np.abs(expected).max() > 0.01
    # Differences of float64 losses over 2e-5 are good to ten digits.
    assert np.abs(found - expected).max() < 1e-8


def test_gradients_beside_removed_heads_equal_finite_differences_there():
    model, tokens = tiny("gqa").double(), some_tokens(3, 9)
    removed = [(0, 2), (1, 0)]
    found = head_gradients(model, token_inputs(model, tokens), LOSS, removed)
    expected = by_differences(model, tokens, None, removed)
    assert np.abs(found - expected).max() < 1e-8
    assert np.abs(found - by_differences(model, tokens, None)).max() > 1e-3


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("side", ["none", "left"])
def test_a_bridged_model_gives_the_numbers_of_ours(make, side):
    theirs = make()
    ours, bridged = native(theirs), interp.load_model(theirs, backend="bridge")
    tokens, mask = some_tokens(3, 12, d_vocab=97), padding(side, [12, 9, 5], 12)
    one, other = (
        head_importance(model, token_inputs(model, tokens, mask), LOSS) for model in (ours, bridged)
    )
    columns = ["layer", "head", "importance", "attribution", "importance_se", "n"]
    assert error(one.table[columns].to_numpy(), other.table[columns].to_numpy()) < 1e-5
    assert one.table["importance"].min() > 1e-4


def test_hooks_of_the_users_stay_and_count():
    model, tokens = tiny(), some_tokens(3, 9)
    inputs = token_inputs(model, tokens)
    expected = head_gradients(model, inputs, LOSS, [(0, 1)])

    def without_the_head(z, hook):
        z = z.clone()
        z[:, :, 1] = 0
        return z

    model.add_hook("blocks.0.attn.hook_z", without_the_head)
    found = head_gradients(model, inputs, LOSS)
    assert found[1].tolist() == [0.0] * 3  # the user's hook comes first: the gate scales nothing
    kept = [0, 2, 3, 4, 5, 6, 7]
    assert error(found[kept], expected[kept]) < 1e-5
    assert len(model.hook_dict["blocks.0.attn.hook_z"].fwd_hooks) == 1


def test_a_pruned_model_has_the_gradients_of_the_masked_one_under_the_old_numbers():
    model, tokens = tiny("gqa"), some_tokens(3, 9)
    gone = [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
    table = interp.importance(prune_heads(model, gone), tokens).table
    assert table[["layer", "head"]].to_numpy().tolist() == [[0, 1], [0, 2], [0, 3]]
    whole = head_gradients(model, token_inputs(model, tokens), LOSS, gone)
    assert table["importance"].to_numpy() == pytest.approx(np.abs(whole).mean(1)[1:4], abs=1e-6)


def test_chunks_of_sequences_do_not_change_a_number():
    model, tokens = tiny(), some_tokens(70, 9)  # 28 sequences go together
    whole = head_gradients(model, token_inputs(model, tokens), LOSS)
    alone = [head_gradients(model, token_inputs(model, row[None]), LOSS)[:, 0] for row in tokens]
    assert error(whole, np.stack(alone, axis=1)) < 1e-5


# --- what it is shown with ------------------------------------------------------------------


def test_the_sample_is_spread_over_all_heads_with_their_true_ablations():
    model, tokens = tiny(), some_tokens(6, 9)
    scores = interp.importance(model, tokens, sample=3)
    assert [one["head"] for one in scores.summary["sample"]] == ["0.0", "1.0", "1.3"]
    assert scores.summary["sample_heads"] == 3
    clean = gated_losses(model.double(), tokens, None, {})
    for one in scores.summary["sample"]:
        layer, head = map(int, one["head"].split("."))
        zeroed = gated_losses(model, tokens, None, {(layer, head): 0.0})
        assert one["ablation"] == pytest.approx((zeroed - clean).mean(), abs=1e-5)
        row = scores.table.query("layer == @layer and head == @head").iloc[0]
        assert (one["importance"], one["attribution"]) == (row["importance"], row["attribution"])


def test_correlations_are_those_of_the_ranks_of_the_sample():
    scores = interp.importance(tiny("llama"), some_tokens(6, 9))
    columns = {
        name: np.array([one[name] for one in scores.summary["sample"]])
        for name in ("importance", "attribution", "ablation")
    }
    assert len(columns["ablation"]) == 8

    def spearman(one, other):
        ranks = [np.array([(values < value).sum() for value in values]) for values in (one, other)]
        return np.corrcoef(*ranks)[0, 1]

    size = spearman(columns["importance"], np.abs(columns["ablation"]))
    signed = spearman(columns["attribution"], columns["ablation"])
    assert scores.summary["rank_correlation"] == pytest.approx(size)
    assert scores.summary["rank_correlation_signed"] == pytest.approx(signed)


def test_a_correlation_with_a_constant_is_none_and_missing_numbers_are_left_out():
    one = np.array([1.0, 2.0, 3.0, 4.0])
    assert np.isnan(rank_correlation(one, np.ones(4)))
    assert rank_correlation(one, np.array([5.0, 6.0, np.nan, 7.0])) == pytest.approx(1.0)


def test_sequences_without_a_place_that_is_read_do_not_count():
    model = tiny()
    tokens = torch.stack([torch.arange(9) % 4, torch.arange(9), torch.arange(9) % 3 + 5])
    inputs = token_inputs(model, tokens)  # the second one does not repeat
    found = head_gradients(model, inputs, METRICS["second-copy-loss"])
    assert np.isnan(found).any(axis=0).tolist() == [False, True, False]
    table = head_importance(model, inputs, METRICS["second-copy-loss"]).table
    assert (table["n"] == 2).all()
    assert table["importance"].to_numpy() == pytest.approx(np.abs(found[:, [0, 2]]).mean(axis=1))


@pytest.mark.parametrize("name", ["accuracy", "kl"])
def test_a_metric_without_a_gradient_is_refused(name):
    with pytest.raises(AnalysisError, match=f"and {name} has none at the unablated model; loss,"):
        interp.importance(tiny(), some_tokens(3, 9), metric=name)


def test_a_function_without_a_gradient_or_a_finite_one_is_refused():
    model, tokens = tiny(), some_tokens(3, 9)

    def best(logits, batch):
        return logits[:, -1].argmax(-1)

    def steep(logits, batch):
        return (logits[:, -1, 0] * 0).sqrt()

    with pytest.raises(AnalysisError, match="the metric best has no gradient"):
        interp.importance(model, tokens, metric=best)
    with pytest.raises(AnalysisError, match="the gradient of steep is not finite"):
        interp.importance(model, tokens, metric=steep)


def test_a_sample_of_one_head_and_a_model_of_none_are_refused():
    with pytest.raises(AnalysisError, match="sample = 1: a rank correlation needs two heads"):
        interp.importance(tiny(), some_tokens(3, 9), sample=1)
    bare = prune_heads(tiny(), EVERY)
    with pytest.raises(AnalysisError, match="no head left"):
        interp.importance(bare, some_tokens(3, 9))


def test_inference_mode_has_no_gradient_to_follow():
    model, tokens = tiny(), some_tokens(3, 9)
    with torch.inference_mode(), pytest.raises(AnalysisError, match="inference_mode has none"):
        interp.importance(model, tokens)


# --- what it leaves behind ------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["native", "bridge"])
def test_the_model_and_the_random_state_are_left_as_they_were(backend):
    theirs = gpt2()
    model = native(theirs) if backend == "native" else interp.load_model(theirs, backend="bridge")
    parts = list(model.modules())
    parts[-1].training = True
    parameters = [p for part in parts for p in part.parameters(recurse=False)]
    parameters[0].requires_grad_(False)
    needed = [p.requires_grad for p in parameters]
    before = copy.deepcopy([p.detach() for p in parameters])
    modes = [part.training for part in parts]
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    with torch.no_grad():
        scores = interp.importance(model, some_tokens(3, 12, d_vocab=97))
        assert not torch.is_grad_enabled()
    assert scores.table["importance"].min() > 0
    assert all(p.grad is None for p in parameters)
    assert [p.requires_grad for p in parameters] == needed
    assert set(needed) == {True, False}
    assert all(torch.equal(p, own) for p, own in zip(parameters, before, strict=True))
    assert [part.training for part in parts] == modes
    assert not any(point.has_hooks() for point in model.hook_dict.values())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_the_same_call_gives_the_same_table():
    one, other = (interp.importance(tiny(), blocks=[6], batch=3, seed=4) for _ in range(2))
    assert one.table.equals(other.table)
    assert one.to_json() == other.to_json()


def peak(function):
    """Bytes of tensors that were alive together."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        function()
    events = watched.profiler.kineto_results.events()
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if is_memory(e)]
    return int(np.cumsum(changes).max())


def is_memory(event):
    return event.name() == "[memory]"


def test_memory_stays_below_that_of_a_plain_forward():
    """The forward holds the logits of every place; here those of half of the tokens are made."""
    sizes = {"d_model": 64, "n_ctx": 64, "d_vocab": 20000, "n_layers": 6}
    model = tiny(**sizes, attention={"d_head": 16})
    tokens = some_tokens(8, 64, d_vocab=20000)
    inputs = token_inputs(model, tokens)

    def forward():
        with torch.no_grad():
            return model(tokens)

    plain = peak(forward)
    assert plain > tokens.numel() * 20000 * 4
    assert peak(lambda: head_gradients(model, inputs, LOSS)) < plain
