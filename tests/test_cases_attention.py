"""Faults that caches, windows, rotary positions and sinks really have, each by its recipe.

The numbers are those of the list of known faults, CASES.
"""

import hf_models
import numpy as np
import pytest
import torch
from hf_models import gap, log_probs, native
from tiny_models import error, some_tokens, tiny
from typer.testing import CliRunner

from interp.cli import app
from interp.errors import ModelError
from interp.models.hf_config import model_config
from interp.models.layers import Rotary, rotate
from interp.models.loading import load_model, save_folder


def in_chunks(model, tokens, chunks):
    """Logits of all tokens, fed so many at a time into one cache."""
    cache, parts = model.new_cache(), []
    for chunk in tokens.split(chunks, dim=1):
        parts.append(model(chunk, cache=cache))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("chunks", [[8], [4, 4], [1] * 8, [3, 5]], ids=str)
@pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "rotary", "llama"])
@torch.no_grad()
def test_a_cache_keeps_the_causal_mask_of_every_chunk(family, chunks):
    """CASES A13: one pass, an empty cache, 4+4, 1x8 and 3+5 give the same logits."""
    model, tokens = tiny(family), some_tokens(2, 8)
    whole = model(tokens)
    assert error(in_chunks(model, tokens, chunks), whole) < 1e-5
    # The chunk's own later tokens are hidden: changing the last one moves no other logit.
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 19
    other = in_chunks(model, changed, chunks)
    assert torch.equal(other[:, :-1], in_chunks(model, tokens, chunks)[:, :-1])
    assert error(other[:, -1], whole[:, -1]) > 0.01


@pytest.mark.parametrize("family", ["mha", "gqa", "rotary", "llama", "qk_norm"])
@torch.no_grad()
def test_steps_after_a_prompt_stand_at_positions_6_7_and_8(family):
    """CASES A14: queries and keys of single steps are those rows of a full pass."""
    model, tokens = tiny(family), some_tokens(2, 9)
    names = [
        name
        for name in model.hook_dict
        if name.endswith(("hook_q", "hook_k", "hook_rot_q", "hook_rot_k"))
    ]
    _, whole = model.run_with_cache(tokens, names_filter=names)
    cache = model.new_cache()
    model(tokens[:, :6], cache=cache)
    for place in (6, 7, 8):
        token = tokens[:, place : place + 1]
        _, seen = model.run_with_cache(token, names_filter=names, cache=cache)
        for name in names:
            assert error(seen[name], whole[name][:, place : place + 1]) < 1e-5, name
    assert len(names) == (8 if model.rotary is not None else 4)
    # A position further gives other queries and keys: the comparison can tell.
    name = "blocks.0.attn.hook_rot_q" if model.rotary is not None else "blocks.0.attn.hook_q"
    _, later = model.run_with_cache(torch.cat((tokens[:, :1], tokens), dim=1), names_filter=names)
    assert error(later[name][:, 9], whole[name][:, 8]) > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["mha", "llama"])
def test_a_cache_has_the_dtype_of_its_model(family, dtype):
    """CASES A16: three tokens with a cache raise no error of dtypes, and keys are the model's."""
    model = tiny(family).to(dtype)
    cache = model.new_cache()
    assert model.generate(some_tokens(2, 4), 3, cache=cache).shape == (2, 7)
    assert {part.dtype for store in cache.layers for part in store.parts} == {dtype}
    assert torch.get_default_dtype() == torch.float32


@torch.no_grad()
def test_a_window_of_three_sees_itself_and_two_before():
    """CASES A20: 1, 2, 3, 3, 3, 3 keys a row, as in transformers' Mistral; with a cache too."""
    theirs = hf_models.mistral(sliding_window=3)
    ours, tokens = native(theirs), hf_models.tokens(n_pos=6)
    counts = torch.tensor([1, 2, 3, 3, 3, 3])
    wanted = theirs(tokens, output_attentions=True).attentions
    seen = {}

    def keep(pattern, hook):
        seen.setdefault(hook.name, []).append((pattern != 0).sum(dim=-1))

    hooks = [(f"blocks.{layer}.attn.hook_pattern", keep) for layer in (0, 1)]
    ours.run_with_hooks(tokens, fwd_hooks=hooks)
    for layer, (name, _) in enumerate(hooks):
        assert (seen[name][0] == counts).all()
        assert ((wanted[layer] != 0).sum(dim=-1) == counts).all()
    seen.clear()
    cache = ours.new_cache()
    for place in range(6):
        ours.run_with_hooks(tokens[:, place : place + 1], fwd_hooks=hooks, cache=cache)
    for name, _ in hooks:
        assert (torch.cat(seen[name], dim=-1) == counts).all()
    assert gap(log_probs(in_chunks(ours, tokens, [1] * 6)), log_probs(theirs(tokens).logits)) < 1e-4


@pytest.mark.parametrize("window", [None, 0])
def test_no_window_means_every_earlier_key(window):
    """CASES A20: a window of None or 0 is none; another number is never dropped."""
    hf = hf_models.mistral().config.to_dict()
    assert model_config({**hf, "sliding_window": window}, "here").attention.window is None
    assert model_config({**hf, "sliding_window": 7}, "here").attention.window == 7


def test_rotary_positions_turn_halves_against_each_other():
    """CASES A22: position 1 turns [1, 0, 0, 0] into [cos 1, 0, sin 1, 0], not into neighbours."""
    rotary = Rotary(4, 10000.0, None)
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
    turned = rotate(x, rotary(torch.tensor([[1]]))).flatten()
    assert error(turned, torch.tensor([0.5403023, 0.0, 0.8414710, 0.0])) < 1e-6
    assert float(turned.norm()) == pytest.approx(1.0, abs=1e-6)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 4, generator=generator)
    scores = [
        float(
            (rotate(q, rotary(torch.tensor([[i]]))) * rotate(k, rotary(torch.tensor([[j]])))).sum()
        )
        for i, j in ((5, 2), (12, 9), (5, 3))
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)  # both shifted by 7
    assert abs(scores[0] - scores[2]) > 1e-3


@pytest.mark.parametrize("name", ["llama", "llama3_scaled"])
@torch.no_grad()
def test_a_llama_agrees_with_transformers_at_forty_tokens(name):
    """CASES A22: a wrong pairing shows at length; with a cache too."""
    theirs = getattr(hf_models, name)()
    ours, tokens = native(theirs), hf_models.tokens(n_pos=40)
    wanted = log_probs(theirs(tokens).logits)
    assert gap(log_probs(ours(tokens)), wanted) < 1e-4
    assert gap(log_probs(in_chunks(ours, tokens, [33, 1, 6])), wanted) < 1e-4


@pytest.mark.parametrize("kind", ["zero", "learned"])
def test_info_names_a_sink_logit_and_rows_lack_its_share(kind, tmp_path):
    """CASES A23: rows sum to at most 1, and 1 minus the sum is the sink's share."""
    model, tokens = tiny("gqa", attention={"sink_logit": kind}), some_tokens(2, 9)
    save_folder(model, tmp_path / "own")
    shown = CliRunner().invoke(app, ["info", str(tmp_path / "own")])
    assert shown.exit_code == 0
    assert f"{kind} sink logit: rows of a pattern sum to 1 at most" in shown.stdout
    _, seen = load_model(str(tmp_path / "own")).run_with_cache(tokens)
    for layer in (0, 1):
        own = f"blocks.{layer}.attn"
        scores = seen[f"{own}.hook_attn_scores"].double().numpy()
        logits = np.zeros(4)
        if kind == "learned":
            logits = model.blocks[layer].attn.sink_logit.detach().double().numpy()
        share = 1 / (1 + np.exp(scores - logits[:, None, None]).sum(axis=-1))
        rows = seen[f"{own}.hook_pattern"].sum(dim=-1)
        assert float(rows.max()) <= 1.0
        assert error(1 - rows, share) < 1e-6


def test_a_config_or_a_tensor_of_sinks_that_is_not_computed_is_refused():
    """CASES A23: never loaded and ignored."""
    hf = hf_models.llama().config.to_dict()
    with pytest.raises(ModelError, match="sinks"):
        model_config({**hf, "sinks": True}, "here")
    theirs = hf_models.llama()
    weights = {**theirs.state_dict(), "model.layers.0.self_attn.sinks": torch.ones(6)}
    with pytest.raises(ModelError, match="sinks"):
        native(theirs, weights=weights)


@pytest.mark.parametrize("family", ["mha", "gqa", "llama", "windowed"])
@pytest.mark.parametrize("site", ["hook_z", "hook_result", "hook_v", "hook_pattern"])
def test_an_ablated_head_writes_the_same_with_a_cache_and_without(family, site):
    """CASES C13: head 0.0 silenced while eight tokens are written."""
    model, tokens = tiny(family), some_tokens(1, 4)

    def silence(x, hook):
        if site == "hook_pattern":
            x[:, 0] = 0.0
        else:
            x[:, :, 0] = 0.0
        return x

    made, calls = [], []
    for use_cache in (True, False):
        with model.hooks(fwd_hooks=[(f"blocks.0.attn.{site}", silence)]):
            made.append(model.generate(tokens, 8, use_cache=use_cache))
        with (
            model.hooks(fwd_hooks=[(f"blocks.0.attn.{site}", silence)]),
            torch.no_grad(),
        ):
            calls.append(model(made[0]))
    assert torch.equal(*made)
    assert torch.equal(made[0][0, 4:], calls[0][0, 3:-1].argmax(dim=-1))
    assert error(calls[0], model(made[0])) > 0.01  # the head matters


@torch.no_grad()
def test_a_stream_keeps_0_1_5_6_7_and_counts_positions_in_its_cache():
    """CASES H10: sink 2, window 3, 8 tokens; positions are renumbered from 0."""
    model, tokens = tiny("llama"), some_tokens(1, 9)
    _, whole = model.run_with_cache(tokens, names_filter="blocks.0.attn.hook_k")
    keys = whole["blocks.0.attn.hook_k"]
    cache = model.new_cache(sinks=2, window=3)
    for place in range(8):
        model(tokens[:, place : place + 1], cache=cache)
    assert error(cache.layers[0].parts[0], keys[:, [0, 1, 5, 6, 7]]) < 1e-6
    seen = {}
    names = ("blocks.0.attn.hook_q", "blocks.0.attn.hook_attn_scores")
    hooks = [(name, lambda x, hook: seen.update({hook.name: x.clone()})) for name in names]
    model.run_with_hooks(tokens[:, 8:], fwd_hooks=hooks, cache=cache)
    attended = keys[:, [0, 1, 5, 6, 7, 8]].repeat_interleave(2, dim=2)
    scores = torch.stack(
        [
            (
                rotate(seen[names[0]], model.rotary(torch.tensor([[5]])))
                * rotate(attended[:, at : at + 1], model.rotary(torch.tensor([[at]])))
            ).sum(dim=-1)
            for at in range(6)
        ],
        dim=-1,
    )
    direct = scores.transpose(1, 2) * model.blocks[0].attn.scale
    assert error(seen[names[1]], direct) < 1e-5
    # By places in the text token 0 would be 8 places away, not 5.
    text = rotate(attended[:, :1], model.rotary(torch.tensor([[0]])))
    query = rotate(seen[names[0]], model.rotary(torch.tensor([[8]])))
    other = (query * text).sum(dim=-1)[..., None].transpose(1, 2) * model.blocks[0].attn.scale
    assert error(other[..., 0], direct[..., 0]) > 0.01
