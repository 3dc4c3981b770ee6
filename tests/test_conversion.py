"""Models with other numbers of key-value heads: copied exactly, or pooled as it is said."""

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, error, perturbed, some_tokens, tiny, tiny_config
from tiny_tokenizers import reader

import interp
from interp.arithmetic.lookup import config_shape
from interp.errors import ModelError
from interp.models.conversion import with_key_value_heads

SHARED = [name for name, own in FAMILIES.items() if "n_key_value_heads" in own.get("attention", {})]
VARIANTS = {
    "sink": {"n_key_value_heads": 2, "sink_logit": "learned"},
    "gated": {"n_key_value_heads": 2, "gated_output": True},
}


def by_head(model, layer, part):
    """Weights and bias of keys or values, a row for each head."""
    attn = model.blocks[layer].attn
    projection = getattr(attn, f"{part}_proj")
    width = model.config.d_head
    weight = projection.weight.detach().double().numpy()
    rows = weight.reshape(-1, width, weight.shape[1])
    bias = projection.bias
    return rows, None if bias is None else bias.detach().double().numpy().reshape(-1, width)


def fault(*args, **settings):
    with pytest.raises(ModelError) as caught:
        with_key_value_heads(*args, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- known answers --------------------------------------------------------------------------------


def two_heads():
    """Two heads of width 1, whose keys and values are told by eye."""
    model = interp.Transformer(
        tiny_config(n_layers=1, d_model=2, attention={"n_heads": 2, "d_head": 1})
    )
    attn = model.blocks[0].attn
    with torch.no_grad():
        attn.k_proj.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
        attn.k_proj.bias.copy_(torch.tensor([10.0, 20.0]))
        attn.v_proj.weight.copy_(torch.tensor([[0.0, -4.0], [8.0, 4.0]]))
        attn.v_proj.bias.copy_(torch.tensor([-1.0, 1.0]))
    return model


def test_the_mean_of_two_heads_is_that_of_their_rows():
    attn = with_key_value_heads(two_heads(), 1).blocks[0].attn
    assert attn.k_proj.weight.tolist() == [[2.0, 4.0]]
    assert attn.k_proj.bias.tolist() == [15.0]
    assert attn.v_proj.weight.tolist() == [[4.0, 0.0]]
    assert attn.v_proj.bias.tolist() == [0.0]


def test_the_first_of_two_heads_is_left_as_it_is():
    attn = with_key_value_heads(two_heads(), 1, pooling="first").blocks[0].attn
    assert attn.k_proj.weight.tolist() == [[1.0, 2.0]]
    assert attn.k_proj.bias.tolist() == [10.0]
    assert attn.v_proj.weight.tolist() == [[0.0, -4.0]]


# --- copying --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*SHARED, *VARIANTS])
def test_mha_with_copied_heads_computes_what_shared_heads_do(family):
    model = tiny(attention=VARIANTS[family]) if family in VARIANTS else tiny(family)
    model = model.double()
    made = with_key_value_heads(model, 4)
    assert made.config.n_key_value_heads == 4
    assert made.config == model.config.model_copy(
        update={"attention": model.config.attention.model_copy(update={"n_key_value_heads": 4})}
    )
    tokens = some_tokens(3, 12)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, :5] = 0
    for given in (None, mask):
        wanted = model(tokens, attention_mask=given)
        # Matrix products of other sizes may add in another order.
        assert error(made(tokens, attention_mask=given), wanted) < 1e-13


def test_one_head_becomes_two_and_two_become_four_in_blocks():
    model = tiny("gqa")
    made = with_key_value_heads(model, 4)
    before, after = by_head(model, 0, "k")[0], by_head(made, 0, "k")[0]
    assert (after == before[[0, 0, 1, 1]]).all()
    assert not (after == before[[0, 1, 0, 1]]).all()
    tokens, shared = some_tokens(2, 9), tiny("mqa").double()
    assert error(with_key_value_heads(shared, 2)(tokens), shared(tokens)) < 1e-13


@pytest.mark.parametrize("family", SHARED)
def test_what_was_copied_pools_back_to_the_original(family):
    model = tiny(family)
    n = model.config.n_key_value_heads
    wide = with_key_value_heads(model, 4)
    for pooling in ("mean", "first"):
        back = with_key_value_heads(wide, n, pooling=pooling)
        assert back.config == model.config
        for name, weight in model.state_dict().items():
            assert torch.equal(back.state_dict()[name], weight), name  # means of 2 and 4 equals


# --- pooling --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_the_mean_and_the_first_are_those_of_neighbouring_heads(n, bias):
    config = tiny_config(attention={"n_heads": 6, "bias": bias, "d_head": 5})
    model = perturbed(config)
    for pooling in ("mean", "first"):
        made = with_key_value_heads(model, n, pooling=pooling)
        for layer in (0, 1):
            for part in "kv":
                for own, after in zip(
                    by_head(model, layer, part), by_head(made, layer, part), strict=True
                ):
                    if own is None:
                        assert after is None
                        continue
                    group = 6 // n
                    for place in range(n):
                        members = [own[place * group + member] for member in range(group)]
                        wanted = members[0] if pooling == "first" else sum(members) / group
                        assert np.abs(after[place] - wanted).max() < 1e-6


def test_shares_of_smeared_keys_are_pooled_too():
    model = tiny(attention={"smeared_keys": True})
    made = with_key_value_heads(model, 2)
    for layer in (0, 1):
        smear = model.blocks[layer].attn.smear
        wanted = torch.stack(((smear[0] + smear[1]) / 2, (smear[2] + smear[3]) / 2))
        assert error(made.blocks[layer].attn.smear, wanted) < 1e-6


def test_everything_but_keys_and_values_stays():
    model = tiny(attention={"smeared_keys": True, "sink_logit": "learned", "gated_output": True})
    made = with_key_value_heads(model, 2).state_dict()
    for name, weight in model.state_dict().items():
        if not any(part in name for part in ("k_proj", "v_proj", "smear")):
            assert torch.equal(made[name], weight), name


@pytest.mark.parametrize("n", [1, 2])
def test_heads_that_are_equal_in_a_group_lose_nothing_by_their_mean(n):
    model = with_key_value_heads(tiny("mqa" if n == 1 else "gqa").double(), 4)
    made, tokens = with_key_value_heads(model, n), some_tokens(2, 12)
    assert error(made(tokens), model(tokens)) < 1e-13
    other = with_key_value_heads(model, n, pooling="random")
    assert float((other(tokens) - model(tokens)).abs().max().detach()) > 0.1


def test_a_random_draw_is_as_spread_as_the_weights_and_follows_its_seed():
    config = tiny_config(n_layers=1, d_model=64, attention={"n_heads": 8, "d_head": 32})
    model = perturbed(config, std=0.2)
    made = with_key_value_heads(model, 2, pooling="random", seed=3)
    for part in "kv":
        for own, drawn in zip(by_head(model, 0, part), by_head(made, 0, part), strict=True):
            # 4,096 weights and 64 biases: their spread is known to 1.1 and 9 percent.
            within = 0.05 if own.ndim == 3 else 0.4
            assert drawn.std() == pytest.approx(own.std(), rel=within)
            assert abs(drawn.mean()) < 4 * own.std() / drawn.size**0.5
    again = with_key_value_heads(model, 2, pooling="random", seed=3)
    other = with_key_value_heads(model, 2, pooling="random", seed=4)
    assert np.array_equal(by_head(made, 0, "k")[0], by_head(again, 0, "k")[0])
    assert not np.array_equal(by_head(made, 0, "k")[0], by_head(other, 0, "k")[0])
    assert not np.array_equal(by_head(made, 0, "k")[0], by_head(made, 0, "v")[0])


def test_a_draw_leaves_the_callers_random_state():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    with_key_value_heads(tiny(), 1, pooling="random", seed=1)
    assert torch.equal(before, torch.random.get_rng_state())


# --- the given model, and what is made ------------------------------------------------------------


@pytest.mark.parametrize(("family", "n"), [("gqa", 4), ("gqa", 2), ("gqa", 1), ("relu_tied", 2)])
def test_the_given_model_is_left_alone_and_shares_no_memory(family, n):
    model = tiny(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    config = model.config
    made = with_key_value_heads(model, n)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert model.config == config
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_tied_embeddings_stay_tied():
    made = with_key_value_heads(tiny("relu_tied"), 2)
    assert made.unembed.weight is made.embed.weight


def test_name_vocabulary_and_dtype_are_kept():
    model = reader().to(torch.bfloat16)
    made = with_key_value_heads(model, 2)
    assert (made.model_name, made.vocabulary) == (model.model_name, model.vocabulary)
    assert {own.dtype for own in made.parameters()} == {torch.bfloat16}
    assert made.generate("the cat", 2).shape[1] > 2


def test_a_model_with_fewer_heads_caches_fewer_bytes():
    model, tokens = tiny(), some_tokens(1, 10)
    held = []
    for n in (4, 2, 1):
        made = with_key_value_heads(model, n)
        cache = made.new_cache()
        made(tokens, cache=cache)
        assert cache.nbytes == config_shape(made.config, "x").cache_bytes(10, 1, "float32")
        held.append(cache.nbytes)
    assert [held[0] / other for other in held] == [1, 2, 4]


def test_a_pooled_model_trains_from_there():
    made = with_key_value_heads(tiny(), 1)
    made(some_tokens(2, 8), return_type="loss").backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 0, -2, 8])
def test_a_number_that_does_not_fit_names_those_that_do(n):
    told = fault(tiny(), n)
    assert f"n_key_value_heads = {n} for 4 query heads over 4" in told
    assert told.endswith("one of 1, 2, 4")


def test_groups_that_would_be_cut_are_refused():
    model = perturbed(tiny_config(attention={"n_heads": 6, "n_key_value_heads": 2, "d_head": 4}))
    assert fault(model, 3).endswith("one of 1, 2, 6")


def test_what_cannot_be_regrouped_is_refused():
    assert "pruned heads" in fault(interp.prune_heads(tiny(), [(0, 1)]), 2)
    told = fault(tiny(), 2, pooling="median")
    assert told == "pooling 'median': it should be one of mean, first, random"
    latent = {"kind": "latent", "n_heads": 4, "d_head": 6, "d_rope": 4, "d_latent": 10}
    for d_value in (5, 6):
        model = perturbed(
            tiny_config(
                attention={**latent, "d_value": d_value}, positional_embedding_type="rotary"
            )
        )
        assert "latent attention" in fault(model, 2)
