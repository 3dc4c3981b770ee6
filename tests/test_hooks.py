"""Hooks and caches: what they see, what they change, and that they leave nothing behind."""

import math

import pytest
import torch
from tiny_models import error, padding, some_tokens, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from interp.errors import ModelError, ShapeError
from interp.models import head_attention

# Float32 sums in another order differ by about 1e-6.
FLOAT32 = 1e-5
# Built only where hooked: hooking one changes the order of sums, though not what is summed.
LAZY = ("hook_attn_scores", "hook_pattern", "hook_result")
FAMILIES = pytest.mark.parametrize(
    "family", ["mha", "shortformer", "rotary_smeared", "llama", "gated_with_bias", "no_norm"]
)
PATTERN = "blocks.0.attn.hook_pattern"
Z = "blocks.0.attn.hook_z"


def read(activation: Tensor, hook: object) -> None:
    """A hook that only looks."""


def zero_head(z: Tensor, hook: object) -> Tensor:
    z = z.clone()
    z[:, :, 1] = 0
    return z


def everything(name: str) -> bool:
    return True


# --- values ---------------------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_patching_a_cached_value_back_in_changes_no_bit(family, side, grad):
    model = tiny(family, n_layers=1)
    tokens, mask = some_tokens(2, 5), padding(side, (5, 2), 5)
    moved = []
    with torch.set_grad_enabled(grad):
        clean = model(tokens, attention_mask=mask)
        for name in model.hook_dict:
            _, cache = model.run_with_cache(tokens, attention_mask=mask, names_filter=name)
            looked, patched = (
                model.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=[(name, hook)])
                for hook in (read, lambda x, hook, cache=cache: cache[hook.name].clone())
            )
            if not torch.equal(patched, looked):
                moved.append(name)
            if name.endswith(LAZY):
                assert error(looked, clean) < FLOAT32, name
            elif not torch.equal(looked, clean):
                moved.append(name)
    assert not moved


@FAMILIES
def test_every_hook_is_live_an_edit_there_changes_the_logits(family):
    def tilts(x: Tensor, hook: object) -> Tensor:
        # Neither a constant nor a factor: a softmax ignores the one, a norm the other.
        return x * torch.linspace(0.5, 1.5, x.shape[-1])

    model = tiny(family)
    tokens = some_tokens(2, 5)
    clean = model(tokens)
    edited = {
        name: model.run_with_hooks(tokens, fwd_hooks=[(name, tilts)]) for name in model.hook_dict
    }
    assert not [name for name in edited if error(edited[name], clean) < 1e-3]


@FAMILIES
def test_shapes_follow_the_hook_table(family):
    model = tiny(family)
    cfg, (b, t) = model.cfg, (3, 5)
    _, cache = model.run_with_cache(some_tokens(b, t), names_filter=everything)
    head, grouped = (b, t, cfg.n_heads, cfg.d_head), (b, t, cfg.n_key_value_heads, cfg.d_head)
    stream, square = (b, t, cfg.d_model), (b, cfg.n_heads, t, t)
    wanted = {"hook_embed": stream}
    if cfg.positional_embedding_type in ("standard", "shortformer"):
        wanted["hook_pos_embed"] = stream
    norms = ["ln_final"]
    for layer in range(cfg.n_layers):
        block, attn = f"blocks.{layer}", f"blocks.{layer}.attn"
        norms += [f"{block}.ln1", f"{block}.ln2"]
        for site in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"):
            wanted[f"{block}.hook_{site}"] = stream
        wanted |= {f"{attn}.hook_q": head, f"{attn}.hook_k": grouped, f"{attn}.hook_v": grouped}
        if cfg.positional_embedding_type == "rotary":
            wanted |= {f"{attn}.hook_rot_q": head, f"{attn}.hook_rot_k": grouped}
        wanted |= {f"{attn}.hook_attn_scores": square, f"{attn}.hook_pattern": square}
        wanted |= {f"{attn}.hook_z": head, f"{attn}.hook_result": (b, t, 4, cfg.d_model)}
        for site in ("pre", "post", *(["pre_linear"] if cfg.gated_mlp else [])):
            wanted[f"{block}.mlp.hook_{site}"] = (b, t, cfg.d_mlp)
    for name in norms if cfg.normalization_type else ():
        wanted |= {f"{name}.hook_scale": (b, t, 1), f"{name}.hook_normalized": stream}
    assert {name: tuple(cache[name].shape) for name in cache} == wanted


@pytest.mark.parametrize("family", ["mha", "gqa", "no_attention_bias"])
def test_cached_activations_obey_the_identities_of_attention(family):
    model = tiny(family)
    _, cache = model.run_with_cache(some_tokens(2, 7), names_filter=everything)
    for layer in range(2):
        attn = model.blocks[layer].attn
        q, k, v, scores, pattern, z, result = (
            cache[f"blocks.{layer}.attn.hook_{site}"]
            for site in ("q", "k", "v", "attn_scores", "pattern", "z", "result")
        )
        group = 4 // v.shape[2]
        for h in range(4):
            # hook_v already holds its bias: adding b_V again would be off by a constant vector.
            assert error(z[:, :, h], pattern[:, h] @ v[:, :, h // group]) < FLOAT32
            dots = q[:, :, h] @ k[:, :, h // group].transpose(1, 2) / math.sqrt(6)
            future = torch.ones(7, 7).triu(1).bool()
            assert error(scores[:, h], dots.masked_fill(future, -math.inf)) < FLOAT32
        attn_out = cache[f"blocks.{layer}.hook_attn_out"]
        assert error(result.sum(2) + attn.b_O, attn_out) < FLOAT32


def test_edits_by_return_in_place_and_in_place_returning_none_are_one():
    def returns(z: Tensor, hook: object) -> Tensor:
        return zero_head(z, hook)

    def edits_and_returns(z: Tensor, hook: object) -> Tensor:
        z[:, :, 1] = 0
        return z

    def edits(z: Tensor, hook: object) -> None:
        z[:, :, 1] = 0

    model, tokens = tiny("gqa"), some_tokens(2, 5)
    with torch.no_grad():
        clean, cache = model.run_with_cache(tokens)
        before = {name: value.clone() for name, value in cache.items()}
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        runs = [
            model.run_with_hooks(tokens, fwd_hooks=[(Z, hook)])
            for hook in (returns, edits_and_returns, edits)
        ]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    assert error(runs[0], clean) > 0.1
    assert all(torch.equal(cache[name], before[name]) for name in before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@FAMILIES
def test_an_edit_in_place_acts_like_a_returned_one_at_every_hook_and_spares_the_weights(family):
    model, tokens = tiny(family, n_layers=1), some_tokens(2, 5)
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    def doubles(x: Tensor, hook: object) -> None:
        x.mul_(2)

    with torch.no_grad():
        for name in model.hook_dict:
            wanted = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: 2 * x)])
            edited = model.run_with_hooks(tokens, fwd_hooks=[(name, doubles)])
            assert torch.equal(edited, wanted), name
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_detached_scale_stops_the_gradient_though_its_value_is_the_same():
    gradients = {}
    for family in ("mha", "llama"):
        for kind in ("clean", "looked", "detached"):
            model = tiny(family)
            hook = {"clean": None, "looked": read, "detached": lambda s, hook: s.detach()}[kind]
            fwd = [(lambda n: n.endswith("hook_scale"), hook)] if hook else []
            with model.hooks(fwd_hooks=fwd):
                model(some_tokens(2, 5), return_type="loss").backward()
            gradients[kind] = model.embed.weight.grad
        assert error(gradients["looked"], gradients["clean"]) < FLOAT32
        assert error(gradients["detached"], gradients["clean"]) > 1e-3


def test_the_order_in_which_names_are_asked_for_changes_nothing():
    def last_position(x: Tensor, hook: object) -> Tensor:
        x = x.clone()
        x[:, -1] = 0
        return x

    model, tokens = tiny("mha"), some_tokens(2, 5)
    names = ["blocks.0.hook_mlp_out", "blocks.1.hook_mlp_out", "blocks.0.hook_resid_mid"]
    with model.hooks(fwd_hooks=[(lambda n: n.endswith("hook_attn_out"), last_position)]):
        runs = [model.run_with_cache(tokens, names_filter=order) for order in (names, names[::-1])]
    assert torch.equal(runs[0][0], runs[1][0])
    assert error(runs[0][0], model(tokens)) > 1e-3
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in names)


# --- what is left behind --------------------------------------------------------------------


def test_a_hook_that_raises_is_taken_off_again():
    def fails(z: Tensor, hook: object) -> None:
        raise IndexError("no such head")

    model, tokens = tiny("gqa"), some_tokens(2, 5)
    clean = model(tokens)
    with pytest.raises(IndexError, match="no such head"):
        model.run_with_hooks(tokens, fwd_hooks=[(PATTERN, zero_head), (Z, fails)])
    with pytest.raises(IndexError, match="no such head"), model.hooks(fwd_hooks=[(Z, fails)]):
        model.run_with_cache(tokens)
    with pytest.raises(ModelError, match=r"no hook 'blocks\.0\.attn\.hook_y'"):
        model.run_with_hooks(tokens, fwd_hooks=[(Z, zero_head), ("blocks.0.attn.hook_y", read)])
    assert not model.list_hooks()
    assert model.context_level == 0
    assert torch.equal(model(tokens), clean)


def test_caching_and_nested_contexts_leave_the_users_own_hooks_alone():
    model, tokens = tiny("gqa"), some_tokens(2, 5)
    clean = model(tokens)
    assert model.add_hook(Z, zero_head) is None  # there is no handle: reset_hooks removes it
    edited = model(tokens)
    assert not torch.equal(edited, clean)
    _, cache = model.run_with_cache(tokens, names_filter=Z)
    assert not cache[Z][:, :, 1].any()
    model.run_with_hooks(tokens, fwd_hooks=[(Z, read)])
    assert torch.equal(model(tokens), edited)
    model.reset_hooks()
    assert torch.equal(model(tokens), clean)
    with model.hooks(fwd_hooks=[(Z, zero_head)]):
        with model.hooks(fwd_hooks=[(Z, read)]):
            assert torch.equal(model(tokens), edited)
        assert torch.equal(model(tokens), edited)
        model.run_with_cache(tokens)
        assert torch.equal(model(tokens), edited)
    assert not model.list_hooks()
    assert torch.equal(model(tokens), clean)


def test_a_permanent_hook_outlives_a_reset():
    model, tokens = tiny("gqa"), some_tokens(2, 5)
    clean = model(tokens)
    model.add_hook(Z, zero_head, is_permanent=True)
    model.reset_hooks()
    assert not torch.equal(model(tokens), clean)
    model.reset_hooks(including_permanent=True)
    assert torch.equal(model(tokens), clean)


# --- names ----------------------------------------------------------------------------------


def test_a_name_a_list_and_a_predicate_select_the_same_single_entry():
    model, tokens = tiny("gqa"), some_tokens(2, 5)
    caches = [
        model.run_with_cache(tokens, names_filter=wanted)[1]
        for wanted in (Z, [Z], (Z,), lambda name: name == Z)
    ]
    for cache in caches:
        assert list(cache) == [Z]
        assert torch.equal(cache[Z], caches[0][Z])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            "blocks.0.attn.hook_patern",
            r"no hook 'blocks\.0\.attn\.hook_patern'; did you mean blocks\.0\.attn\.hook_pattern",
        ),
        ([Z, "blocks.7.attn.hook_z"], r"no hook 'blocks\.7\.attn\.hook_z'; did you mean .*hook_z"),
        ("§", r"no hook '§'; see model\.hook_dict"),
        ([], r"no hook names were given"),
        (
            lambda name: False,
            r"no hook matches the predicate; the model has 40, such as hook_embed",
        ),
    ],
)
def test_names_that_match_nothing_are_refused_with_near_ones(wanted, message):
    model, tokens = tiny("gqa"), some_tokens(2, 5)
    for ask in (
        lambda: model.run_with_cache(tokens, names_filter=wanted),
        *([lambda: model.add_hook(wanted, read)] if not isinstance(wanted, list) else []),
    ):
        with pytest.raises(ModelError, match=message):
            ask()
    assert not model.list_hooks()


def test_a_cache_of_everything_leaves_hook_result_out_and_its_name_brings_it():
    model, tokens = tiny("gqa"), some_tokens(2, 5)
    _, cache = model.run_with_cache(tokens)
    results = {f"blocks.{layer}.attn.hook_result" for layer in range(2)}
    assert set(model.hook_dict) - set(cache) == results
    _, by_name = model.run_with_cache(tokens, names_filter=sorted(results))
    assert set(by_name) == results
    assert by_name["result", 1].shape == (2, 5, 4, 24)


# --- caches ---------------------------------------------------------------------------------


def test_a_cache_holds_copies_without_gradients():
    model, tokens = tiny("shortformer"), some_tokens(2, 5)
    clean, cache = model.run_with_cache(tokens, names_filter=everything)
    assert clean.requires_grad
    storages = {value.untyped_storage().data_ptr() for value in cache.values()}
    assert len(storages) == len(cache)
    assert not storages & {p.untyped_storage().data_ptr() for p in model.parameters()}
    before = {name: value.clone() for name, value in cache.items()}
    for value in cache.values():
        assert not value.requires_grad
        value.zero_()
    again, second = model.run_with_cache(tokens, names_filter=everything)
    assert torch.equal(again, clean)
    assert all(torch.equal(second[name], before[name]) for name in before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(second[name], before[name]) for name in before)


@FAMILIES
@pytest.mark.parametrize(
    ("pos_slice", "index"),
    [(-1, [4]), (2, [2]), ((1, 4), [1, 2, 3]), (slice(0, 5, 2), [0, 2, 4]), ([3, 0], [3, 0])],
    ids=["last", "int", "tuple", "slice", "list"],
)
def test_positions_are_sliced_on_every_hook_and_queries_on_patterns(family, pos_slice, index):
    model, tokens = tiny(family), some_tokens(3, 5)
    _, full = model.run_with_cache(tokens, names_filter=everything)
    _, sliced = model.run_with_cache(tokens, names_filter=everything, pos_slice=pos_slice)
    assert set(sliced) == set(full)
    for name, value in full.items():
        pos_axis = 2 if name.endswith(("hook_attn_scores", "hook_pattern")) else 1
        assert torch.equal(sliced[name], value.index_select(pos_axis, torch.tensor(index))), name


def test_the_batch_axis_goes_for_one_sequence_and_is_refused_for_several():
    model = tiny("shortformer")
    _, with_batch = model.run_with_cache(some_tokens(1, 5))
    _, without = model.run_with_cache(some_tokens(1, 5), remove_batch_dim=True)
    assert not without.has_batch_dim
    assert all(torch.equal(without[name], with_batch[name][0]) for name in with_batch)
    _, last = model.run_with_cache(some_tokens(1, 5), remove_batch_dim=True, pos_slice=-1)
    assert last[Z].shape == (1, 4, 6)
    with pytest.raises(ShapeError, match="remove_batch_dim on a batch of 3"):
        model.run_with_cache(some_tokens(3, 5), remove_batch_dim=True)
    assert not model.list_hooks()


def test_a_cache_goes_to_the_device_that_is_asked_for():
    _, cache = tiny().run_with_cache(some_tokens(1, 3), device="meta")
    assert {value.device.type for value in cache.values()} == {"meta"}


@FAMILIES
@pytest.mark.parametrize("side", ["none", "left"])
def test_gradients_in_a_cache_are_those_autograd_gives(family, side):
    model = tiny(family)
    tokens, mask = some_tokens(2, 5), padding(side, (5, 2), 5)
    given = {"attention_mask": mask, "return_type": "loss"}
    loss, cache = model.run_with_cache(tokens, names_filter=everything, incl_bwd=True, **given)
    assert set(cache) == {n + end for n in model.hook_dict for end in ("", "_grad")}
    assert not model.list_hooks()
    seen = {}

    def keep(x: Tensor, hook: object) -> None:
        seen[hook.name] = x

    with model.hooks(fwd_hooks=[(everything, keep)]):
        again = model(tokens, **given)
    assert torch.equal(again, loss)  # listening to a gradient changes no value
    gradients = dict(zip(seen, torch.autograd.grad(again, list(seen.values())), strict=True))
    for name in model.hook_dict:
        assert error(cache[name + "_grad"], gradients[name]) < FLOAT32, name
        assert gradients[name].any(), name


# --- built only when asked for --------------------------------------------------------------


class SquareTensors(TorchDispatchMode):
    """Counts the tensors made with two axes of the sequence's length."""

    def __init__(self, n_pos: int):
        super().__init__()
        self.n_pos = n_pos
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and list(tensor.shape).count(self.n_pos) > 1:
                self.count += 1
        return out


@FAMILIES
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_without_a_hook_on_scores_or_pattern_nothing_is_quadratic_forward_or_backward(family, side):
    model = tiny(family)
    tokens, mask = some_tokens(2, 13), padding(side, (13, 9), 13)
    elsewhere = [n for n in model.hook_dict if not n.endswith(LAZY[:2])]
    with SquareTensors(13) as squares:
        loss, _ = model.run_with_cache(
            tokens,
            attention_mask=mask,
            return_type="loss",
            names_filter=elsewhere,
            incl_bwd=True,
        )
        assert squares.count == 0
        model.run_with_cache(tokens, attention_mask=mask, names_filter=PATTERN)
        assert squares.count > 0  # the counter does see them
    assert loss.isfinite()


@pytest.mark.parametrize("site", ["hook_attn_scores", "hook_pattern"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_hook_of_either_direction_makes_its_own_layer_dense_for_that_call_only(
    site, direction, monkeypatch
):
    model, tokens = tiny("gqa"), some_tokens(2, 5)
    dense_layers = []
    original = head_attention.attention_scores

    def counted(q: Tensor, k: Tensor, allowed: Tensor, scale: float) -> Tensor:
        dense_layers.append([layer for layer in (0, 1) if q is seen[layer]])
        return original(q, k, allowed, scale)

    monkeypatch.setattr(head_attention, "attention_scores", counted)
    seen: dict[int, Tensor] = {}

    def keep(q: Tensor, hook: object) -> None:
        seen[hook.layer()] = q

    keeping = [(f"blocks.{layer}.attn.hook_q", keep) for layer in (0, 1)]
    with model.hooks(fwd_hooks=keeping):
        model(tokens)
        assert dense_layers == []
        for layer in (0, 1):
            asked = [(f"blocks.{layer}.attn.{site}", read)]
            with model.hooks(**{f"{direction}_hooks": asked}):
                model(tokens, return_type="loss").backward()
            assert dense_layers == [[layer]]
            dense_layers.clear()
        model(tokens)
    assert dense_layers == []


def test_hook_result_is_built_only_where_it_is_hooked(monkeypatch):
    model, tokens = tiny("gqa"), some_tokens(2, 5)
    asked = []
    original = head_attention.HeadAttention.W_O.fget
    monkeypatch.setattr(
        head_attention.HeadAttention,
        "W_O",
        property(lambda self: asked.append(self) or original(self)),
    )
    model(tokens)
    model.run_with_cache(tokens)
    assert asked == []
    model.run_with_cache(tokens, names_filter="blocks.1.attn.hook_result")
    assert asked == [model.blocks[1].attn]


def test_a_result_edited_for_one_head_removes_exactly_what_it_adds():
    model, tokens = tiny("gqa"), some_tokens(2, 5)
    name, out = "blocks.0.attn.hook_result", "blocks.0.hook_attn_out"
    _, cache = model.run_with_cache(tokens, names_filter=[name, out])
    with model.hooks(fwd_hooks=[(name, zero_head)]):
        _, edited = model.run_with_cache(tokens, names_filter=out)
    assert error(edited[out], cache[out] - cache[name][:, :, 1]) < FLOAT32


def test_raw_scores_may_be_edited_above_the_diagonal_too():
    model = tiny("gqa")
    scores = "blocks.0.attn.hook_attn_scores"
    with model.hooks(fwd_hooks=[(scores, lambda s, hook: torch.zeros_like(s))]):
        _, cache = model.run_with_cache(some_tokens(2, 5), names_filter=PATTERN)
    assert error(cache[PATTERN], torch.full((2, 4, 5, 5), 0.2)) < 1e-6
