"""Sets of heads to prune of the tiny models, and the whole model with these heads silenced."""

import copy

import torch
from tiny_models import some_tokens

LAYER_0 = [(0, head) for head in range(4)]
LAYER_1 = [(1, head) for head in range(4)]
SETS = {
    "one head, which leaves uneven groups": [(0, 1)],
    "one head of each group": [(0, 1), (0, 2), (1, 3)],
    "a whole group": [(1, 0), (1, 1)],
    "a group and a half": [(0, 3), (1, 0), (1, 1), (1, 2)],
    "the first layer": LAYER_0,
    "the last layer and more": [*LAYER_1, (0, 2)],
    "all layers": [*LAYER_0, *LAYER_1],
}
TOKENS = some_tokens(3, 9)
BOUND = 1e-5


def masked(model, heads):
    """The whole model, with nothing read from what these heads found."""
    copied = copy.deepcopy(model)
    d_head = model.config.d_head
    with torch.no_grad():
        for layer, head in heads:
            columns = slice(head * d_head, (head + 1) * d_head)
            copied.blocks[layer].attn.o_proj.weight[:, columns] = 0.0
    return copied
