"""Watching attention in a forward pass: on our model and bridged, and leaving both alone."""

import math

import hf_models
import numpy as np
import pytest
import torch
from attention_cases import LargestTensor
from tiny_models import FAMILIES, error, oracle, padding, perturbed, some_tokens, tiny, tiny_config

from interp.errors import ModelError
from interp.models.bridge import BridgedModel
from interp.models.layer_attention import LayerAttention
from interp.models.loading import load_model
from interp.models.patterns import Pattern, QueryKeys
from interp.models.transformer import Transformer
from interp.models.watch import as_hooked, watch_attention

# Float32 through two layers; a wrong mask or scale is off by more than 0.01.
FLOAT32 = 1e-5
LENGTHS = (12, 7, 1)


def bridge_model(hf: torch.nn.Module) -> BridgedModel:
    return load_model(hf, backend="bridge")


def look(attention: LayerAttention) -> dict[str, torch.Tensor]:
    """Every statistic, and what the heads read."""
    real = attention.key_mask
    n_pos = real.shape[1]
    before = torch.arange(n_pos).expand_as(real) - 1
    top, place = attention.strongest
    return {
        "before": attention.prob_at(before),
        "first": attention.prob_at(attention.first.expand_as(real)),
        "mass": attention.expected(real[:, :, None].float())[..., 0],
        "entropy": attention.entropy,
        "received": attention.received(real.float()),
        "top": top,
        "place": place,
        "v": attention.v.clone(),
        "z": attention.z.clone(),
        "value_norms": attention.value_norms(),
    }


def defined(pattern: np.ndarray, real: np.ndarray) -> dict[str, np.ndarray]:
    """The same statistics, from a pattern."""
    batch, n_heads, n_pos, _ = pattern.shape
    found = {
        name: np.zeros((batch, n_heads, n_pos))
        for name in ("before", "first", "mass", "entropy", "received", "top")
    }
    for b, h, i in np.ndindex(batch, n_heads, n_pos):
        row = pattern[b, h, i]
        found["before"][b, h, i] = row[i - 1] if i > 0 else 0.0
        found["first"][b, h, i] = row[int(np.argmax(real[b]))]
        found["mass"][b, h, i] = math.fsum(row[j] for j in range(n_pos) if real[b, j])
        found["entropy"][b, h, i] = -math.fsum(p * math.log(p) for p in row if p > 0)
        found["top"][b, h, i] = row.max()
        if real[b, i]:
            found["received"][b, h] += row
    return found


def same(mine: list[dict], other: list[dict]) -> bool:
    return all(
        torch.equal(a[name], b[name]) for a, b in zip(mine, other, strict=True) for name in a
    )


# --- what is seen ---------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", sorted(set(FAMILIES)))
def test_statistics_of_every_family_are_those_of_the_float64_pattern(family, side):
    model = tiny(family)
    tokens, mask = some_tokens(3, 12), padding(side, LENGTHS, 12)
    real = torch.ones(3, 12, dtype=torch.bool) if mask is None else mask.bool()
    layers = watch_attention(model, tokens, look, None if mask is None else real)
    wanted = oracle(model, tokens, mask)
    assert len(layers) == 2
    for layer, seen in enumerate(layers):
        name = f"blocks.{layer}.attn"
        for key, value in defined(wanted[f"{name}.hook_pattern"], real.numpy()).items():
            assert error(seen[key], value) < FLOAT32, (layer, key)
        assert error(seen["z"], wanted[f"{name}.hook_z"]) < FLOAT32
        assert error(seen["v"], wanted[f"{name}.hook_v"]) < FLOAT32


def test_values_and_outputs_are_those_of_the_pass_bit_for_bit():
    model, tokens = tiny("gqa"), some_tokens(2, 9)
    _, cache = model.run_with_cache(tokens, names_filter=lambda name: name.endswith(("_v", "_z")))
    for layer, seen in enumerate(watch_attention(model, tokens, look)):
        assert torch.equal(seen["v"], cache[f"blocks.{layer}.attn.hook_v"])
        assert torch.equal(seen["z"], cache[f"blocks.{layer}.attn.hook_z"])


def test_heads_keep_an_axis_of_their_own():
    for seen in watch_attention(tiny(), some_tokens(2, 9), look):
        for name in ("first", "entropy", "received"):
            heads = seen[name]
            assert heads.shape[1] == 4
            for h in range(1, 4):
                assert (heads[:, h] - heads[:, 0]).abs().max() > 1e-3, name


def test_our_model_computes_no_pattern_unless_somebody_hooks_one():
    kinds = []

    def kind(attention: LayerAttention) -> dict[str, torch.Tensor]:
        kinds.append(type(attention._weights))
        return {}

    model = tiny()
    watch_attention(model, some_tokens(1, 5), kind)
    assert kinds == [QueryKeys, QueryKeys]
    kinds.clear()
    model.add_hook("blocks.1.attn.hook_pattern", lambda pattern, hook: None)
    watch_attention(model, some_tokens(1, 5), kind)
    assert kinds == [QueryKeys, Pattern]


def test_nothing_of_the_size_of_a_pattern_is_made():
    n_pos = 512
    model = perturbed(tiny_config(n_ctx=n_pos))
    tokens = some_tokens(1, n_pos)

    def few(attention: LayerAttention) -> dict[str, torch.Tensor]:
        first = attention.first.expand_as(attention.key_mask)
        return {
            "first": attention.prob_at(first),
            "entropy": attention.entropy,
            "distance": attention.distance,
            "received": attention.received(attention.key_mask.float()),
        }

    watch_attention(model, tokens, few)  # the operators are tested once, on cases of their own
    for key_mask in (None, padding("left", (400,), n_pos).bool()):
        with LargestTensor() as largest:
            watch_attention(model, tokens, few, key_mask)
        weights = max(parameter.numel() for parameter in model.parameters())
        # Four heads of six, three projections; a pattern of one head would have 262,144.
        assert largest.numbers <= max(weights, 4 * n_pos * 24)


# --- edits count ----------------------------------------------------------------------------------


def to_the_first(pattern: torch.Tensor, hook: object) -> torch.Tensor:
    edited = pattern.clone()
    edited[:, 1] = 0.0
    edited[:, 1, :, 0] = 1.0
    return edited


@pytest.mark.parametrize("backend", ["native", "bridge"])
def test_an_edited_pattern_is_the_one_that_counts_and_the_edit_stays(backend):
    hf = hf_models.gpt2()
    model = load_model(hf) if backend == "native" else bridge_model(hf)
    tokens = hf_models.tokens(n_pos=10)
    name = "blocks.0.attn.hook_pattern"

    def seen(fwd_hooks: list) -> list[dict]:
        if backend == "native":
            with model.hooks(fwd_hooks=fwd_hooks):
                return watch_attention(model, tokens, look)
        point = model.hook_dict[name]
        for _, hook in fwd_hooks:
            point.add_hook(hook)
        try:
            return watch_attention(model, tokens, look)
        finally:
            point.remove_hooks()

    clean = seen([])
    edited = seen([(name, to_the_first)])
    assert error(edited[0]["first"][:, 1], torch.ones(2, 10)) < FLOAT32
    assert error(edited[0]["entropy"][:, 1], torch.zeros(2, 10)) < FLOAT32
    assert error(edited[0]["first"][:, 0], clean[0]["first"][:, 0]) < FLOAT32
    assert (edited[1]["entropy"] - clean[1]["entropy"]).abs().max() > 1e-4
    assert same(seen([]), clean)


def test_hooks_on_values_and_outputs_are_seen_too():
    model, tokens = tiny(), some_tokens(1, 6)
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: torch.zeros_like(z))]):
        layers = watch_attention(model, tokens, look)
    assert not layers[0]["z"].any()
    assert layers[1]["z"].any()


# --- nothing is left behind -----------------------------------------------------------------------


def state(model: Transformer) -> tuple:
    hooked = [name for name, point in model.hook_dict.items() if point.has_hooks()]
    observers = [block.attn.observer for block in model.blocks]
    return hooked, observers, [part.training for part in model.modules()]


def failing(attention: LayerAttention) -> dict[str, torch.Tensor]:
    if attention.layer == 1:
        raise RuntimeError("layer 1 failed")
    return {}


def test_an_error_while_watching_leaves_no_observer():
    model, tokens = tiny(), some_tokens(2, 6)
    clean = model(tokens)
    with pytest.raises(RuntimeError, match="layer 1 failed"):
        watch_attention(model, tokens, failing)
    assert state(model)[:2] == ([], [None, None])
    assert torch.equal(model(tokens), clean)


def test_watching_inside_watching_gives_the_outer_observer_back():
    model, tokens = tiny(), some_tokens(1, 6)
    alone = watch_attention(model, tokens, look)
    layers = []

    def nested(attention: LayerAttention) -> dict[str, torch.Tensor]:
        if attention.layer == 0 and not layers:
            layers.append(attention.layer)
            assert same(watch_attention(model, tokens, look), alone)
        return look(attention)

    assert same(watch_attention(model, tokens, nested), alone)
    assert state(model)[1] == [None, None]


def test_the_users_own_hooks_stay_and_act():
    model, tokens = tiny(), some_tokens(2, 6)

    def without_head(z: torch.Tensor, hook: object) -> torch.Tensor:
        return z.index_fill(2, torch.tensor([0]), 0.0)

    clean = model(tokens)
    model.add_hook("blocks.0.attn.hook_z", without_head)
    hooked = model(tokens)
    assert not torch.equal(hooked, clean)
    watch_attention(model, tokens, look)
    with pytest.raises(RuntimeError):
        watch_attention(model, tokens, failing)
    assert torch.equal(model(tokens), hooked)
    assert state(model)[0] == ["blocks.0.attn.hook_z"]


@pytest.mark.parametrize("training", [True, False])
def test_watching_changes_no_logit_no_mode_and_no_random_state(training):
    model = perturbed(tiny_config(dropout=0.2))
    tokens = some_tokens(2, 6)
    model.train(training)
    model.blocks[0].train(not training)
    before, random = state(model), torch.random.get_rng_state()
    logits = model(tokens)
    torch.random.set_rng_state(random)
    first = watch_attention(model, tokens, look)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert torch.equal(model(tokens), logits)
    assert state(model) == before
    assert same(watch_attention(model, tokens, look), first)
    assert not any(value.requires_grad for seen in first for value in seen.values())


def test_observed_logits_are_the_unobserved_ones_bit_for_bit():
    for family in ("gqa", "windowed", "rotary"):
        model, tokens = tiny(family), some_tokens(2, 9)
        plain = model(tokens)
        for block in model.blocks:
            block.attn.observer = look
        assert torch.equal(model(tokens), plain), family


def test_tokens_and_mask_are_left_as_they_were():
    tokens, key_mask = some_tokens(3, 12), padding("left", LENGTHS, 12).bool()
    kept = tokens.clone(), key_mask.clone()
    watch_attention(tiny(), tokens, look, key_mask)
    assert torch.equal(tokens, kept[0])
    assert torch.equal(key_mask, kept[1])


# --- a bridged model ------------------------------------------------------------------------------

MADE = ("gpt2", "llama", "mistral", "gemma2")


@pytest.mark.parametrize("family", MADE)
def test_a_bridged_model_shows_the_patterns_that_transformers_computes(family):
    hf = getattr(hf_models, family)()
    tokens = hf_models.tokens(n_pos=24)
    with torch.no_grad():
        patterns = hf(tokens, output_attentions=True).attentions
    layers = watch_attention(bridge_model(hf), tokens, look)
    real = np.ones((2, 24), dtype=bool)
    for seen, pattern in zip(layers, patterns, strict=True):
        for name, value in defined(pattern.double().numpy(), real).items():
            assert error(seen[name], value) < FLOAT32, name


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_our_model_and_the_bridged_one_show_the_same(family, side):
    hf = getattr(hf_models, family)()
    tokens, mask = hf_models.tokens(n_pos=24), padding(side, (24, 15), 24)
    key_mask = None if mask is None else mask.bool()
    real = torch.ones(2, 24, dtype=torch.bool) if key_mask is None else key_mask
    native = watch_attention(load_model(hf), tokens, look, key_mask)
    bridged = watch_attention(bridge_model(hf), tokens, look, key_mask)
    for mine, theirs in zip(native, bridged, strict=True):
        for name in ("before", "first", "mass", "entropy", "top"):
            counted = real[:, None].expand_as(mine[name])
            assert error(mine[name][counted], theirs[name][counted]) < 5 * FLOAT32, name
        assert error(mine["received"], theirs["received"]) < 5 * FLOAT32
        heads = real[:, :, None, None]
        for name in ("v", "z"):
            mine_there = mine[name].where(heads, 0.0)
            assert error(mine_there, theirs[name].where(heads, 0.0)) < 5 * FLOAT32, name


def test_soft_capping_is_in_what_is_seen():
    tokens = hf_models.tokens(n_pos=24)
    capped = watch_attention(bridge_model(hf_models.gemma2()), tokens, look)
    free = watch_attention(
        bridge_model(hf_models.gemma2(attn_logit_softcapping=None)), tokens, look
    )
    assert (capped[0]["entropy"] - free[0]["entropy"]).abs().max() > 1e-3


def test_an_error_while_watching_a_bridge_leaves_no_hook():
    model, tokens = bridge_model(hf_models.gpt2()), hf_models.tokens(n_pos=8)
    clean = model(tokens)
    before = watch_attention(model, tokens, look)
    with pytest.raises(RuntimeError, match="layer 1 failed"):
        watch_attention(model, tokens, failing)
    assert torch.equal(model(tokens), clean)
    assert not any(point.has_hooks() for point in model.hook_dict.values())
    assert same(watch_attention(model, tokens, look), before)


def test_a_model_without_hooks_is_refused():
    with pytest.raises(ModelError) as caught:
        as_hooked(hf_models.gpt2())
    assert "has no hooks" in str(caught.value)
