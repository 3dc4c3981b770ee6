"""Attention with a further term in its softmax written out in float64, and models that have it."""

import math

import numpy as np
import torch
from tiny_models import perturbed, tiny_config

from interp.models.attention import (
    attention_pattern,
    attention_scores,
    weighted_values,
)

# Float32 sums of a few terms; a sink that is left out, or counted twice, is off by more than 0.01.
FLOAT32 = 1e-5
LENGTHS = (12, 7, 1)
VARIANTS = {
    "zero": {"sink_logit": "zero"},
    "learned": {"sink_logit": "learned"},
    "gated": {"gated_output": True},
    "learned and gated": {"sink_logit": "learned", "gated_output": True},
}
SETTINGS = {
    "gqa": {"attention": {"n_key_value_heads": 2}},
    "windowed": {"attention": {"n_key_value_heads": 2, "window": 10}},
    "rotary": {"positional_embedding_type": "rotary", "attention": {"qk_norm": True}},
    "latent": {
        "positional_embedding_type": "rotary",
        "attention": {"kind": "latent", "d_head": 6, "d_rope": 4, "d_latent": 10, "d_value": 5},
    },
}


def model_of(setting="gqa", variant="learned", **changes):
    fields = SETTINGS[setting]
    attention = {**fields["attention"], **VARIANTS[variant]}
    return perturbed(tiny_config(**{**fields, "attention": attention, **changes}))


def values_for(case, *, d_v=6, seed=5):
    batch, n_key, n_key_value_heads = case.k.shape[:3]
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(batch, n_key, n_key_value_heads, d_v, generator=generator)
    return v.to(case.k.dtype)


def some_sink(n_heads=4):
    return torch.tensor([-1.5, 0.0, 0.7, 3.0])[:n_heads]


def written_out(case, sink):
    """The pattern with a sink logit a head, one query at a time."""
    q, k = case.q.double().numpy(), case.k.double().numpy()
    logits = sink.detach().double().numpy()
    allowed = case.allowed()
    group = q.shape[2] // k.shape[2]
    pattern = np.zeros(allowed.shape)
    for b, h, i in np.ndindex(allowed.shape[:3]):
        keys = np.flatnonzero(allowed[b, h, i])
        scores = [case.scale * math.fsum(q[b, i, h] * k[b, j, h // group]) for j in keys]
        top = max([*scores, logits[h]])
        parts = [math.exp(score - top) for score in scores]
        total = math.fsum(parts) + math.exp(logits[h] - top)
        for j, part in zip(keys, parts, strict=True):
            pattern[b, h, i, j] = part / total
    return pattern


def read(pattern, v):
    """What each head reads, by loops."""
    v = v.double().numpy()
    batch, n_heads, n_query, n_key = pattern.shape
    group = n_heads // v.shape[2]
    z = np.zeros((batch, n_query, n_heads, v.shape[3]))
    for b, h, i, j in np.ndindex(batch, n_heads, n_query, n_key):
        z[b, i, h] += pattern[b, h, i, j] * v[b, j, h // group]
    return z


def densely(case, v, sink):
    allowed = case.mask.allowed(case.q.shape[1], case.k.shape[1], case.q.device)
    pattern = attention_pattern(attention_scores(case.q, case.k, allowed, case.scale), sink)
    return pattern, weighted_values(pattern, v)
