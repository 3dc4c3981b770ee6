"""GPT-2 small held to what has been published about it. Needs the Hub, or its cache."""

import pytest
import torch
import transformers

import interp
from interp.errors import ModelError
from interp.models.hub import resolve

pytestmark = pytest.mark.network

# Attention to the token after the first copy: [BOS] and 20 random tokens twice, mean of 5 seeds.
INDUCTION_HEADS = {(5, 5): 0.88, (7, 10): 0.86, (5, 1): 0.85, (6, 9): 0.82, (7, 2): 0.76}
MASSIVE_DIMENSIONS = {138, 378, 447}


@pytest.fixture(scope="module")
def folder():
    """Where GPT-2 small lies. Without a network the Hub is given up at once."""
    try:
        return resolve("gpt2").path
    except ModelError as error:
        pytest.skip(f"GPT-2 small is not at hand: {error}")


@pytest.fixture(scope="module")
def gpt2(folder):
    return interp.load_model("gpt2")


def test_its_shape_is_the_published_one(gpt2):
    cfg = gpt2.cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.d_head, cfg.d_model) == (12, 12, 64, 768)
    assert (cfg.d_vocab, cfg.n_ctx, cfg.bos_token_id) == (50257, 1024, 50256)
    assert cfg.tie_word_embeddings


def test_log_probs_are_those_of_transformers(folder, gpt2):
    original = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.randint(50257, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = gpt2(tokens).log_softmax(dim=-1)
        theirs = original(tokens).logits.log_softmax(dim=-1)
    # Log-probs of random tokens reach -30: float32 keeps five digits after the point.
    assert (ours - theirs).abs().max() < 1e-3


def test_its_five_strongest_induction_heads_are_the_published_ones(gpt2):
    table = interp.analyze(gpt2, "induction", blocks=[20], batch=10).table
    best = table.nlargest(5, "induction").set_index(["layer", "head"])["induction"]
    assert set(best.index) == set(INDUCTION_HEADS)
    for head, published in INDUCTION_HEADS.items():
        assert best[head] == pytest.approx(published, abs=0.06)


def test_its_previous_token_head_is_the_published_one(gpt2):
    scores = interp.analyze(gpt2, "previous-token", blocks=[20], batch=5)
    assert scores.summary["best_head"] == "L4H11"
    assert scores.summary["best"] > 0.9


def test_its_massive_dimensions_are_the_published_ones(gpt2):
    tokens = torch.tensor([[50256, 464, 2068, 7586, 21831, 18045]])
    _, cache = gpt2.run_with_cache(tokens, names_filter="blocks.6.hook_resid_post")
    at_bos = cache["blocks.6.hook_resid_post"][0, 0].abs()
    assert set(at_bos.topk(3).indices.tolist()) == MASSIVE_DIMENSIONS
    others = at_bos.sort().values[-4]
    assert at_bos.topk(3).values.min() > 5 * others
