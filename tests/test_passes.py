"""Restarted passes, hooked passes and passes written by hand give the same numbers."""

import hf_models
import numpy as np
import pytest
import reference
import torch
from hand_ablation import losses_with, replacing, sequence_losses, site_values
from tiny_models import error, oracle, padding, some_tokens, tiny

import interp
from interp.ablation import passes as passes_module
from interp.ablation.interventions import Intervention, Other, Zero
from interp.ablation.metrics import METRICS
from interp.ablation.passes import HookedPasses, RestartedPasses, chunks, passes
from interp.inputs import token_inputs
from interp.models.bridging import bridge_model

# Losses of three float32 layers err by about 1e-6, and their sums in another order by as much.
FLOAT32 = 1e-5
FAMILIES = pytest.mark.parametrize(
    "family",
    ["mha", "gqa", "mqa", "llama", "shortformer", "windowed", "attention_only", "no_norm"],
)
EVERY = [(layer, head) for layer in range(3) for head in range(4)]
SETS = [
    ((0, 1),),
    ((0, 0), (0, 3)),
    ((0, 2), (1, 1), (2, 3)),
    tuple((1, head) for head in range(4)),
    ((1, 0), (2, 2)),
    ((2, 1),),
    tuple((2, head) for head in range(4)),
]


def first_chunk(model, tokens, mask=None):
    return next(chunks(model, token_inputs(model, tokens, mask).batches))


def effects(run, together, direct=False):
    """The metric under each of some interventions that start in the same layer."""
    with torch.no_grad():
        return [
            tuple(None if value is None else value.numpy() for value in effect)
            for effect in run.ablated(together, direct=direct)
        ]


def both(model, chunk, metric="loss", **given):
    """The two kinds of passes of one model."""
    with torch.no_grad():
        restarted = RestartedPasses(
            model, chunk, METRICS[metric], frozen=given.get("frozen", False)
        )
        return restarted, HookedPasses(model, chunk, METRICS[metric], **given)


# --- the three ways agree -------------------------------------------------------------------


@FAMILIES
def test_a_restarted_pass_is_a_hooked_pass_is_a_pass_by_hand(family):
    model, tokens = tiny(family, n_layers=3), some_tokens(3, 9)
    mask = padding("left", (9, 4, 7), 9)
    restarted, hooked = both(model, first_chunk(model, tokens, mask))
    assert isinstance(
        passes(model, first_chunk(model, tokens, mask), METRICS["loss"]), RestartedPasses
    )
    clean = losses_with(model, tokens, mask)
    assert max(error(run.clean, clean) for run in (restarted, hooked)) < FLOAT32
    for heads in (*SETS, tuple(EVERY)):
        by_hand = losses_with(model, tokens, mask, heads)
        if heads == tuple(EVERY):  # layers come in their order
            restarted, hooked = both(model, first_chunk(model, tokens, mask))
        for run in (restarted, hooked):
            ((found, _),) = effects(run, [Intervention(heads)])
            assert error(found, by_hand) < FLOAT32, (type(run), heads)
        assert np.abs(by_hand - clean).max() > 10 * FLOAT32


@pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "shortformer", "attention_only"])
@pytest.mark.parametrize("site", ["k", "v"])
def test_keys_and_values_are_ablated_alike_in_all_three_ways(family, site):
    model, tokens = tiny(family, n_layers=3), some_tokens(3, 9)
    mask = padding("right", (9, 4, 7), 9)
    n_groups = model.cfg.n_key_value_heads
    sets = [
        ((0, 0),),
        ((0, n_groups - 1), (2, 0)),
        tuple((1, g) for g in range(n_groups)),
        ((2, 0),),
    ]
    donor = site_values(model, some_tokens(3, 9, seed=7), mask, site)
    restarted, hooked = both(model, first_chunk(model, tokens, mask))
    for by, values in ((Zero(), None), (Other(donor), donor)):
        if values is not None:
            restarted, hooked = both(model, first_chunk(model, tokens, mask))
        for heads in sets:
            by_hand = losses_with(model, tokens, mask, heads, values, site)
            for run in (restarted, hooked):
                ((found, _),) = effects(run, [Intervention(heads, by, site)])
                assert error(found, by_hand) < FLOAT32, (type(run), heads)


@pytest.mark.parametrize("metric", ["last-token", "second-copy-loss"])
def test_a_metric_that_reads_the_end_alone_gives_what_whole_passes_give(metric):
    """Only the last positions leave the last layer then."""
    model = tiny("gqa", n_layers=3)
    tokens = torch.cat((some_tokens(3, 5), some_tokens(3, 5)), dim=1)
    restarted, hooked = both(model, first_chunk(model, tokens), metric, direct=True)
    for heads in (((0, 1),), ((1, 0),), ((2, 3),)):
        found, expected = (
            effects(run, [Intervention(heads)], direct=True)[0] for run in (restarted, hooked)
        )
        assert error(np.array(found), np.array(expected)) < FLOAT32
    if metric == "last-token":
        losses = reference.next_token_losses(oracle(model, tokens)["logits"], tokens.numpy())
        assert error(restarted.clean, losses[:, -1]) < FLOAT32


# --- direct effects -------------------------------------------------------------------------


def normalised(model, resid):
    """The final norm in float64."""
    kind, eps = model.config.normalization_type, model.config.eps
    if kind == "none":
        return resid
    centred = resid - resid.mean(axis=-1, keepdims=True) if kind == "LN" else resid
    scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    gain = {name: p.detach().double().numpy() for name, p in model.ln_final.named_parameters()}
    return centred / scale * gain["w"] + gain.get("b", 0.0)


@pytest.mark.parametrize("family", ["mha", "llama", "no_norm", "attention_only"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_a_direct_effect_is_the_final_residual_less_what_the_head_wrote(family, side):
    model, tokens = tiny(family, n_layers=3), some_tokens(3, 9)
    mask = padding(side, (9, 4, 7), 9)
    exact = oracle(model, tokens, mask)
    unembed = model.unembed.weight.detach().double().numpy()
    bias = 0.0 if model.unembed.bias is None else model.unembed.bias.detach().double().numpy()
    restarted, hooked = both(model, first_chunk(model, tokens, mask), direct=True)
    for heads in [((0, 1),), ((1, 0), (1, 3)), ((2, 2),)]:
        resid = exact["blocks.2.hook_resid_post"].copy()
        for layer, head in heads:
            resid = resid - exact[f"blocks.{layer}.attn.hook_result"][:, :, head]
        logits = normalised(model, resid) @ unembed.T + bias
        expected = sequence_losses(logits, tokens, mask)
        for run in (restarted, hooked):
            ((total, direct),) = effects(run, [Intervention(heads)], direct=True)
            assert error(direct, expected) < FLOAT32
            if heads[0][0] < 2:
                assert np.abs(total - direct).max() > 10 * FLOAT32  # later layers make a difference


@pytest.mark.parametrize("site", ["z", "v"])
def test_a_direct_effect_is_a_pass_in_which_everything_later_writes_what_it_wrote(site):
    model, tokens = tiny("gqa", n_layers=3), some_tokens(3, 9)
    _, cache = model.run_with_cache(tokens)
    restarted, hooked = both(model, first_chunk(model, tokens), direct=True)
    for layer, head in [(0, 1), (1, 0), (2, 1)]:

        def kept(name):
            return name, lambda own, hook: cache[name].clone()

        hooks = replacing([(layer, head)], site=site)
        hooks += [kept(f"blocks.{later}.hook_mlp_out") for later in range(layer, 3)]
        hooks += [kept(f"blocks.{later}.hook_attn_out") for later in range(layer + 1, 3)]
        with torch.no_grad():
            logits = model.run_with_hooks(tokens, fwd_hooks=hooks).double().numpy()
        expected = sequence_losses(logits, tokens, None)
        for run in (restarted, hooked):
            one = Intervention(((layer, head),), Zero(), site)
            ((_, direct),) = effects(run, [one], direct=True)
            assert error(direct, expected) < FLOAT32


def test_a_head_of_the_last_layer_of_an_attention_only_model_has_no_other_than_a_direct_effect():
    model, tokens = tiny("attention_only"), some_tokens(4, 9)
    table = interp.ablate(model, tokens).table
    last = table[table["layer"] == 1]
    assert last["self_repair"].abs().max() < FLOAT32
    assert error(last["direct"].to_numpy(copy=True), last["ablation"].to_numpy(copy=True)) < FLOAT32
    assert table.loc[table["layer"] == 0, "self_repair"].abs().max() > 10 * FLOAT32


# --- how many go together -------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("site", ["z", "v"])
def test_ablations_that_go_through_together_give_what_each_gives_alone(site, direct):
    model, tokens = tiny("mha", n_layers=3), some_tokens(3, 9)
    mask = padding("left", (9, 4, 7), 9)
    sets = [((1, 0),), ((1, 2),), ((1, 1), (1, 3)) if direct else ((1, 1), (2, 2))]
    together = [Intervention(heads, Zero(), site) for heads in sets]
    restarted, _ = both(model, first_chunk(model, tokens, mask))
    stacked = effects(restarted, together, direct)
    for one, effect in zip(together, stacked, strict=True):
        alone, _ = both(model, first_chunk(model, tokens, mask))
        (expected,) = effects(alone, [one], direct)
        for value, wanted in zip(effect, expected, strict=True):
            assert (value is None) == (wanted is None) == (value is not effect[0] and not direct)
            if value is not None:
                assert error(value, wanted) < FLOAT32


@pytest.mark.parametrize("method", ["zero", "mean", "resample", "pattern-preserving"])
def test_the_number_of_tokens_that_go_through_at_once_changes_no_table(method, monkeypatch):
    model, tokens = tiny("gqa"), some_tokens(6, 9)
    mask = padding("left", [9, 6, 9, 6, 6, 6], 9)
    given = {"attention_mask": mask, "method": method, "heads": "0.0, 0.3, 1.2", "draws": 1}
    tables = []
    for at_once in (10**6, 20):
        monkeypatch.setattr(passes_module, "TOKENS_AT_ONCE", at_once)
        tables.append(interp.ablate(model, tokens, **given).table)
    # A p value near 0 moves by more than the rounding of what it is of.
    columns = [name for name in tables[0] if not name.endswith(("_p", "_q"))]
    expected, found = (table[columns].to_numpy(float, copy=True) for table in tables)
    assert error(found, expected) < FLOAT32


def test_chunks_hold_every_sequence_once_and_as_many_tokens_as_go_together(monkeypatch):
    model = tiny("mha")
    monkeypatch.setattr(passes_module, "TOKENS_AT_ONCE", 30)
    inputs = token_inputs(model, some_tokens(7, 9))
    other = token_inputs(model, some_tokens(4, 5, seed=1))
    parts = list(chunks(model, [*inputs.batches, *other.batches]))
    assert [part.batch.tokens.shape for part in parts] == [(3, 9), (3, 9), (1, 9), (4, 5)]
    assert [part.first for part in parts] == [0, 3, 6, 7]
    assert [part.number for part in parts] == [0, 0, 0, 1]
    assert [part.copies for part in parts] == [1, 1, 3, 1]
    whole = torch.cat([part.batch.tokens for part in parts[:3]])
    assert torch.equal(whole, inputs.batches[0].tokens)


# --- other models, and what is on them ------------------------------------------------------


def test_hooks_of_the_users_own_stay_and_count():
    model, tokens = tiny("gqa", n_layers=3), some_tokens(4, 9)

    def halve(own, hook):
        return own / 2

    plain = interp.ablate(model, tokens).table
    model.add_hook("blocks.1.hook_mlp_out", halve)
    run = passes(model, first_chunk(model, tokens), METRICS["loss"])
    assert isinstance(run, HookedPasses)
    table = interp.ablate(model, tokens).table
    clean = losses_with(model, tokens, None)
    for row, head in zip(table.itertuples(), EVERY, strict=True):
        ablated = losses_with(model, tokens, None, [head])
        assert row.ablation == pytest.approx((ablated - clean).mean(), abs=FLOAT32)
    assert np.abs(table["ablation"] - plain["ablation"]).max() > 10 * FLOAT32
    assert [name for name, point in model.hook_dict.items() if point.has_hooks()] == [
        "blocks.1.hook_mlp_out"
    ]
    model.reset_hooks()
    again = interp.ablate(model, tokens).table
    assert again.equals(plain)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_a_bridged_model_gives_the_table_of_the_native_one(family):
    theirs = hf_models.MODELS[family]()
    tokens = hf_models.tokens(n_pos=12)
    tables = {}
    for name, model in (
        ("native", hf_models.native(theirs)),
        ("bridge", bridge_model(theirs, name=family)),
    ):
        for method in ("zero", "pattern-preserving"):
            tables[name, method] = interp.ablate(
                model, tokens, method=method, heads="0.1, 1.0, 1.3"
            ).table
    for method in ("zero", "pattern-preserving"):
        columns = ["ablation", "direct", "self_repair", "loss_clean", "loss_ablated"]
        native, bridge = (
            tables[name, method][columns].to_numpy(float, copy=True)
            for name in ("native", "bridge")
        )
        assert error(bridge, native) < FLOAT32
    change = tables["native", "zero"]["ablation"]
    assert change.abs().min() > 10 * FLOAT32


def test_a_model_with_parallel_blocks_is_ablated_by_its_hooks():
    """Attention and MLP of a layer read the same residual: the MLP does not see the ablation."""
    model = bridge_model(hf_models.gpt_neox(), name="neox")
    tokens = hf_models.tokens(n_pos=9)
    table = interp.ablate(model, tokens, heads="0.1, 1.0, 1.3").table
    clean = losses_with(model, tokens, None)
    for row in table.itertuples():
        ablated = losses_with(model, tokens, None, [(row.layer, row.head)])
        assert row.ablation == pytest.approx((ablated - clean).mean(), abs=FLOAT32)
    # Nothing comes after the last layer's attention.
    assert table.loc[table["layer"] == 1, "self_repair"].abs().max() < FLOAT32
