"""Models with a sink logit or gated heads: what is computed, measured, stored and trained."""

import numpy as np
import pytest
import torch
from attention_cases import Case
from softmax_cases import (
    FLOAT32,
    LENGTHS,
    SETTINGS,
    VARIANTS,
    model_of,
    read,
    written_out,
)
from tiny_models import error, padding, some_tokens, tiny, tiny_config

import interp
from interp import registry
from interp.doctor import doctor
from interp.errors import ModelError
from interp.models.loading import load_model, save_folder
from interp.models.masks import AttentionMask
from interp.models.watch import watch_attention


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_heads_read_is_the_loops_with_the_gate_behind(setting, variant, side):
    model, tokens = model_of(setting, variant), some_tokens(3, 12)
    mask = padding(side, LENGTHS, 12)
    _, seen = model.run_with_cache(
        tokens,
        attention_mask=mask,
        names_filter=lambda name: not name.endswith(("scores", "pattern", "result")),
    )
    watched = {}
    model.run_with_hooks(
        tokens,
        attention_mask=mask,
        fwd_hooks=[
            (f"blocks.{layer}.attn.hook_{what}", lambda x, hook: watched.update({hook.name: x}))
            for layer in (0, 1)
            for what in ("pattern", "z")
        ],
    )
    for layer, block in enumerate(model.blocks):
        attn, name = block.attn, f"blocks.{layer}.attn"
        turned = "rot_" if f"{name}.hook_rot_q" in seen else ""
        key_mask = None if mask is None else mask.bool()
        own = Case(
            seen[f"{name}.hook_{turned}q"],
            seen[f"{name}.hook_{turned}k"],
            AttentionMask(key_mask=key_mask, window=attn.window),
            attn.scale,
        )
        sink = torch.full((4,), -1e9)  # takes nothing
        if model.config.attention.sink_logit != "none":
            sink = attn.sink_logit if attn.softmax == "learned" else torch.zeros(4)
        pattern = written_out(own, sink)
        z = read(pattern, seen[f"{name}.hook_v"])
        if attn.gate is not None:
            gain, shift = (p.detach().double().numpy() for p in block.ln1.parameters())
            x = seen[f"blocks.{layer}.ln1.hook_normalized"].double().numpy() * gain + shift
            weight, bias = (p.detach().double().numpy() for p in attn.gate.parameters())
            z *= 1 / (1 + np.exp(-(x @ weight.T + bias)))[..., None]
        real = np.ones((3, 12), dtype=bool) if mask is None else mask.bool().numpy()
        assert error(seen[f"{name}.hook_z"][real], z[real]) < FLOAT32
        assert error(watched[f"{name}.hook_z"][real], z[real]) < FLOAT32
        by_query = real[:, None].repeat(4, axis=1)
        assert error(watched[f"{name}.hook_pattern"][by_query], pattern[by_query]) < FLOAT32


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_of_every_weight_are_the_same_on_both_paths(setting, variant, side):
    tokens, mask = some_tokens(3, 12), padding(side, LENGTHS, 12)
    gradients = []
    for dense in (False, True):
        model = model_of(setting, variant).double()
        if dense:
            model.add_hook(lambda name: name.endswith("pattern"), lambda pattern, hook: None)
        model(tokens, attention_mask=mask, return_type="loss").backward()
        gradients.append({name: own.grad for name, own in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, mine in gradients[0].items():
        assert error(mine, gradients[1][name]) < 1e-10, name
        # Biases of keys alone move no row without a sink.
        assert float(mine.abs().max()) > (0 if "k_proj" not in name else -1), name


@pytest.mark.parametrize("kind", ["zero", "learned"])
def test_what_a_row_lacks_is_the_share_of_its_sink(kind):
    """CASES A23: rows sum to at most 1, and 1 minus the sum is the sink's share."""
    model, tokens = model_of("gqa", kind), some_tokens(3, 12)
    mask = padding("left", LENGTHS, 12)
    _, seen = model.run_with_cache(tokens, attention_mask=mask)
    for layer, block in enumerate(model.blocks):
        scores = seen[f"blocks.{layer}.attn.hook_attn_scores"].double()
        logit = torch.zeros(4) if kind == "zero" else block.attn.sink_logit.detach()
        over = logit.double().exp()[:, None]
        share = over / (over + scores.exp().sum(dim=-1))
        rows = seen[f"blocks.{layer}.attn.hook_pattern"].sum(dim=-1)
        real = mask.bool()[:, None].expand(-1, 4, -1)
        assert float(rows.max()) <= 1.0
        assert error((1 - rows)[real], share[real]) < FLOAT32
        assert float(share[real].max()) > 0.05  # or there would be nothing to see


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_doctor_finds_it_healthy(variant):
    diagnosis = doctor(model_of("rotary", variant))
    assert diagnosis.healthy, diagnosis.table.to_string()


def test_learned_logits_of_zero_are_softmax_plus_one():
    zero, learned = model_of(variant="zero"), model_of(variant="learned")
    learned.load_state_dict(
        {
            **{f"blocks.{layer}.attn.sink_logit": torch.zeros(4) for layer in (0, 1)},
            **zero.state_dict(),
        }
    )
    tokens = some_tokens(2, 12)
    assert torch.equal(zero(tokens), learned(tokens))
    assert error(zero(tokens), model_of(variant="gated")(tokens)) > 0.01


# --- analyses -------------------------------------------------------------------------------------


def reader_of_long_texts(setting, variant):
    return model_of(setting, variant, n_ctx=64, d_vocab=60)


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize(
    ("setting", "variant"),
    [("gqa", "learned"), ("windowed", "zero"), ("rotary", "learned and gated")],
)
def test_every_analysis_is_that_of_the_dense_pattern_and_says_what_rows_sum_to(
    name, setting, variant
):
    model = reader_of_long_texts(setting, variant)
    scores = interp.analyze(model, name)
    kind = model.config.attention.sink_logit
    said = f"sum to 1 at most: a {kind} sink logit in every softmax has the rest"
    assert scores.params["rows"] == said
    patterns = []
    model.add_hook(
        lambda hook: hook.endswith("pattern"),
        lambda pattern, hook: patterns.extend(pattern.sum(dim=-1).aminmax()),
    )
    dense = interp.analyze(model, name)
    assert min(patterns) < 0.999
    assert max(patterns) < 1 + 1e-6
    assert list(scores.table) == list(dense.table)
    for column in scores.table:
        mine, theirs = scores.table[column], dense.table[column]
        if mine.dtype.kind == "f":
            np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-5, err_msg=column)
        else:
            assert mine.equals(theirs), column


def test_a_model_without_a_sink_says_nothing_of_rows():
    assert "rows" not in interp.analyze(tiny(), "entropy", some_tokens(2, 12)).params
    gated = model_of(variant="gated")
    assert "rows" not in interp.analyze(gated, "entropy", some_tokens(2, 12)).params


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_is_watched_in_a_padded_batch_is_the_pattern(side):
    model, tokens = model_of("gqa", "learned"), some_tokens(3, 12)
    real = padding(side, LENGTHS, 12).bool()

    def look(attention):
        top, place = attention.strongest
        return {
            "first": attention.prob_at(attention.first.expand_as(real)),
            "entropy": attention.entropy,
            "distance": attention.distance,
            "received": attention.received(real.float()),
            "top": top,
            "place": place,
        }

    lean = watch_attention(model, tokens, look, real)
    model.add_hook(lambda hook: hook.endswith("pattern"), lambda pattern, hook: None)
    for mine, theirs in zip(lean, watch_attention(model, tokens, look, real), strict=True):
        queries = real[:, None].expand(-1, 4, -1)
        for name in mine:
            assert error(mine[name][queries], theirs[name][queries]) < FLOAT32, name


# --- on disk, in training, in half precision ------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_gives_back_the_same_model(variant, tmp_path):
    model, tokens = model_of("rotary", variant), some_tokens(2, 12)
    loaded = load_model(save_folder(model, tmp_path / "saved"))
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))


def test_training_moves_logits_that_begin_at_zero():
    config = tiny_config(attention={"sink_logit": "learned", "gated_output": True}, d_vocab=19)
    model, tokens = interp.Transformer(config), some_tokens(8, 12)
    logits = [block.attn.sink_logit for block in model.blocks]
    assert [logit.abs().max().item() for logit in logits] == [0.0, 0.0]
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    model.train()
    for _ in range(30):
        loss = model(tokens, return_type="loss")
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 1
    for logit in logits:
        assert float(logit.detach().abs().min()) > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_export_that_would_lose_it_is_refused_in_one_line(variant, tmp_path):
    model = tiny("llama", attention=VARIANTS[variant])
    with pytest.raises(ModelError) as caught:
        interp.save_pretrained(model, tmp_path / "out")
    named = "gate on what heads read" if variant == "gated" else "sink logit in the softmax"
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_half_precision_rounds_and_trains(setting, variant, side):
    model, tokens = model_of(setting, variant), some_tokens(3, 12)
    mask = padding(side, LENGTHS, 12)
    real = torch.ones(3, 12, dtype=torch.bool) if mask is None else mask.bool()
    with torch.no_grad():
        precise = model(tokens, attention_mask=mask).log_softmax(dim=-1)
    for graded in (False, True):
        with torch.set_grad_enabled(graded), torch.autocast("cpu", torch.bfloat16):
            rounded = model(tokens, attention_mask=mask)
        # Weights of 0.3 on two layers: bfloat16's eight bits give a few hundredths.
        assert error(rounded.float().log_softmax(dim=-1)[real], precise[real]) < 0.1, graded
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, attention_mask=mask, return_type="loss").backward()
    for name, parameter in model.named_parameters():
        assert bool(parameter.grad.isfinite().all()), name
    halved = model.to(torch.bfloat16)
    made = halved(tokens, attention_mask=mask)
    assert made.dtype == torch.bfloat16
    assert error(made.float().log_softmax(dim=-1)[real], precise[real]) < 0.1
