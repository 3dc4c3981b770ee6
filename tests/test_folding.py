"""Folding the norms changes where the gains are, and nothing a model says."""

import copy
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, error, padding, perturbed, some_tokens, tiny, tiny_config
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

import interp
from interp.data.tokenizer import BytePairVocabulary
from interp.errors import ModelError
from interp.models.folding import fold_layer_norm
from interp.models.loading import load_model, save_model
from interp.models.pretrained import save_pretrained
from interp.models.transformer import Transformer
from interp.models.weights import stored_weights

# What rounding leaves of float64 after two layers; float32 is judged by the tolerance of log-probs.
FLOAT64 = 1e-12
LOG_PROBS = 1e-4
FOLD = 1e-5  # two float32 foldings, each a product over d_model

# The named families, and each kind of norm with and without an unembedding of its own, with a norm
# on queries and keys, and with biases that are not the same for all projections.
CASES: dict[str, tuple[str, dict]] = {
    **{name: (name, {}) for name in FAMILIES if name != "shortformer"},
    "tied_ln": ("mha", {"tie_embeddings": True}),
    "tied_rms": ("llama", {"tie_embeddings": True}),
    "tied_with_bias": ("relu_tied", {"unembed_bias": True}),
    "qk_norm": ("llama", {"attention": {"qk_norm": True}}),
    "ln_qk_norm": ("gqa", {"attention": {"qk_norm": True}}),
    "output_bias_only": ("gqa", {"attention": {"bias": False, "output_bias": True}}),
    "no_output_bias": ("llama", {"attention": {"bias": True, "output_bias": False}}),
    "no_biases": ("mha", {"attention": {"bias": False}, "mlp": {"d_mlp": 20, "bias": False}}),
    "window": ("rotary", {"attention": {"window": 3, "windowed_layers": (1,)}}),
    "shortformer_no_norm": ("shortformer", {"normalization_type": "none"}),
}


def model_of(case: str) -> Transformer:
    """The tiny model of a case, in float64."""
    family, changes = CASES[case]
    return tiny(family, seed=3, **changes).double()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("side", ["none", "left"])
def test_the_model_says_the_same(case: str, side: str) -> None:
    model, tokens = model_of(case), some_tokens(2, 9)
    mask = padding(side, [9, 6], 9)
    folded = fold_layer_norm(model)
    with torch.no_grad():
        before, seen = model.run_with_cache(tokens, attention_mask=mask)
        after, seen_folded = folded.run_with_cache(tokens, attention_mask=mask)
    assert error(after.log_softmax(-1), before.log_softmax(-1)) < FLOAT64
    assert seen.keys() == seen_folded.keys()
    for name in seen:
        assert error(seen_folded[name], seen[name]) < FLOAT64, name


@pytest.mark.parametrize("case", ["mha", "tied_ln", "llama", "tied_rms"])
def test_log_probs_agree_in_float32(case: str) -> None:
    family, changes = CASES[case]
    model, tokens = tiny(family, **changes), some_tokens(3, 12)
    with torch.no_grad():
        before, after = model(tokens), fold_layer_norm(model)(tokens)
    assert float((after.log_softmax(-1) - before.log_softmax(-1)).abs().max()) < LOG_PROBS


@pytest.mark.parametrize("case", CASES)
def test_every_gain_is_one_and_every_bias_of_a_norm_zero(case: str) -> None:
    model = model_of(case)
    named = dict(fold_layer_norm(model).named_parameters())
    norms = [name for name in named if name.split(".")[-2] in ("ln1", "ln2", "ln_final")]
    n_norms = 2 * (1 if model.config.mlp is None else 2) + 1
    kinds = {"LN": 2, "RMS": 1, "none": 0}
    assert len(norms) == n_norms * kinds[model.config.normalization_type]
    for name in norms:
        wanted = 1.0 if name.endswith(".w") else 0.0
        assert torch.equal(named[name], torch.full_like(named[name], wanted)), name


def test_one_head_by_hand() -> None:
    """Gain 2 on the first of two dimensions, bias 3 on the second."""
    model = tiny("mha", d_model=2, n_layers=1, attention={"n_heads": 1}, mlp=None)
    block = model.blocks[0]
    with torch.no_grad():
        block.ln1.w.copy_(torch.tensor([2.0, 1.0]))
        block.ln1.b.copy_(torch.tensor([0.0, 3.0]))
        block.attn.q_proj.weight.copy_(torch.tensor([[1.0, 10.0], [100.0, 1000.0]]))
        block.attn.q_proj.bias.copy_(torch.tensor([0.5, 0.25]))
    queries = fold_layer_norm(model).blocks[0].attn.q_proj
    assert queries.weight.tolist() == [[2.0, 10.0], [200.0, 1000.0]]
    assert queries.bias.tolist() == [30.5, 3000.25]


@pytest.mark.parametrize("case", ["mha", "tied_ln", "llama", "no_norm"])
def test_the_given_model_stays_as_it_was(case: str) -> None:
    model, tokens = model_of(case), some_tokens(2, 9)
    weights, config = copy.deepcopy(stored_weights(model)), model.config
    with torch.no_grad():
        before = model(tokens)
        folded = fold_layer_norm(model)
        for parameter in folded.parameters():
            parameter.zero_()
        assert torch.equal(model(tokens), before)
    assert model.config == config
    assert stored_weights(model).keys() == weights.keys()
    for name, value in stored_weights(model).items():
        assert torch.equal(value, weights[name]), name


def test_a_tied_unembedding_gets_weights_of_its_own() -> None:
    model = model_of("tied_ln")
    folded = fold_layer_norm(model)
    assert model.config.tie_embeddings
    assert not folded.config.tie_embeddings
    assert torch.equal(folded.embed.weight, model.embed.weight)
    assert folded.unembed.weight.data_ptr() != folded.embed.weight.data_ptr()
    assert torch.equal(folded.unembed.weight, model.embed.weight * model.ln_final.w)


def test_biases_appear_only_where_a_layer_norm_had_one() -> None:
    config = fold_layer_norm(model_of("no_biases")).config
    assert config.attention.bias
    assert not config.attention.output_bias
    assert config.mlp is not None
    assert config.mlp.bias
    assert config.unembed_bias
    llama = model_of("llama").config
    assert fold_layer_norm(model_of("llama")).config == llama


def test_folding_twice_is_folding_once() -> None:
    once = fold_layer_norm(model_of("tied_ln"))
    twice = fold_layer_norm(once)
    assert twice.config == once.config
    for name, value in stored_weights(once).items():
        assert torch.equal(stored_weights(twice)[name], value), name


def test_a_folded_model_is_saved_and_loaded(tmp_path: Path) -> None:
    folded, tokens = fold_layer_norm(tiny("relu_tied")), some_tokens(2, 9)
    save_model(folded, tmp_path)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path)(tokens), folded(tokens))


def test_name_vocabulary_and_dtype_are_kept() -> None:
    vocabulary = BytePairVocabulary.train(["the cat sat"], 256)
    model = perturbed(tiny_config(d_vocab=256), vocabulary=vocabulary, model_name="tiny").bfloat16()
    folded = interp.fold_layer_norm(model)
    assert folded.model_name == "tiny"
    assert folded.vocabulary is vocabulary
    assert {value.dtype for value in folded.parameters()} == {torch.bfloat16}


def test_shortformer_positions_are_refused() -> None:
    with pytest.raises(ModelError) as refused:
        fold_layer_norm(tiny("shortformer"))
    assert str(refused.value) == (
        "the norms of a model with positional_embedding_type = 'shortformer' cannot be folded: "
        "queries and keys read positions that the gain does not scale; 'standard', 'rotary' and "
        "'none' can"
    )


def test_transformer_lens_folds_to_the_same_weights(tmp_path: Path) -> None:
    """It centres what reads a LayerNorm too, which changes nothing: its output has mean zero."""
    model = tiny("mha", tie_embeddings=True)
    save_pretrained(model, tmp_path / "tiny")
    bridge = TransformerBridge.boot_transformers(str(tmp_path / "tiny"), device="cpu")
    bridge.enable_compatibility_mode(disable_warnings=True)
    folded = fold_layer_norm(model)
    with torch.no_grad():
        for ours, theirs in zip(folded.blocks, bridge.blocks, strict=True):
            for name in ("W_Q", "W_K", "W_V"):
                assert error(_centred(getattr(ours.attn, name)), getattr(theirs.attn, name)) < FOLD
            for name in ("b_Q", "b_K"):
                assert error(getattr(ours.attn, name), getattr(theirs.attn, name)) < FOLD
            assert error(_centred(ours.mlp.W_in), theirs.mlp.W_in) < FOLD
            assert error(ours.mlp.b_in, theirs.mlp.b_in) < FOLD
        # The unembedding it centres over the vocabulary as well.
        unembed, bias = _centred(folded.W_U), folded.b_U
        assert error(unembed - unembed.mean(dim=1, keepdim=True), bridge.W_U) < FOLD
        assert error(bias - bias.mean(), bridge.b_U) < FOLD


def _centred(weight: Tensor) -> Tensor:
    """A reading weight, less its mean over what it reads: `[*, d_model, out]`."""
    return weight - weight.mean(dim=-2, keepdim=True)
