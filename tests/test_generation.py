"""What a model writes is what transformers writes with the same weights, token for token."""

import hf_models
import pytest
import torch
from hf_models import native

FAMILIES = ["gpt2", "llama", "qwen2", "mistral", "qwen3", "llama3_scaled"]
N_NEW = 24


@pytest.fixture(scope="module")
def pair():
    """A model of transformers, and ours with its weights, by name."""
    made = {}

    def get(name):
        if name not in made:
            theirs = getattr(hf_models, name)()
            theirs.generation_config.eos_token_id = None  # writes on
            theirs.generation_config.pad_token_id = 0
            made[name] = theirs, native(theirs)
        return made[name]

    return get


def prompts(n_pos):
    return torch.randint(97, (2, n_pos), generator=torch.Generator().manual_seed(n_pos))


def written(theirs, tokens, mask=None, **settings):
    mask = torch.ones_like(tokens) if mask is None else mask
    return theirs.generate(
        tokens, attention_mask=mask, do_sample=False, max_new_tokens=N_NEW, **settings
    )


def margin(model, made, mask=None):
    """The least distance between the two largest logits on the way."""
    with torch.no_grad():
        top = model(made, attention_mask=mask).topk(2).values[:, -N_NEW - 1 : -1]
    return float((top[..., 0] - top[..., 1]).min())


@pytest.mark.parametrize("n_prompt", [1, 7, 30])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(name, n_prompt, pair):
    theirs, ours = pair(name)
    tokens = prompts(n_prompt)
    wanted = written(theirs, tokens)
    assert margin(ours, wanted) > 3e-5  # rounding decides nothing
    assert torch.equal(ours.generate(tokens, N_NEW), wanted)
    assert torch.equal(ours.generate(tokens, N_NEW, use_cache=False), wanted)
    assert wanted.shape == (2, n_prompt + N_NEW)


@pytest.mark.parametrize("name", FAMILIES)
def test_so_are_those_of_a_batch_that_is_padded_on_the_left(name, pair):
    theirs, ours = pair(name)
    tokens = prompts(20)
    mask = torch.ones_like(tokens)
    mask[0, :13] = 0
    wanted = written(theirs, tokens, mask)
    longer = torch.cat((mask, mask.new_ones(2, N_NEW)), dim=1)
    assert margin(ours, wanted, longer) > 3e-5
    for use_cache in (True, False):
        made = ours.generate(tokens, N_NEW, attention_mask=mask, use_cache=use_cache)
        assert torch.equal(made, wanted)
    alone = ours.generate(tokens[:1, 13:], N_NEW)
    assert torch.equal(alone[0, 7:], wanted[0, 20:])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_stop_token_ends_both_at_the_same_place(name, pair):
    theirs, ours = pair(name)
    tokens = prompts(6)[:1]
    stop = int(written(theirs, tokens)[0, 6 + 9])
    wanted = written(theirs, tokens, eos_token_id=stop)
    assert torch.equal(ours.generate(tokens, N_NEW, stop_tokens=[stop]), wanted)
    assert wanted.shape[1] <= 6 + 10
