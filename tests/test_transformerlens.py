"""TransformerLens agrees: its own model with our weights, and its tools on our model."""

import contextlib
import io

import pytest
import torch
import transformer_lens.model_bridge.sources.native  # noqa: F401  (adds boot_native)
from tiny_models import D_VOCAB, N_CTX, error, padding, perturbed, some_tokens, tiny, tiny_config
from torch import Tensor
from transformer_lens import head_detector, patching
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from interp.errors import ModelError
from interp.models.transformer import Transformer
from interp.models.vocabulary import Vocabulary

# Two float32 implementations of two layers, each within about 1e-6 of the truth.
FLOAT32 = 1e-5

BRIDGED = {
    "mha": {},
    "gqa": {"attention": {"n_key_value_heads": 2}},
    "mqa": {"attention": {"n_key_value_heads": 1, "d_head": 10}},
    "rotary_mha": {"positional_embedding_type": "rotary"},
    "rotary_gqa": {
        "attention": {"n_key_value_heads": 2, "d_head": 8},
        "positional_embedding_type": "rotary",
        "rotary_base": 100.0,
        "normalization_type": "RMS",
        "mlp": {"d_mlp": 20, "act_fn": "silu", "gated": True, "bias": False},
    },
    "rotary_mqa": {
        "attention": {"n_key_value_heads": 1},
        "positional_embedding_type": "rotary",
        "normalization_type": "none",
    },
    "attention_only": {"mlp": None, "eps": 1e-2},
}


def neighbours(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of a projection in boot_native's order: it turns places 2i and 2i + 1 together, we turn
    places i and i + d_head / 2."""
    halves = weight.unflatten(0, (n_heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


def bridge_of(model: Transformer) -> TransformerBridge:
    """TransformerLens's own model with our model's weights."""
    cfg = model.cfg
    bridge = TransformerBridge.boot_native(
        TransformerBridgeConfig(
            n_layers=cfg.n_layers,
            d_model=cfg.d_model,
            n_heads=cfg.n_heads,
            n_key_value_heads=cfg.n_key_value_heads,
            d_head=cfg.d_head,
            d_mlp=cfg.d_mlp,
            n_ctx=cfg.n_ctx,
            d_vocab=cfg.d_vocab,
            act_fn=cfg.act_fn,
            attn_only=cfg.attn_only,
            gated_mlp=cfg.gated_mlp,
            normalization_type=cfg.normalization_type,
            positional_embedding_type=cfg.positional_embedding_type,
            rotary_base=cfg.rotary_base,
            eps=cfg.eps,
            seed=0,
        ),
        device="cpu",
    )
    weights = {}
    for name, value in model.state_dict().items():
        if cfg.positional_embedding_type == "rotary" and ".q_proj." in name:
            value = neighbours(value, cfg.n_heads)
        if cfg.positional_embedding_type == "rotary" and ".k_proj." in name:
            value = neighbours(value, cfg.n_key_value_heads)
        theirs = name.replace("pos_embed.", "pos.").replace("unembed.", "head.")
        theirs = theirs.replace("ln_final.", "ln_out.").replace("blocks.", "layers.")
        theirs = "tok_" + theirs if theirs.startswith("embed.") else theirs
        theirs = theirs.replace("_proj.", ".")
        if not cfg.gated_mlp:
            theirs = theirs.replace("mlp.in.", "mlp.fc_in.").replace("mlp.out.", "mlp.fc_out.")
        if theirs.endswith(".w"):
            theirs = theirs[:-1] + "weight"
        elif theirs.endswith(".b"):
            theirs = theirs[:-1] + "bias"
        weights[theirs] = value
    parameters = {
        name.replace("._original_component", ""): parameter
        for name, parameter in bridge.original_model.named_parameters()
    }
    assert set(parameters) == set(weights)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return bridge.eval()


@pytest.mark.parametrize("family", BRIDGED)
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_transformerlens_own_model_gives_our_log_probs_with_our_weights(family, side):
    model = perturbed(tiny_config(**BRIDGED[family]))
    bridge = bridge_of(model)
    tokens, mask = some_tokens(3, 9), padding(side, (9, 5, 2), 9)
    given, real = {}, torch.ones(3, 9, dtype=torch.bool)
    if mask is not None:
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        real = mask.bool()
    with torch.no_grad():
        theirs, ours = bridge(tokens, **given), model(tokens, attention_mask=mask)
        unpadded = model(tokens)
    assert error(ours.log_softmax(-1)[real], theirs.log_softmax(-1)[real]) < FLOAT32
    assert error(ours[real], theirs[real]) < FLOAT32
    if mask is not None:  # the mask mattered
        assert side == "right" or error(unpadded[real], theirs[real]) > 1e-2


@pytest.mark.parametrize("family", ["gqa", "rotary_gqa"])
def test_transformerlens_own_model_gives_our_activations_under_the_same_names(family):
    model = perturbed(tiny_config(**BRIDGED[family]))
    bridge = bridge_of(model)
    tokens = some_tokens(2, 7)
    with torch.no_grad():
        _, theirs = bridge.run_with_cache(tokens)
        _, ours = model.run_with_cache(tokens)
    # boot_native keeps the pattern under the name of the scores, and orders rotated dimensions
    # differently.
    other = ["hook_attn_scores"]
    if model.cfg.positional_embedding_type == "rotary":
        other += ["hook_q", "hook_k", "hook_rot_q", "hook_rot_k"]
    compared = [n for n in ours if n in theirs and not n.endswith(tuple(other))]
    errors = {name: error(ours[name], theirs[name]) for name in compared}
    assert max(errors.values()) < FLOAT32, errors
    for site in ("attn.hook_pattern", "attn.hook_v", "attn.hook_z", "hook_resid_pre"):
        assert f"blocks.1.{site}" in compared
    for site in ("hook_resid_mid", "hook_attn_out", "hook_mlp_out", "hook_resid_post"):
        assert f"blocks.1.{site}" in compared


def test_rotary_needs_the_permutation_to_match_neighbour_pairing(monkeypatch):
    model = perturbed(tiny_config(**BRIDGED["rotary_gqa"]))
    monkeypatch.setitem(globals(), "neighbours", lambda weight, n_heads: weight)
    tokens = some_tokens(2, 9)
    assert error(bridge_of(model)(tokens), model(tokens)) > 1e-2


# --- head_detector --------------------------------------------------------------------------


class Letters:
    """A vocabulary of one token a letter, with BOS 0."""

    bos_token_id = 0
    special_ids = frozenset({0})

    def __len__(self) -> int:
        return D_VOCAB

    def encode(self, text: str | list[str], *, prepend_bos: bool | None = None) -> list[list[int]]:
        texts = [text] if isinstance(text, str) else text
        lead = [] if prepend_bos is False else [0]
        return [[*lead, *(ord(letter) - ord("a") + 1 for letter in one)] for one in texts]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + i - 1) for i in ids if i)

    def token_texts(self, ids: list[int]) -> list[str]:
        return [self.decode([i]) for i in ids]

    def single_token(self, text: str) -> int:
        if len(text) != 1:
            raise ModelError(f"{text!r} is not one token")
        return self.encode(text)[0][1]


def lettered(**changes: object) -> Transformer:
    return perturbed(tiny_config(**changes), vocabulary=Letters())


def test_text_goes_through_the_vocabulary_and_ids_are_taken_as_they_are():
    model = lettered()
    assert isinstance(Letters(), Vocabulary)
    assert model.to_tokens("abc").tolist() == [[0, 1, 2, 3]]
    assert model.to_tokens(["ab", "cd"]).tolist() == [[0, 1, 2], [0, 3, 4]]
    assert model.to_tokens([[5, 6]]).tolist() == [[5, 6]]
    assert model.to_single_token("c") == 3
    assert torch.equal(model("abc"), model([[0, 1, 2, 3]]))
    with pytest.raises(ModelError, match="'ab' is not one token"):
        model.to_single_token("ab")
    with pytest.raises(ModelError, match="this model has no tokenizer"):
        tiny().to_single_token("a")


def expected_scores(pattern: Tensor, detection: Tensor, measure: str, bos: bool) -> Tensor:
    """detect_head's definition, for patterns [head, query, key]."""
    scores = []
    for head in pattern:
        head = head.clone()
        if bos and measure == "mul":
            head[:, 0] = 0
        if measure == "mul":
            scores.append((head * detection).sum() / head.sum())
        else:
            difference = (head - detection).abs()
            if bos:
                difference[:, 0] = 0
            scores.append(1 - difference.mean() * len(head))
    return torch.stack(scores)


@pytest.mark.parametrize("measure", ["mul", "abs"])
@pytest.mark.parametrize("bos", [False, True])
def test_detect_head_scores_every_head_of_our_model(measure, bos):
    model = lettered(attention={"n_key_value_heads": 2})
    text = "abcabc"
    tokens = [0, 1, 2, 3, 1, 2, 3]
    same = torch.tensor([[float(a == b) for b in tokens] for a in tokens]).tril(-1)
    shifted = torch.zeros(7, 7)
    shifted[:, 1:] = same[:, :-1]
    named = {
        "previous_token_head": torch.diag(torch.ones(6), -1),
        "duplicate_token_head": same,
        "induction_head": shifted.tril(),
    }
    _, cache = model.run_with_cache(text, remove_batch_dim=True)
    before = {name: value.clone() for name, value in cache.items()}
    for name, detection in named.items():
        options = {"error_measure": measure, "exclude_bos": bos}
        fresh = head_detector.detect_head(model, text, name, **options)
        cached = head_detector.detect_head(model, text, name, cache=cache, **options)
        wanted = torch.stack(
            [
                expected_scores(cache["pattern", layer], detection, measure, bos)
                for layer in range(2)
            ]
        )
        # `abs` rounds to three decimals.
        assert error(fresh, wanted) < (FLOAT32 if measure == "mul" else 6e-4), name
        assert torch.equal(fresh, cached)
    assert all(torch.equal(cache[name], before[name]) for name in before)
    some = head_detector.detect_head(model, text, "induction_head", heads=[(1, 2)])
    assert (some == -1).sum() == 7
    assert some[1, 2] != -1


# --- patching -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mha", "shortformer", "llama"])
def test_patching_tools_give_the_metric_of_each_patched_run(family):
    model = tiny(family)
    clean, corrupted = some_tokens(2, 5, seed=1), some_tokens(2, 5, seed=2)

    def metric(logits: Tensor) -> Tensor:
        return (logits[:, -1, 3] - logits[:, -1, 7]).mean()

    def by_position(name: str, pos: int) -> Tensor:
        def patch(x: Tensor, hook: object) -> Tensor:
            x = x.clone()
            x[:, pos] = cache[name][:, pos]
            return x

        return metric(model.run_with_hooks(corrupted, fwd_hooks=[(name, patch)]))

    def by_head(name: str, axis: int, head: int) -> Tensor:
        def patch(x: Tensor, hook: object) -> Tensor:
            x = x.clone()
            x.select(axis, head).copy_(cache[name].select(axis, head))
            return x

        return metric(model.run_with_hooks(corrupted, fwd_hooks=[(name, patch)]))

    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):  # tqdm's bar
        _, cache = model.run_with_cache(clean)
        runs = {
            "resid_pre": patching.get_act_patch_resid_pre,
            "attn_out": patching.get_act_patch_attn_out,
            "mlp_out": patching.get_act_patch_mlp_out,
        }
        for site, tool in runs.items():
            actual = tool(model, corrupted, cache, metric)
            wanted = torch.stack(
                [
                    torch.stack([by_position(f"blocks.{i}.hook_{site}", p) for p in range(5)])
                    for i in range(2)
                ]
            )
            assert error(actual, wanted) < 1e-6, site
            assert wanted.std() > 0.01
        tools = {
            ("z", 2): patching.get_act_patch_attn_head_out_all_pos,
            ("pattern", 1): patching.get_act_patch_attn_head_pattern_all_pos,
        }
        for (site, axis), tool in tools.items():
            actual = tool(model, corrupted, cache, metric)
            wanted = torch.stack(
                [
                    torch.stack(
                        [by_head(f"blocks.{i}.attn.hook_{site}", axis, h) for h in range(4)]
                    )
                    for i in range(2)
                ]
            )
            assert error(actual, wanted) < 1e-6, site
            assert wanted.std() > 0.01
        # Patching everything at layer 0 turns the corrupted run into the clean one, fused or not.
        everything = [("blocks.0.hook_resid_pre", lambda x, hook: cache[hook.name].clone())]
        restored = metric(model.run_with_hooks(corrupted, fwd_hooks=everything))
        assert abs(float(restored - metric(model(clean)))) < FLOAT32
    assert not model.list_hooks()


# --- ActivationCache ------------------------------------------------------------------------

CACHED = pytest.mark.parametrize(
    "family", ["gqa", "shortformer", "attention_only", "llama", "no_positions", "no_norm"]
)


@CACHED
def test_decompositions_sum_to_the_residual_stream(family):
    model = tiny(family)
    with torch.no_grad():
        _, cache = model.run_with_cache(some_tokens(2, 5))
        for layer in (0, 1, 2):
            name = "blocks.1.hook_resid_post" if layer == 2 else f"blocks.{layer}.hook_resid_pre"
            parts, labels = cache.decompose_resid(layer, return_labels=True)
            assert len(labels) == len(parts)
            assert ("pos_embed" in labels) == (family in ("gqa", "attention_only", "no_norm"))
            assert error(parts.sum(0), cache[name]) < FLOAT32, labels
        last = cache["blocks.1.hook_resid_post"]
        accumulated, labels = cache.accumulated_resid(return_labels=True)
        assert labels == ["0_pre", "1_pre", "final_post"]
        for part, name in zip(accumulated, ("resid_pre", "resid_pre", "resid_post"), strict=True):
            assert part.shape == last.shape, name
        assert torch.equal(accumulated[1], cache["blocks.1.hook_resid_pre"])
        assert torch.equal(accumulated[-1], last)
        heads, labels = cache.stack_head_results(incl_remainder=True, return_labels=True)
        assert labels[:2] == ["L0H0", "L0H1"]
        assert labels[-1] == "remainder"
        assert error(heads.sum(0), last) < FLOAT32
        for layer in (0, 1):
            attn = model.blocks[layer].attn
            of_layer = heads[4 * layer : 4 * layer + 4].sum(0)
            assert error(of_layer + attn.b_O, cache["attn_out", layer]) < FLOAT32


def test_a_cache_of_chosen_sequences_still_sums_to_the_shortformer_stream():
    model = tiny("shortformer")
    with torch.no_grad():
        _, cache = model.run_with_cache(some_tokens(3, 5))
        chosen = cache.apply_slice_to_batch_dim([2, 0])
        total = chosen.decompose_resid().sum(0)
        assert error(total, cache["blocks.1.hook_resid_post"][[2, 0]]) < FLOAT32
        one = cache.apply_slice_to_batch_dim(1)
        assert not one.has_batch_dim
        assert error(one.decompose_resid().sum(0), cache["blocks.1.hook_resid_post"][1]) < FLOAT32


@CACHED
def test_the_logit_lens_recomputes_the_final_norm_at_every_layer(family):
    model = tiny(family)
    with torch.no_grad():
        logits, cache = model.run_with_cache(some_tokens(2, 5))
        lens = cache.accumulated_resid(apply_ln=True) @ model.W_U + model.b_U
        for layer, seen in enumerate(lens):
            name = "blocks.1.hook_resid_post" if layer == 2 else f"blocks.{layer}.hook_resid_pre"
            wanted = model.unembed(model.ln_final(cache[name]))
            assert error(seen.log_softmax(-1), wanted.log_softmax(-1)) < FLOAT32
            frozen = cache.apply_ln_to_stack(cache[name][None])[0]
            if layer < 2 and model.cfg.normalization_type:
                # The last layer's scale reused for an earlier one is another number.
                assert error(frozen, model.ln_final(cache[name])) > 1e-2
        assert error(lens[-1], logits) < FLOAT32


@CACHED
def test_logit_attributions_sum_to_the_logits(family):
    model = tiny(family)
    tokens = some_tokens(2, 5)
    with torch.no_grad():
        if model.cfg.normalization_type:
            # Attributions leave the final gain out, as TransformerLens's do.
            model.ln_final.w.fill_(1.0)
            if model.cfg.normalization_type == "LN":
                model.ln_final.b.zero_()
        logits, cache = model.run_with_cache(tokens)
        logits = logits - model.b_U
        parts = cache.logit_attrs(cache.decompose_resid(), tokens)
        wanted = logits.gather(2, tokens[:, :, None])[:, :, 0]
        assert error(parts.sum(0), wanted) < FLOAT32
        other = (tokens + 1) % D_VOCAB
        difference = cache.logit_attrs(cache.decompose_resid(), tokens, incorrect_tokens=other)
        wanted = wanted - logits.gather(2, other[:, :, None])[:, :, 0]
        assert error(difference.sum(0), wanted) < FLOAT32
        heads = cache.stack_head_results(incl_remainder=True)
        assert error(cache.logit_attrs(heads, 3).sum(0), logits[:, :, 3]) < FLOAT32
        last = cache.logit_attrs(cache.decompose_resid(pos_slice=-1), 3, pos_slice=-1)
        assert error(last.sum(0), logits[:, -1, 3]) < FLOAT32


def test_logit_attributions_take_a_text_that_is_one_token():
    model = lettered()
    with torch.no_grad():
        _, cache = model.run_with_cache("abcd")
        stack = cache.decompose_resid()
        assert torch.equal(cache.logit_attrs(stack, "c"), cache.logit_attrs(stack, 3))


@pytest.mark.parametrize("family", ["shortformer", "attention_only"])
def test_tools_work_on_a_cache_without_a_batch_axis(family):
    model = tiny(family)
    with torch.no_grad():
        logits, cache = model.run_with_cache(some_tokens(1, 5), remove_batch_dim=True)
        last = cache["blocks.1.hook_resid_post"]
        assert last.shape == (5, 24)
        assert error(cache.decompose_resid().sum(0), last) < FLOAT32
        assert error(cache.stack_head_results(incl_remainder=True).sum(0), last) < FLOAT32
        lens = cache.accumulated_resid(apply_ln=True)[-1] @ model.W_U + model.b_U
        assert error(lens, logits[0]) < FLOAT32


def test_tools_that_do_not_run_on_our_model_are_refused_by_name():
    model = tiny()
    with torch.no_grad():
        _, cache = model.run_with_cache(some_tokens(1, N_CTX))
        with pytest.raises(AttributeError, match=r"Transformer has no 'accumulated_bias'; .*docs/"):
            cache.get_full_resid_decomposition()
