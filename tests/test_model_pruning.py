"""Heads taken out of the weights: the masked model's numbers, from fewer of them.

The oracle has no pruned heads: it runs the whole model in float64 with columns of W_O set to zero.
"""

import json
import tomllib

import hf_models
import pytest
import tiny_tokenizers
import tomli_w
import torch
import transformers
from pruning_cases import BOUND, LAYER_0, LAYER_1, SETS, TOKENS, masked
from tiny_models import FAMILIES, error, oracle, padding, perturbed, some_tokens, tiny, tiny_config

from interp.ablation.removal import TOLERANCE, remove_heads
from interp.config import ModelConfig, config_tables
from interp.data.pretrained_tokenizer import PretrainedVocabulary
from interp.data.tokenizer import BytePairVocabulary
from interp.errors import ModelError, ShapeError
from interp.inputs import token_inputs
from interp.models.folding import fold_layer_norm
from interp.models.loading import load_model, save_folder
from interp.models.pretrained import save_pretrained, zero_heads_note
from interp.models.pruning import model_size, prune_heads, unpruned, with_heads_of
from interp.models.weights import stored_weights


def zeroing(heads):
    """Hooks that set z of these heads to zero."""

    def hook_for(layer):
        gone = [head for at, head in heads if at == layer]

        def zero(z, hook):
            z = z.clone()
            z[:, :, gone] = 0.0
            return z

        return f"blocks.{layer}.attn.hook_z", zero

    return [hook_for(layer) for layer in sorted({layer for layer, _ in heads})]


def same_weights(first, second):
    a, b = stored_weights(first), stored_weights(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- what it computes -----------------------------------------------------------------------


@torch.no_grad()
def test_a_layer_without_heads_writes_its_output_bias_and_nothing_else():
    model = tiny("gqa")
    _, cache = prune_heads(model, LAYER_0).run_with_cache(TOKENS)
    bias = model.blocks[0].attn.b_O
    assert bias.abs().max() > 0.1
    assert torch.equal(cache["blocks.0.hook_attn_out"], bias.expand(3, 9, -1))
    without = tiny("no_attention_bias")
    _, cache = prune_heads(without, LAYER_0).run_with_cache(TOKENS)
    assert torch.equal(cache["blocks.0.hook_attn_out"], torch.zeros(3, 9, 24))


@pytest.mark.parametrize("heads", SETS.values(), ids=SETS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_the_masked_model(family, heads):
    model = tiny(family)
    before = model(TOKENS)
    pruned = prune_heads(model, heads)
    for side in ("none", "left", "right"):
        mask = padding(side, [9, 4, 1], 9)
        real = slice(None) if mask is None else mask.bool()
        logits = pruned(TOKENS, attention_mask=mask)
        expected = oracle(masked(model, heads), TOKENS, mask)["logits"]
        assert error(logits[real], torch.from_numpy(expected)[real]) < BOUND
        hooked = model.run_with_hooks(TOKENS, fwd_hooks=zeroing(heads), attention_mask=mask)
        assert error(logits[real], hooked[real]) < BOUND
    assert error(pruned(TOKENS, last=2), pruned(TOKENS)[:, -2:]) < BOUND
    assert torch.equal(model(TOKENS), before)


@pytest.mark.parametrize("heads", SETS.values(), ids=SETS)
@pytest.mark.parametrize("family", ["mha", "gqa", "rotary_smeared", "llama", "windowed"])
@torch.no_grad()
def test_hooks_hold_what_the_whole_model_has_of_these_heads(family, heads):
    model = masked(tiny(family), heads)
    pruned = prune_heads(model, heads)
    names = list(model.hook_dict)
    _, whole = model.run_with_cache(TOKENS, names_filter=names)
    logits, cache = pruned.run_with_cache(TOKENS, names_filter=names)
    assert error(logits, pruned(TOKENS)) < BOUND
    assert list(cache.keys()) == list(whole.keys())
    for name, value in cache.items():
        expected, kind = whole[name], name.rsplit("_", 1)[-1]
        if ".attn." in name:
            attention = pruned.blocks[int(name.split(".")[1])].attn
            shared = kind in ("k", "v")
            left = attention.key_value_heads if shared else attention.heads
            axis = 1 if kind in ("scores", "pattern") else 2
            expected = expected.index_select(axis, torch.tensor(left, dtype=torch.long))
        assert error(value, expected) < BOUND, name


@pytest.mark.parametrize("heads", SETS.values(), ids=SETS)
@pytest.mark.parametrize("family", ["mha", "gqa", "rotary_smeared", "qk_norm"])
def test_gradients_of_what_is_left_are_the_masked_models(family, heads):
    model = masked(tiny(family), heads)
    pruned = prune_heads(model, heads)
    for one in (model, pruned):
        one(TOKENS, return_type="loss").backward()
    whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected = with_heads_of(whole, model.config, pruned.config)
    for name, parameter in pruned.named_parameters():
        if parameter.grad is None:  # keys and the norms of a layer without heads
            assert parameter.numel() == 0 or not expected[name].any()
        elif parameter.numel():
            assert error(parameter.grad, expected[name]) < BOUND, name


@pytest.mark.parametrize("heads", SETS.values(), ids=SETS)
def test_a_pruned_model_trains_with_dropout_and_backward_hooks(heads):
    model = prune_heads(tiny("gqa", dropout=0.2).train(), heads)
    assert model.training
    loss, cache = model.run_with_cache(TOKENS, return_type="loss", incl_bwd=True)
    assert cache["blocks.0.hook_resid_pre_grad"].abs().max() > 0
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        loss = model(TOKENS, return_type="loss")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# --- the new model ------------------------------------------------------------------------------


def test_sizes_are_those_of_the_heads_that_are_left():
    pruned = prune_heads(tiny("gqa"), [(0, 1), (1, 0), (1, 1)])
    first, second = (block.attn for block in pruned.blocks)
    assert (first.heads, first.key_value_heads) == ((0, 2, 3), (0, 1))
    assert (second.heads, second.key_value_heads) == ((2, 3), (1,))
    assert [list(first.W_Q.shape), list(first.W_K.shape)] == [[3, 24, 6], [2, 24, 6]]
    assert [list(second.W_O.shape), list(second.b_V.shape)] == [[2, 6, 24], [1, 6]]
    assert (second.n_heads, second.n_key_value_heads) == (2, 1)
    cfg = pruned.cfg
    assert (cfg.n_heads, cfg.n_key_value_heads) == (4, 2)
    assert cfg.pruned_heads == {0: (1,), 1: (0, 1)}
    assert (cfg.heads(1), cfg.key_value_heads(1)) == ((2, 3), (1,))


def test_heads_keep_their_numbers_when_pruned_one_after_another():
    model = tiny("smeared")
    twice = prune_heads(prune_heads(model, [(1, 0)]), [(1, 2)])
    once = prune_heads(model, [(1, 2), (1, 0)])
    assert twice.blocks[1].attn.heads == (1, 3)
    assert twice.config == once.config
    assert same_weights(twice, once)
    assert prune_heads(twice, [(1, 2), (1, 0)]).config == once.config  # they are gone already
    expected = oracle(masked(model, [(1, 0), (1, 2)]), TOKENS)["logits"]
    assert error(twice(TOKENS), expected) < BOUND


def test_the_new_model_shares_no_memory_and_keeps_the_rest():
    model = tiny("relu_tied").to(torch.bfloat16)
    model.vocabulary = BytePairVocabulary(tiny_tokenizers.byte_pairs())
    model.model_name = "named"
    pruned = prune_heads(model, [(0, 0)])
    assert not pruned.training
    assert (pruned.model_name, pruned.vocabulary, pruned.source) == (
        "named",
        model.vocabulary,
        None,
    )
    assert pruned.cfg.dtype == torch.bfloat16
    assert pruned.unembed.weight is pruned.embed.weight
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    new = {p.untyped_storage().data_ptr() for p in pruned.parameters() if p.numel()}
    assert storages.isdisjoint(new)
    assert all(parameter.requires_grad for parameter in pruned.parameters())
    assert same_weights(prune_heads(model, []), model)


def test_padding_with_zeros_undoes_the_shapes_of_pruning():
    model = tiny("smeared")
    pruned = prune_heads(model, SETS["a group and a half"])
    back = with_heads_of(stored_weights(pruned), pruned.config, unpruned(pruned.config))
    whole = stored_weights(model)
    assert {name: w.shape for name, w in back.items()} == {n: w.shape for n, w in whole.items()}
    q = back["blocks.1.attn.q_proj.weight"].unflatten(0, (4, 6))
    assert torch.equal(q[3], model.blocks[1].attn.q_proj.weight[18:])
    assert torch.equal(q[:3], torch.zeros(3, 6, 24))


def test_the_size_of_a_model_counts_parameters_and_cached_numbers():
    model = tiny("gqa")
    pruned = prune_heads(model, [(0, 0), (1, 0), (1, 1)])
    for one in (model, pruned):
        counted = sum(parameter.numel() for parameter in one.parameters())
        assert model_size(one.config).parameters == counted
    assert model_size(unpruned(pruned.config)) == model_size(model.config)
    # Two layers of two heads of six, keys and values; one head less.
    assert model_size(model.config).cache_numbers == 48
    assert model_size(pruned.config).cache_numbers == 36


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_is_held_to_the_masked_one_in_float32(dtype):
    """Its own sums round by more than a wrong weight might show."""
    config = tiny_config(d_model=256, d_vocab=999, attention={"n_heads": 8}, mlp={"d_mlp": 64})
    model = perturbed(config, std=0.05).to(dtype)
    inputs = token_inputs(model, some_tokens(4, 12, d_vocab=999))
    removal = remove_heads(model, inputs, [(0, 1), (1, 2), (1, 5)])
    assert removal.largest_difference < TOLERANCE
    assert removal.model.cfg.dtype == model.cfg.dtype == dtype
    assert removal.loss[1] == pytest.approx(removal.loss_masked, abs=0.05)


def test_faults_are_one_line():
    model = tiny("gqa")
    with pytest.raises(ShapeError, match=r"^head 2\.0 is out of range: .* heads 0 to 3$"):
        prune_heads(model, [(2, 0)])
    with pytest.raises(ShapeError, match=r"^head 0\.-1 is out of range"):
        prune_heads(model, [(0, -1)])
    with pytest.raises(ModelError, match=r"^pruning needs the native backend: .* BridgedModel"):
        prune_heads(load_model(hf_models.gpt2(), backend="bridge"), [(0, 0)])


@pytest.mark.parametrize(
    ("pruned", "fault"),
    [
        ({0: [4]}, "attention.pruned_heads.0 holds head 4, beyond n_heads = 4"),
        ({2: [0]}, "attention.pruned_heads holds layer 2, beyond n_layers = 2"),
        ({"0": [-1]}, "attention.pruned_heads.0.0 = -1: input should be greater than or equal"),
    ],
)
def test_a_config_names_heads_that_the_model_could_have(pruned, fault, tmp_path):
    tables = config_tables(tiny_config())
    tables["attention"]["pruned_heads"] = pruned
    (tmp_path / "config.json").write_text(json.dumps({"format": "interp", "model": tables}))
    with pytest.raises(ModelError) as raised:
        load_model(tmp_path)
    assert fault in str(raised.value)


def test_a_config_is_read_back_from_json_and_toml_and_says_nothing_of_whole_models():
    assert "pruned_heads" not in config_tables(tiny_config())["attention"]
    config = tiny_config(attention={"pruned_heads": {1: [2, 0, 2], 0: []}})
    assert config.attention.pruned_heads == {1: (0, 2)}
    tables = config_tables(config)
    assert tables["attention"]["pruned_heads"] == {"1": [0, 2]}
    assert ModelConfig.model_validate(json.loads(json.dumps(tables))) == config
    assert ModelConfig.model_validate(tomllib.loads(tomli_w.dumps(tables))) == config
    assert perturbed(config).blocks[1].attn.heads == (1, 3)  # and drawn without a warning


# --- on disk --------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", SETS.values(), ids=SETS)
@torch.no_grad()
def test_a_saved_model_is_read_back_bit_for_bit(heads, tmp_path):
    pruned = prune_heads(tiny("rotary_smeared"), heads)
    assert save_folder(pruned, tmp_path / "model") == tmp_path / "model"
    again = load_model(tmp_path / "model")
    assert again.config == pruned.config
    assert same_weights(again, pruned)
    assert torch.equal(again(TOKENS), pruned(TOKENS))
    assert again.vocabulary is None
    with pytest.raises(ModelError, match="is not empty"):
        save_folder(pruned, tmp_path / "model")


VOCABULARIES = {
    "byte pairs": lambda: BytePairVocabulary(tiny_tokenizers.byte_pairs()),
    **{
        f"transformers, {kind}": lambda kind=kind: PretrainedVocabulary(
            tiny_tokenizers.wrapped(kind)
        )
        for kind in tiny_tokenizers.KINDS
    },
}


@pytest.mark.parametrize("make", VOCABULARIES.values(), ids=VOCABULARIES)
def test_a_saved_model_brings_its_tokenizer(make, tmp_path):
    vocabulary = make()
    config = tiny_config(d_vocab=len(vocabulary))
    model = prune_heads(perturbed(config, vocabulary=vocabulary), [(0, 0)])
    again = load_model(save_folder(model, tmp_path / "model"))
    assert type(again.vocabulary) is type(vocabulary)
    text = "a cat sat"
    assert again.vocabulary.encode(text) == vocabulary.encode(text)
    assert again.vocabulary.bos_token_id == vocabulary.bos_token_id
    ids = vocabulary.encode(text)[0]
    assert again.vocabulary.token_texts(ids) == vocabulary.token_texts(ids)


@pytest.mark.parametrize("heads", SETS.values(), ids=SETS)
@pytest.mark.parametrize("family", ["mha", "llama"])
@torch.no_grad()
def test_an_export_has_zeros_for_pruned_heads_and_the_same_logits(family, heads, tmp_path):
    model = tiny(family)
    pruned = prune_heads(model, heads)
    save_pretrained(pruned, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert error(theirs(TOKENS).logits, pruned(TOKENS)) < BOUND
    assert theirs.config.num_attention_heads == 4
    again = load_model(tmp_path / "out")
    assert error(again(TOKENS), pruned(TOKENS)) < BOUND
    assert model_size(again.config) == model_size(model.config)
    note = zero_heads_note(pruned.config)
    assert f"written as zeros ({len(heads)} of them)" in note
    assert "same logits, but no smaller" in note
    assert zero_heads_note(model.config) is None


def test_a_saved_run_runs_on_the_bridge_with_silent_heads(tmp_path):
    pruned = prune_heads(tiny("mha"), [(0, 1), *LAYER_1])
    bridged = load_model(save_folder(pruned, tmp_path / "model"), backend="bridge")
    assert error(bridged(TOKENS), pruned(TOKENS)) < 1e-4  # another library's arithmetic
    attention = bridged.blocks[1].attn
    assert (attention.heads, attention.key_value_heads) == ((0, 1, 2, 3), (0, 1, 2, 3))


@torch.no_grad()
def test_norms_fold_into_the_heads_that_are_left():
    pruned = prune_heads(tiny("gqa"), [(0, 1), *LAYER_1])
    folded = fold_layer_norm(pruned)
    assert error(folded(TOKENS).log_softmax(-1), pruned(TOKENS).log_softmax(-1)) < 1e-4
    assert folded.blocks[0].attn.heads == (0, 2, 3)
