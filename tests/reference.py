"""A float64 oracle of the whole model in plain numpy: one sequence, position and head at a time.

It shares no code with interp and favours the definition over speed, so that where the two agree to
rounding both are right. Activations carry the model's hook names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Description:
    """What the weights alone do not say about a model."""

    n_layers: int
    n_heads: int
    n_key_value_heads: int
    d_head: int
    positional_embedding_type: str
    rotary_base: float
    rotary_scaling: Mapping[str, object] | None
    scale: float | None
    scale_by_inverse_layer: bool
    window: int | None
    windowed_layers: tuple[int, ...] | None
    normalization_type: str
    eps: float
    act_fn: str | None
    gated: bool

    @classmethod
    def of(cls, config: object) -> "Description":
        """The description of a model config, read field by field."""
        return cls(
            n_layers=config.n_layers,
            n_heads=config.attention.n_heads,
            n_key_value_heads=config.attention.n_key_value_heads,
            d_head=config.attention.d_head,
            positional_embedding_type=config.positional_embedding_type,
            rotary_base=config.rotary_base,
            rotary_scaling=config.rotary_scaling and config.rotary_scaling.model_dump(),
            scale=config.attention.scale,
            scale_by_inverse_layer=config.attention.scale_by_inverse_layer,
            window=config.attention.window,
            windowed_layers=config.attention.windowed_layers,
            normalization_type=config.normalization_type,
            eps=config.eps,
            act_fn=None if config.mlp is None else config.mlp.act_fn,
            gated=config.mlp is not None and config.mlp.gated,
        )


def forward(
    model: Description, weights: Mapping[str, Array], tokens: Array, mask: Array | None = None
) -> dict[str, Array]:
    """Every activation under its hook name, and the logits under `logits`.

    `mask` is 1 for a real token. Scores and patterns are `[batch, head, query, key]`, everything
    else `[batch, pos, ...]`.
    """
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    real = np.ones(tokens.shape, dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    rows = [
        _sequence(model, weights, [int(t) for t in tokens[b]], [bool(r) for r in real[b]])
        for b in range(len(tokens))
    ]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def next_token_losses(logits: Array, tokens: Array, mask: Array | None = None) -> Array:
    """Minus the log-probability of each next token; 0 where it or its predictor is padding."""
    batch, n_pos = tokens.shape
    losses = np.zeros((batch, n_pos - 1))
    for b in range(batch):
        for p in range(n_pos - 1):
            if mask is not None and not (mask[b, p] and mask[b, p + 1]):
                continue
            row = np.asarray(logits[b, p], dtype=np.float64)
            losses[b, p] = _log_sum_exp(row) - row[int(tokens[b, p + 1])]
    return losses


def mean_loss(losses: Array, mask: Array | None = None) -> float:
    """The mean over next tokens that are real and predicted by a real token."""
    batch, width = losses.shape
    counted = [
        losses[b, p]
        for b in range(batch)
        for p in range(width)
        if mask is None or (mask[b, p] and mask[b, p + 1])
    ]
    return math.fsum(counted) / len(counted)


def attention(
    q: Array, k: Array, v: Array, real: list[bool], scale: float, window: int | None = None
) -> tuple[Array, Array, Array]:
    """Scores, pattern and weighted values of one head; `q` and `k` are `[pos, d]`.

    With a window of w, place i sees itself and the w - 1 places before it.
    """
    n_pos = len(q)
    scores = np.full((n_pos, n_pos), -np.inf)
    pattern = np.zeros((n_pos, n_pos))
    z = np.zeros((n_pos, v.shape[1]))
    for i in range(n_pos):
        first = 0 if window is None else max(0, i - window + 1)
        allowed = [j for j in range(first, i + 1) if real[j]]
        for j in allowed:
            scores[i, j] = scale * float(q[i] @ k[j])
        if not allowed:
            continue  # a query that may attend to nothing reads nothing
        normaliser = _log_sum_exp(scores[i, allowed])
        for j in allowed:
            pattern[i, j] = math.exp(scores[i, j] - normaliser)
            z[i] += pattern[i, j] * v[j]
    return scores, pattern, z


def rotate(
    x: Array, position: int, base: float, scaling: Mapping[str, object] | None = None
) -> Array:
    """One head's vector turned by its position; dimension i is paired with i + d / 2."""
    d = len(x)
    turned = np.zeros(d)
    for i in range(d // 2):
        angle = position * _slowed(base ** (-2 * i / d), scaling)
        first, second = x[i], x[i + d // 2]
        turned[i] = first * math.cos(angle) - second * math.sin(angle)
        turned[i + d // 2] = second * math.cos(angle) + first * math.sin(angle)
    return turned


def _slowed(frequency: float, scaling: Mapping[str, object] | None) -> float:
    """A rotary frequency after the scaling for long contexts."""
    if scaling is None:
        return frequency
    if scaling["kind"] == "linear":
        return frequency / scaling["factor"]
    # Llama 3.1: long waves are stretched, short ones are kept, those between are mixed.
    wavelength = 2 * math.pi / frequency
    longest_kept = scaling["original_n_ctx"] / scaling["high_freq_factor"]
    shortest_stretched = scaling["original_n_ctx"] / scaling["low_freq_factor"]
    if wavelength <= longest_kept:
        return frequency
    if wavelength >= shortest_stretched:
        return frequency / scaling["factor"]
    turns = scaling["original_n_ctx"] / wavelength
    span = scaling["high_freq_factor"] - scaling["low_freq_factor"]
    kept = (turns - scaling["low_freq_factor"]) / span
    return (1 - kept) * frequency / scaling["factor"] + kept * frequency


def _sequence(
    model: Description, weights: dict[str, Array], ids: list[int], real: list[bool]
) -> dict[str, Array]:
    n_pos = len(ids)
    positions = [max(sum(real[: t + 1]) - 1, 0) for t in range(n_pos)]
    seen: dict[str, Array] = {}
    resid = np.stack([weights["embed.weight"][i] for i in ids])
    seen["hook_embed"] = resid
    shortformer = np.zeros_like(resid)
    if model.positional_embedding_type in ("standard", "shortformer"):
        placed = np.stack([weights["pos_embed.weight"][p] for p in positions])
        seen["hook_pos_embed"] = placed
        if model.positional_embedding_type == "standard":
            resid = resid + placed
        else:
            shortformer = placed
    for layer in range(model.n_layers):
        block = f"blocks.{layer}"
        seen[f"{block}.hook_resid_pre"] = resid
        x = _norm(model, weights, f"{block}.ln1", resid, seen)
        _attention_layer(model, weights, layer, x, shortformer, positions, real, seen)
        heads = seen[f"{block}.attn.hook_result"]
        attn_out = heads.sum(axis=1) + weights.get(f"{block}.attn.o_proj.bias", 0.0)
        seen[f"{block}.hook_attn_out"] = attn_out
        resid = resid + attn_out
        if model.act_fn is not None:
            seen[f"{block}.hook_resid_mid"] = resid
            x = _norm(model, weights, f"{block}.ln2", resid, seen)
            mlp_out = _mlp(model, weights, f"{block}.mlp", x, seen)
            seen[f"{block}.hook_mlp_out"] = mlp_out
            resid = resid + mlp_out
        seen[f"{block}.hook_resid_post"] = resid
    final = _norm(model, weights, "ln_final", resid, seen)
    seen["logits"] = _linear(weights, "unembed", final)
    return seen


def _attention_layer(
    model: Description,
    weights: dict[str, Array],
    layer: int,
    x: Array,
    shortformer: Array,
    positions: list[int],
    real: list[bool],
    seen: dict[str, Array],
) -> None:
    name, d = f"blocks.{layer}.attn", model.d_head
    q = _linear(weights, f"{name}.q_proj", x + shortformer).reshape(len(x), model.n_heads, d)
    k = _linear(weights, f"{name}.k_proj", x + shortformer)
    k = k.reshape(len(x), model.n_key_value_heads, d)
    v = _linear(weights, f"{name}.v_proj", x).reshape(len(x), model.n_key_value_heads, d)
    if f"{name}.smear" in weights:
        smeared = k.copy()
        for head, logit in enumerate(weights[f"{name}.smear"]):
            own = 1 / (1 + math.exp(-logit))
            for t in range(1, len(x)):
                if real[t - 1]:
                    smeared[t, head] = own * k[t, head] + (1 - own) * k[t - 1, head]
        k = smeared
    seen[f"{name}.hook_q"], seen[f"{name}.hook_k"], seen[f"{name}.hook_v"] = q, k, v
    if f"{name}.q_norm.w" in weights:
        q = _head_norm(q, weights[f"{name}.q_norm.w"], model.eps)
        k = _head_norm(k, weights[f"{name}.k_norm.w"], model.eps)
    if model.positional_embedding_type == "rotary":
        base, scaling = model.rotary_base, model.rotary_scaling
        q, k = (
            np.stack([[rotate(h, p, base, scaling) for h in heads] for heads, p in pairs])
            for pairs in (
                list(zip(q, positions, strict=True)),
                list(zip(k, positions, strict=True)),
            )
        )
        seen[f"{name}.hook_rot_q"], seen[f"{name}.hook_rot_k"] = q, k
    scale = 1 / math.sqrt(d) if model.scale is None else model.scale
    if model.scale_by_inverse_layer:
        scale /= layer + 1
    windowed = model.windowed_layers is None or layer in model.windowed_layers
    window = model.window if windowed else None
    scores, patterns, reads, results = [], [], [], []
    for head in range(model.n_heads):
        group = head // (model.n_heads // model.n_key_value_heads)
        head_scores, pattern, z = attention(
            q[:, head], k[:, group], v[:, group], real, scale, window
        )
        w_o = weights[f"{name}.o_proj.weight"][:, head * d : (head + 1) * d]
        scores.append(head_scores)
        patterns.append(pattern)
        reads.append(z)
        results.append(np.stack([w_o @ z_at for z_at in z]))
    seen[f"{name}.hook_attn_scores"] = np.stack(scores)
    seen[f"{name}.hook_pattern"] = np.stack(patterns)
    seen[f"{name}.hook_z"] = np.stack(reads, axis=1)
    seen[f"{name}.hook_result"] = np.stack(results, axis=1)


def _mlp(
    model: Description, weights: dict[str, Array], name: str, x: Array, seen: dict[str, Array]
) -> Array:
    if model.gated:
        pre = _linear(weights, f"{name}.gate_proj", x)
        linear = _linear(weights, f"{name}.in_proj", x)
        seen[f"{name}.hook_pre_linear"] = linear
    else:
        pre = _linear(weights, f"{name}.in_proj", x)
        linear = np.ones_like(pre)
    post = np.vectorize(_ACTIVATIONS[model.act_fn])(pre) * linear
    seen[f"{name}.hook_pre"], seen[f"{name}.hook_post"] = pre, post
    return _linear(weights, f"{name}.out_proj", post)


def _norm(
    model: Description, weights: dict[str, Array], name: str, x: Array, seen: dict[str, Array]
) -> Array:
    if model.normalization_type == "none":
        return x
    scales, normalized = [], []
    for row in x:
        centred = row - row.mean() if model.normalization_type == "LN" else row
        scale = math.sqrt((centred**2).mean() + model.eps)
        scales.append([scale])
        normalized.append(centred / scale)
    seen[f"{name}.hook_scale"] = np.array(scales)
    seen[f"{name}.hook_normalized"] = np.stack(normalized)
    return np.stack(normalized) * weights[f"{name}.w"] + weights.get(f"{name}.b", 0.0)


def _head_norm(x: Array, gain: Array, eps: float) -> Array:
    """Each head's vector over its root mean square, times gains that the heads share."""
    normed = np.zeros_like(x)
    for t in range(x.shape[0]):
        for head in range(x.shape[1]):
            rms = math.sqrt(math.fsum(value**2 for value in x[t, head]) / x.shape[2] + eps)
            normed[t, head] = gain * x[t, head] / rms
    return normed


def _linear(weights: dict[str, Array], name: str, x: Array) -> Array:
    bias = weights.get(f"{name}.bias", 0.0)
    return np.stack([weights[f"{name}.weight"] @ row + bias for row in x])


def _log_sum_exp(row: Array) -> float:
    top = float(row.max())
    return top + math.log(math.fsum(math.exp(value - top) for value in row))


def _gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def _gelu_new(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_ACTIVATIONS = {
    "relu": lambda x: max(x, 0.0),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": _gelu,
    "gelu_new": _gelu_new,
}
