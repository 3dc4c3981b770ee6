"""Decoding with what was kept equals one pass over all tokens, for every kind of attention."""

import pytest
import torch
from tiny_models import D_VOCAB, FAMILIES, N_CTX, error, perturbed, some_tokens, tiny, tiny_config

from interp.arithmetic.lookup import config_shape
from interp.errors import ModelError, ShapeError
from interp.models.layers import rotate
from interp.models.transformer import Transformer

LATENT = {"kind": "latent", "n_heads": 3, "d_head": 6, "d_rope": 4, "d_latent": 10, "d_value": 5}
KINDS = {
    **{name: FAMILIES[name] for name in FAMILIES},
    "latent": {"attention": LATENT, "positional_embedding_type": "rotary"},
    "latent_queries": {
        "attention": {**LATENT, "d_query_latent": 9},
        "positional_embedding_type": "rotary",
        "normalization_type": "RMS",
    },
    "softmax_plus_one": {"attention": {"sink_logit": "zero", "n_key_value_heads": 2}},
    "learned_sink": {
        "attention": {"sink_logit": "learned", "window": 4},
        "positional_embedding_type": "rotary",
    },
    "gated": {"attention": {"gated_output": True}},
}
CHUNKS = [[12], [3, 5, 4], [1] * 12, [11, 1], [4, 4, 4]]


def model_of(kind, **changes):
    return perturbed(tiny_config(**{**KINDS[kind], **changes}))


def in_chunks(model, tokens, chunks, mask=None):
    """Logits of all tokens, fed so many at a time, and the cache."""
    cache, parts, at = model.new_cache(), [], 0
    for n in chunks:
        own = None if mask is None else mask[:, at : at + n]
        parts.append(model(tokens[:, at : at + n], attention_mask=own, cache=cache))
        at += n
    return torch.cat(parts, dim=1), cache


def bound(logits):
    """1e-5 of logits of the usual size; a model without norms has larger ones."""
    return 1e-5 * max(1.0, float(logits.abs().max()) / 10)


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_chunks_of_any_length_give_the_logits_of_one_pass(kind, chunks):
    model, tokens = model_of(kind), some_tokens(2, 12)
    whole = model(tokens)
    cached, cache = in_chunks(model, tokens, chunks)
    assert error(cached, whole) < bound(whole)
    assert cache.n_seen == 12


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_left_padded_chunks_give_the_logits_of_one_padded_pass(kind, chunks):
    model, tokens = model_of(kind), some_tokens(3, 12)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[0, :4], mask[1, :1] = False, False
    whole = model(tokens, attention_mask=mask)
    cached, _ = in_chunks(model, tokens, chunks, mask)
    assert error(cached[mask], whole[mask]) < bound(whole)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_cache_holds_as_many_bytes_as_the_formula_says(kind):
    model, tokens = model_of(kind), some_tokens(2, 12)
    _, cache = in_chunks(model, tokens, [5, 7])
    shape = config_shape(model.config, kind)
    assert cache.nbytes == shape.cache_bytes(12, 2, "float32")
    for store in cache.layers:
        assert cache.nbytes == sum(own.nbytes for own in cache.layers)
        assert {part.dtype for part in store.parts} == {torch.float32}


@pytest.mark.parametrize("kind", ["gqa", "llama", "latent"])
@torch.no_grad()
def test_the_next_tokens_are_at_the_positions_after_the_prompt(kind):
    model, tokens = model_of(kind), some_tokens(1, 9)
    names = [f"blocks.{layer}.attn.hook_{which}" for layer in (0, 1) for which in ("q", "rot_q")]
    names = [name for name in names if name in model.hook_dict]
    _, whole = model.run_with_cache(tokens, names_filter=names)
    cache = model.new_cache()
    model(tokens[:, :6], cache=cache)
    for place in (6, 7, 8):
        token = tokens[:, place : place + 1]
        _, seen = model.run_with_cache(token, names_filter=names, cache=cache)
        for name in names:
            assert error(seen[name][:, 0], whole[name][:, place]) < 1e-5


@pytest.mark.parametrize("kind", ["gqa", "latent", "learned_sink"])
@torch.no_grad()
def test_a_cache_of_a_half_precision_model_is_in_its_dtype(kind):
    model = model_of(kind).to(torch.bfloat16)
    cache = model.new_cache()
    made = model.generate(some_tokens(1, 4), 3, cache=cache)
    assert made.shape == (1, 7)
    assert {part.dtype for store in cache.layers for part in store.parts} == {torch.bfloat16}


@torch.no_grad()
def test_a_window_is_what_its_layer_keeps():
    model = tiny("windowed")  # the latest three
    _, cache = in_chunks(model, some_tokens(1, 12), [1] * 12)
    assert [store.n_kept for store in cache.layers] == [3, 3]


# --- sinks and a window ---------------------------------------------------------------------------


@torch.no_grad()
def test_a_streaming_cache_keeps_the_first_tokens_and_the_latest():
    model, tokens = tiny("llama"), some_tokens(1, 8)
    _, whole = model.run_with_cache(tokens, names_filter="blocks.0.attn.hook_k")
    cache = model.new_cache(sinks=2, window=3)
    for place in range(8):
        model(tokens[:, place : place + 1], cache=cache)
    keys = cache.layers[0].parts[0]
    kept = [0, 1, 5, 6, 7]
    # The keys of layer 0 are of their own token alone, and are kept before rotary positions.
    assert error(keys, whole["blocks.0.attn.hook_k"][:, kept]) < 1e-6
    assert cache.nbytes == 2 * 2 * 5 * 2 * 8 * 4  # layers, parts, places, heads, width, bytes


@torch.no_grad()
def test_a_streaming_cache_counts_positions_in_itself():
    model, tokens = tiny("llama"), some_tokens(1, 8)
    cache = model.new_cache(sinks=2, window=3)
    for place in range(7):
        model(tokens[:, place : place + 1], cache=cache)
    seen = {}
    names = ["blocks.0.attn.hook_q", "blocks.0.attn.hook_attn_scores"]
    hooks = [(name, lambda x, hook: seen.update({hook.name: x.clone()})) for name in names]
    _, whole = model.run_with_cache(tokens, names_filter="blocks.0.attn.hook_k")
    model.run_with_hooks(tokens[:, 7:], fwd_hooks=hooks, cache=cache)
    # Kept were 0, 1, 4, 5, 6, and token 7 itself: places 0 to 5.
    k = whole["blocks.0.attn.hook_k"][:, [0, 1, 4, 5, 6, 7]]
    turned = rotate(k, model.rotary(torch.arange(6)[None]))
    q = rotate(seen[names[0]], model.rotary(torch.tensor([[5]])))
    direct = torch.einsum("bqhd,bkhd->bhqk", q, turned.repeat_interleave(2, dim=2))
    scores = direct * model.blocks[0].attn.scale
    assert error(seen[names[1]], scores) < 1e-5


@torch.no_grad()
def test_a_streaming_cache_that_is_not_full_yet_changes_nothing():
    model, tokens = tiny("llama"), some_tokens(2, 5)
    cache = model.new_cache(sinks=2, window=6)
    streamed = torch.cat([model(tokens[:, p : p + 1], cache=cache) for p in range(5)], dim=1)
    assert error(streamed, model(tokens)) < 1e-5


@torch.no_grad()
def test_a_stream_has_no_end():
    model = tiny("llama")
    made = model.generate(some_tokens(1, 4), 40, cache=model.new_cache(sinks=1, window=6))
    assert made.shape == (1, 44)
    assert N_CTX < 44


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("llama", {"sinks": 4}, "sinks belong to a window"),
        ("llama", {"sinks": -1, "window": 3}, "have to fit n_ctx"),
        ("llama", {"sinks": 4, "window": N_CTX}, "have to fit n_ctx"),
        ("mha", {"window": 3}, "needs rotary positions"),
        ("rotary_smeared", {"window": 3}, "smeared keys"),
        ("rotary_linear", {"window": 3}, "windows of its own"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_in_one_line(family, settings, words):
    with pytest.raises(ModelError) as caught:
        tiny(family).new_cache(**settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_tokens_that_do_not_follow_are_refused():
    model = tiny("gqa")
    cache = model.new_cache()
    model(some_tokens(2, 4), cache=cache)
    with pytest.raises(ShapeError, match="3 sequences for a cache of 2"):
        model(some_tokens(3, 1), cache=cache)
    with pytest.raises(ShapeError, match="after 4 in the cache > n_ctx 16"):
        model(some_tokens(2, 13), cache=cache)
    with pytest.raises(ModelError, match="a cache is of all layers"):
        model(some_tokens(2, 1), cache=cache, stop_at_layer=1)
    with pytest.raises(ModelError, match="2 layers for a model of 1"):
        tiny("gqa", n_layers=1)(some_tokens(2, 1), cache=cache)


# --- generation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_generation_is_the_same_with_a_cache_and_without(kind):
    model, tokens = model_of(kind), some_tokens(2, 5)
    drawn = {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "seed": 3}
    for settings in ({}, drawn):
        cached = model.generate(tokens, 8, **settings)
        assert torch.equal(cached, model.generate(tokens, 8, use_cache=False, **settings))
        assert torch.equal(cached[:, :5], tokens)


@pytest.mark.parametrize("kind", ["mha", "gqa", "mqa", "llama", "windowed", "latent", "gated"])
@pytest.mark.parametrize("site", ["z", "v", "k", "q"])
def test_an_intervention_generates_the_same_with_a_cache_and_without(kind, site):
    model, tokens = model_of(kind), some_tokens(1, 4)

    def silence(x, hook):
        x[:, :, 0] = 0.0

    plain = model.generate(tokens, 8)
    made = []
    for use_cache in (True, False):
        with model.hooks(fwd_hooks=[(f"blocks.0.attn.hook_{site}", silence)]):
            made.append(model.generate(tokens, 8, use_cache=use_cache))
    assert torch.equal(*made)
    assert made[0].shape == plain.shape


def test_an_ablation_of_head_0_0_changes_what_is_generated():
    model, tokens = tiny("llama"), some_tokens(1, 4)
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: z * 0)]):
        ablated = model.generate(tokens, 8)
    assert not torch.equal(ablated, model.generate(tokens, 8))


def test_greedy_is_the_largest_logit_of_each_prefix():
    model, tokens = tiny("gqa"), some_tokens(1, 3)
    made = model.generate(tokens, 6)[0]
    for place in range(3, 9):
        assert made[place] == model(made[None, :place])[0, -1].argmax()


def test_a_padded_row_generates_what_it_does_alone():
    model = tiny("llama")
    rows = [some_tokens(1, n, seed=n)[0] for n in (3, 5)]
    padded = torch.zeros(2, 5, dtype=torch.long)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    for place, row in enumerate(rows):
        padded[place, 5 - len(row) :], mask[place, 5 - len(row) :] = row, True
    together = model.generate(padded, 6, attention_mask=mask)
    for place, row in enumerate(rows):
        assert torch.equal(together[place, 5 - len(row) :], model.generate(row, 6)[0])


def test_stop_tokens_end_a_sequence_and_fill_it():
    model, tokens = tiny("gqa"), some_tokens(3, 3)
    free = model.generate(tokens, 10)
    stop = int(free[0, 5])
    made = model.generate(tokens, 10, stop_tokens=[stop])
    for row, own in zip(free, made, strict=True):
        ends = (row[3:] == stop).nonzero()
        if len(ends) and 3 + int(ends[0]) < made.shape[1]:
            end = 3 + int(ends[0])
            assert torch.equal(own[: end + 1], row[: end + 1])
            assert (own[end:] == stop).all()
        else:
            assert torch.equal(own, row[: len(own)])


def test_draws_follow_their_seed_and_leave_the_callers_random_state():
    model, tokens = tiny("gqa"), some_tokens(1, 3)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = model.generate(tokens, 12, temperature=1.0, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first, model.generate(tokens, 12, temperature=1.0, seed=1))
    others = [model.generate(tokens, 12, temperature=1.0, seed=seed) for seed in range(2, 6)]
    assert any(not torch.equal(first, other) for other in others)


def test_top_k_of_one_and_a_tiny_top_p_are_greedy():
    model, tokens = tiny("gqa"), some_tokens(2, 3)
    greedy = model.generate(tokens, 6)
    assert torch.equal(greedy, model.generate(tokens, 6, temperature=2.0, top_k=1))
    assert torch.equal(greedy, model.generate(tokens, 6, temperature=2.0, top_p=1e-9))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -1.0}, "temperature = -1"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"top_p": 0.0}, "top_p = 0"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line(settings, words):
    with pytest.raises(ModelError) as caught:
        tiny("gqa").generate(some_tokens(1, 3), 2, **settings)
    assert words in str(caught.value)


def test_what_cannot_be_generated_is_refused():
    model = tiny("gqa")
    with pytest.raises(ModelError, match="max_new_tokens = 0"):
        model.generate(some_tokens(1, 3), 0)
    with pytest.raises(ShapeError, match="do not fit n_ctx = 16"):
        model.generate(some_tokens(1, 10), 8)
    assert model.generate(some_tokens(1, 10), 7).shape == (1, 17)  # the last is never read
    with pytest.raises(ShapeError, match="padding belongs on the left"):
        model.generate(some_tokens(1, 3), 2, attention_mask=torch.tensor([[1, 1, 0]]))
    with pytest.raises(ModelError, match="no tokenizer"):
        model.generate("text", 2)
    broken = tiny("gqa")
    with torch.no_grad():
        broken.unembed.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="NaN"):
        broken.generate(some_tokens(1, 3), 2)


def test_a_generated_model_is_left_without_a_trace():
    model = tiny("gqa").train()
    assert isinstance(model, Transformer)
    model.generate(some_tokens(1, 3) % D_VOCAB, 3)
    assert model.training
    assert not any(point.has_hooks() for point in model.hook_dict.values())
