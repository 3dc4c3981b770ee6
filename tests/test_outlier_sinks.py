"""`interp.outlier_sinks`: what the tokens with massive activations draw from every head."""

import json
import math

import hf_models
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from tiny_models import error, oracle, padding, some_tokens, tiny

import interp
from interp.activation_tables import OutlierSinks
from interp.activations.sinks import outlier_sinks_in
from interp.errors import AnalysisError, ModelError
from interp.inputs import token_inputs
from interp.models.pruning import prune_heads

SPIKE, DIMENSION, SIZE = 11, 6, 5000.0


def spiked(family="gqa", **changes):
    """A model in which one token's embedding has a huge value in one dimension."""
    model = tiny(family, **{"n_layers": 3, **changes})
    with torch.no_grad():
        model.embed.weight[SPIKE, DIMENSION] = SIZE
    return model


def spiked_tokens(batch=3, n_pos=14):
    """Random tokens without the spike's, but for one of it in each sequence, further in each."""
    tokens = some_tokens(batch, n_pos, d_vocab=10)
    for row in range(batch):
        tokens[row, 2 * row] = SPIKE
    return tokens


def known(push):
    """One layer without norms, whose head 0 alone looks for dimension 6, as hard as is said.

    A query's score for the spike is `push`, and 0 for any other key; the keys of head 0 are 1 long
    at the spike and 0 elsewhere, and values 5 and 3.
    """
    model = tiny("attention_only", normalization_type="none", n_layers=2)
    with torch.no_grad():
        model.embed.weight[:, DIMENSION] = 0
        model.pos_embed.weight[:, DIMENSION] = 0
        model.embed.weight[SPIKE, DIMENSION] = SIZE
        for block in model.blocks:
            for name, parameter in block.attn.named_parameters():
                if "o_proj" in name or "_proj" in name:
                    parameter.zero_()
            block.attn.q_proj.bias[0] = push * math.sqrt(6)  # the scale is 1 / sqrt(d_head)
            block.attn.k_proj.weight[0, DIMENSION] = 1 / SIZE
            block.attn.v_proj.bias[0] = 3.0
            block.attn.v_proj.weight[1, DIMENSION] = 4 / SIZE
    return model


# --- known answers ----------------------------------------------------------------------------


def test_a_head_that_looks_for_the_spike_has_the_mass_that_its_score_gives():
    tokens = some_tokens(2, 12, d_vocab=10)
    tokens[:, 1] = SPIKE
    result = interp.outlier_sinks(known(3.0), tokens)
    # Queries 7 to 11 have 8 keys and more.
    masses = [math.exp(3) / (math.exp(3) + n - 1) for n in range(8, 13)]
    even = [1 / n for n in range(8, 13)]
    for row in result.table.itertuples():
        expected = masses if row.head == 0 else even
        assert row.outlier_sinks == pytest.approx(np.mean(expected), rel=1e-5)
        assert row.outlier_sinks_null == pytest.approx(np.mean(even), rel=1e-6)
        assert row.n == 2
    head = result.table.iloc[0]
    assert (head["key_norm"], head["key_norm_others"]) == pytest.approx((1.0, 0.0))
    assert head["key_norm_ratio"] == np.inf
    assert (head["value_norm"], head["value_norm_others"]) == pytest.approx((5.0, 3.0))
    assert head["value_norm_ratio"] == pytest.approx(5 / 3)


def test_a_layer_says_how_large_the_stream_of_found_and_other_tokens_is():
    tokens = some_tokens(2, 12, d_vocab=10)
    tokens[:, 1] = SPIKE
    model = known(3.0)
    result = interp.outlier_sinks(model, tokens)
    stream = (model.embed.weight[tokens] + model.pos_embed.weight[:12]).detach().abs().amax(-1)
    others = torch.cat((stream[:, :1], stream[:, 2:]), dim=1)
    assert result.layers["layer"].tolist() == [0, 1]
    assert result.layers["magnitude"].tolist() == pytest.approx([SIZE] * 2)
    assert result.layers["magnitude_others"].tolist() == pytest.approx([float(others.mean())] * 2)
    assert result.layers["heads_above"].tolist() == [1, 1]
    assert result.summary["found"] == 2
    (record,) = result.summary["tokens"]
    assert (record["token"], record["position"], record["tokens"]) == ("11", 1, 2)


def test_even_heads_are_no_sinks_however_short_the_sequence():
    tokens = some_tokens(3, 8, d_vocab=10)
    tokens[:, 0] = SPIKE
    tokens[:, 1] = SPIKE
    result = interp.outlier_sinks(known(0.0), tokens)
    assert result.table["outlier_sinks"].tolist() == pytest.approx([2 / 8] * 8, rel=1e-5)
    assert result.summary["heads_above_after"] == 0
    with pytest.raises(AnalysisError, match="has 8 keys: the sequences are too short"):
        interp.outlier_sinks(known(0.0), tokens[:, :7])


def test_layers_before_the_first_massive_one_are_told_apart():
    model = tiny("mha", n_layers=4, mlp={"d_mlp": 20, "act_fn": "relu"})
    with torch.no_grad():  # block 1 writes the spike where the embedding says so
        model.embed.weight[:, DIMENSION] = 0
        model.embed.weight[SPIKE] = 0.05
        model.embed.weight[SPIKE, DIMENSION] = 60.0
        mlp = model.blocks[1].mlp
        mlp.in_proj.weight[0] = 0
        mlp.in_proj.weight[0, DIMENSION] = 1.0
        mlp.in_proj.bias[0] = -3.5
        mlp.out_proj.weight[:, 0] = 0
        mlp.out_proj.weight[DIMENSION, 0] = 10 * SIZE
    tokens = spiked_tokens()
    result = interp.outlier_sinks(model, tokens)
    assert result.summary["first_layer"] == result.summary["main_layer"] == 2
    assert result.table.groupby("layer")["after"].first().tolist() == [False, False, True, True]
    magnitude = result.layers["magnitude"]
    assert magnitude[1] < 100 < 1000 < magnitude[2]
    before = result.table[~result.table["after"]]
    assert result.summary["mass_before"] == pytest.approx(before["outlier_sinks"].mean())


def test_the_main_layer_is_the_first_with_half_as_many_massive_tokens_as_any():
    model = tiny("mha", n_layers=3, mlp={"d_mlp": 20, "act_fn": "relu"})
    with torch.no_grad():  # one token is massive from the start, the spikes after block 0
        for block in model.blocks:
            block.attn.o_proj.weight.zero_()
            block.mlp.out_proj.weight.zero_()
        model.embed.weight[:, DIMENSION] = 0
        model.embed.weight[SPIKE] = 0.05
        model.embed.weight[SPIKE, DIMENSION] = 60.0
        model.embed.weight[12, 3] = SIZE
        mlp = model.blocks[0].mlp
        mlp.in_proj.weight[0] = 0
        mlp.in_proj.weight[0, DIMENSION] = 1.0
        mlp.in_proj.bias[0] = -3.5
        mlp.out_proj.weight[DIMENSION, 0] = 10 * SIZE
    tokens = spiked_tokens()
    tokens[0, 7] = 12
    result = interp.outlier_sinks(model, tokens)
    assert result.summary["found"] == 4
    assert result.summary["first_layer"] == 0
    assert result.summary["main_layer"] == 1
    assert result.table.groupby("layer")["after"].first().tolist() == [False, True, True]


def test_where_the_first_token_alone_is_massive_the_score_is_that_of_sinks():
    model = spiked()
    tokens = some_tokens(4, 14, d_vocab=10)
    tokens[:, 0] = SPIKE
    result = interp.outlier_sinks(model, tokens)
    sinks = interp.analyze(model, "sinks", tokens)
    assert result.summary["found"] == 4
    for own, other in (
        ("outlier_sinks", "sinks"),
        ("first_token", "sinks"),
        ("outlier_sinks_se", "sinks_se"),
        ("outlier_sinks_null", "sinks_null"),
    ):
        assert error(result.table[own].tolist(), sinks.table[other].tolist()) < 1e-6, own
    assert result.summary["correlation_first_token"] == pytest.approx(1.0)


# --- an oracle ----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["gqa", "rotary", "llama", "windowed", "qk_norm"])
def test_every_number_is_that_of_plain_loops(family, side):
    window = 12 if family == "windowed" else None
    changes = {"attention": {"n_key_value_heads": 2, "window": 12}} if window else {}
    model = spiked(family, **changes)
    tokens = spiked_tokens()
    tokens[2, 12] = SPIKE  # two in one sequence
    mask = padding(side, [13, 14, 14], 14)
    result = interp.outlier_sinks(model, tokens, attention_mask=mask)
    seen = oracle(model, tokens, mask)
    real = np.ones((3, 14), bool) if mask is None else mask.numpy().astype(bool)
    found = (tokens.numpy() == SPIKE) & real
    n_kv = model.cfg.n_key_value_heads
    for row in result.table.itertuples():
        attn = f"blocks.{row.layer}.attn"
        pattern = seen[f"{attn}.hook_pattern"][:, row.head]
        keys = seen[f"{attn}.hook_rot_k" if f"{attn}.hook_rot_k" in seen else f"{attn}.hook_k"]
        per_sequence = {name: [] for name in ("mass", "null", "key", "key_others", "value")}
        for b in range(3):
            masses, nulls = [], []
            for q in range(14):
                reach = range(0 if window is None else max(0, q - window + 1), q + 1)
                seen_keys = [k for k in reach if real[b, k]]
                hit = [k for k in seen_keys if found[b, k]]
                if real[b, q] and not found[b, q] and hit and len(seen_keys) >= 8:
                    masses.append(sum(pattern[b, q, k] for k in hit))
                    nulls.append(len(hit) / len(seen_keys))
            if masses:
                per_sequence["mass"].append(np.mean(masses))
                per_sequence["null"].append(np.mean(nulls))
            head = row.head * n_kv // model.cfg.n_heads
            lengths = np.linalg.norm(keys[b, :, head], axis=-1)
            if found[b].any():
                per_sequence["key"].append(lengths[found[b]].mean())
                per_sequence["key_others"].append(lengths[real[b] & ~found[b]].mean())
                v = np.linalg.norm(seen[f"{attn}.hook_v"][b, :, head], axis=-1)
                per_sequence["value"].append(v[found[b]].mean())
        assert row.n == len(per_sequence["mass"])
        for name, own in (
            ("outlier_sinks", "mass"),
            ("outlier_sinks_null", "null"),
            ("key_norm", "key"),
            ("key_norm_others", "key_others"),
            ("value_norm", "value"),
        ):
            expected = np.mean(per_sequence[own])
            assert getattr(row, name) == pytest.approx(expected, rel=2e-4, abs=1e-5), name
    later = result.table[result.table["after"]]
    rank = stats.spearmanr(later["outlier_sinks"], later["key_norm_ratio"]).statistic
    assert result.summary["correlation_key_norm"] == pytest.approx(rank)


def test_batches_of_unlike_lengths_are_one_result():
    model = spiked()
    both = [spiked_tokens(2, 14), spiked_tokens(1, 11)]
    one, other = (token_inputs(model, tokens) for tokens in both)
    joined = outlier_sinks_in(
        model,
        type(one)([*one.batches, *other.batches], [], "both", {}),
    )
    apart = [outlier_sinks_in(model, own) for own in (one, other)]
    for name in ("outlier_sinks", "key_norm", "value_norm_others", "first_token"):
        mean = (2 * apart[0].table[name] + apart[1].table[name]) / 3
        assert error(joined.table[name].to_numpy(copy=True), mean.to_numpy(copy=True)) < 1e-5, name
    assert joined.summary["sequences"] == 3


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_native_and_bridge_give_the_same_rows(name):
    hf = getattr(hf_models, name)()
    with torch.no_grad():
        if name == "gpt2":  # whose embedding is its unembedding, too
            hf.transformer.wpe.weight[2, DIMENSION] = SIZE
        else:
            hf.get_input_embeddings().weight[SPIKE, DIMENSION] = SIZE
    tokens = spiked_tokens(2, 12)
    ours = interp.outlier_sinks(hf_models.native(hf), tokens)
    theirs = interp.outlier_sinks(interp.load_model(hf, backend="bridge"), tokens)
    assert ours.summary["found"] == theirs.summary["found"] == 2
    numbers = [name for name in ours.table if name not in ("layer", "head", "after", "n")]
    assert (
        error(ours.table[numbers].to_numpy(copy=True), theirs.table[numbers].to_numpy(copy=True))
        < 1e-4
    )
    assert ours.layers["magnitude"].tolist() == pytest.approx(
        theirs.layers["magnitude"].tolist(), rel=1e-5
    )


# --- properties and refusals ----------------------------------------------------------------------


def test_positions_are_those_among_real_tokens():
    tokens = some_tokens(3, 14, d_vocab=10)
    mask = padding("left", [10, 12, 14], 14)
    for row, length in enumerate([10, 12, 14]):
        tokens[row, 14 - length + 1] = SPIKE
    (record,) = interp.outlier_sinks(spiked(), tokens, attention_mask=mask).summary["tokens"]
    assert (record["position"], record["tokens"], record["sequences"]) == (1, 3, 3)


def test_bos_is_neither_found_nor_a_key_where_it_is_left_out():
    model = spiked(bos_token_id=0)
    with torch.no_grad():
        model.embed.weight[0, DIMENSION] = SIZE
    tokens = torch.cat((torch.zeros(3, 1, dtype=torch.long), spiked_tokens(3, 13)), dim=1)
    tokens[tokens == 0] = 1
    tokens[:, 0] = 0
    with_bos = interp.outlier_sinks(model, tokens)
    without = interp.outlier_sinks(model, tokens, exclude_bos=True)
    assert (with_bos.summary["found"], without.summary["found"]) == (6, 3)
    assert {record["token"] for record in without.summary["tokens"]} == {"11"}


def test_an_encoder_has_sinks_too():
    hf = hf_models.bert()
    with torch.no_grad():  # after the norm of the embeddings, in the first block
        hf.bert.encoder.layer[0].output.LayerNorm.weight[3] = 20_000.0
    model = interp.load_model(hf, backend="bridge")
    result = interp.outlier_sinks(model, torch.arange(20).reshape(2, 10), ratio=1.0, magnitude=1e4)
    assert result.summary["first_layer"] == 1
    assert result.table["outlier_sinks"].between(0, 1).all()


def test_a_pruned_model_has_rows_for_the_heads_that_are_left():
    model = prune_heads(spiked("gqa"), [(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)])
    result = interp.outlier_sinks(model, spiked_tokens())
    assert len(result.table) == 3 + 0 + 4
    assert result.params["pruned_heads"] == ["0.1", "1.0", "1.1", "1.2", "1.3"]
    assert result.layers["layer"].tolist() == [0, 1, 2]
    assert result.layers["mass"].isna().tolist() == [False, True, False]
    whole = interp.outlier_sinks(spiked("gqa"), spiked_tokens()).table
    first = whole[(whole["layer"] == 0) & (whole["head"] != 1)]
    own = result.table[result.table["layer"] == 0]
    for name in ("key_norm", "value_norm", "outlier_sinks"):
        assert own[name].tolist() == pytest.approx(first[name].tolist(), rel=1e-4), name


def test_where_nothing_is_massive_the_largest_activation_is_named_in_one_line():
    model = spiked()
    with pytest.raises(AnalysisError) as caught:
        interp.outlier_sinks(model, spiked_tokens(), magnitude=1e6)
    assert "no activation of the residual stream is massive: the largest is 5" in str(caught.value)
    assert "above 1e+06 and 1000 times the median" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_zeros_are_no_multiple_of_their_median():
    model = spiked("no_norm")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(AnalysisError, match="the largest is 0, nan times the median"):
        interp.outlier_sinks(model, spiked_tokens())


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"ratio": -1.0}, AnalysisError, "ratio = -1: a threshold is 0 or above"),
        ({"magnitude": math.nan}, AnalysisError, "magnitude = nan"),
        ({"length": 4}, AnalysisError, "length and sequences belong to a corpus"),
        (
            {"attention_mask": torch.zeros(3, 14, dtype=torch.long)},
            AnalysisError,
            "there is no token to look at",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(given, kind, said):
    with pytest.raises(kind, match=said):
        interp.outlier_sinks(spiked(), spiked_tokens(), **given)
    with pytest.raises(ModelError, match="a model was expected"):
        interp.outlier_sinks("gpt2", spiked_tokens())


def test_the_model_is_left_as_it_was():
    model = spiked().train()
    interp.outlier_sinks(model, spiked_tokens())
    assert model.training
    assert not any(point.has_hooks() for point in model.hook_dict.values())
    assert all(block.attn.observer is None for block in model.blocks)


def test_a_file_gives_the_result_back(tmp_path):
    result = interp.outlier_sinks(spiked(), spiked_tokens())
    table, record, layers = result.save(tmp_path)
    assert [path.name for path in (table, record, layers)] == [
        "outlier_sinks.csv",
        "outlier_sinks.json",
        "outlier_sinks_layers.csv",
    ]
    again = OutlierSinks.load(record)
    pd.testing.assert_frame_equal(again.table, result.table)
    pd.testing.assert_frame_equal(again.layers, result.layers)
    assert again.summary == json.loads(result.to_json())["summary"]
