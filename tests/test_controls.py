"""Control heads: as much taken away from the same layer, where nothing special was."""

import numpy as np
import pytest
import torch
from tiny_models import padding, some_tokens, tiny

from interp.ablation.controls import control_heads, head_output_norms
from interp.inputs import token_inputs

# Float32 sums in another order differ by about 1e-6 of activations of order 1.
FLOAT32 = 1e-5


@pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "wide_heads", "llama"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_output_norms_are_the_mean_length_of_what_a_head_adds(family, side):
    model, tokens = tiny(family), some_tokens(18, 9)
    mask = padding(side, [9, 6] * 9, 9)
    real = torch.ones_like(tokens).bool() if mask is None else mask.bool()
    names = [f"blocks.{layer}.attn.hook_result" for layer in range(2)]
    _, cache = model.run_with_cache(tokens, attention_mask=mask, names_filter=names)
    expected = np.array([cache[name][real].norm(dim=-1).mean(dim=0).numpy() for name in names])
    found = head_output_norms(model, token_inputs(model, tokens, mask))
    assert found == pytest.approx(expected, abs=FLOAT32)


def brute_force_controls(heads, norms, excluded):
    taken, controls = set(heads) | set(excluded), []
    for layer, head in heads:
        gaps = {
            (layer, other): abs(norms[layer, other] - norms[layer, head])
            for other in range(norms.shape[1])
            if (layer, other) not in taken
        }
        if gaps:
            controls.append(min(gaps, key=gaps.get))
            taken.add(controls[-1])
    return controls


def test_a_control_is_the_free_head_of_the_same_layer_with_the_nearest_norm():
    norms = np.array([[1.0, 5.0, 1.2, 4.0], [2.0, 2.1, 9.0, 2.3]])
    assert control_heads([(0, 0)], norms) == [(0, 2)]
    assert control_heads([(0, 0)], norms, excluded=[(0, 2)]) == [(0, 3)]
    assert control_heads([(1, 0), (0, 1)], norms) == [(1, 1), (0, 3)]
    # Each is used once, and where a layer has none left there are fewer.
    assert control_heads([(1, 0), (1, 1)], norms) == [(1, 3), (1, 2)]
    assert control_heads([(1, 0), (1, 1), (1, 2)], norms) == [(1, 3)]
    assert control_heads([], norms) == []


@pytest.mark.parametrize("seed", range(20))
def test_controls_equal_a_search(seed):
    rng = np.random.default_rng(seed)
    norms = rng.normal(size=(3, 6))
    cells = [(int(i), int(j)) for i, j in np.ndindex(3, 6)]
    chosen = [cells[i] for i in rng.permutation(18)[: rng.integers(1, 10)]]
    heads, excluded = chosen[::2], chosen[1::2]
    controls = control_heads(heads, norms, excluded)
    assert controls == brute_force_controls(heads, norms, excluded)
    assert not {*controls} & {*heads, *excluded}
    assert len(set(controls)) == len(controls)
