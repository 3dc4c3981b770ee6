"""A model in words: its shapes, and its parameters by part."""

from interp.models.transformer import Transformer


def describe(model: Transformer, source: str) -> list[str]:
    """Lines for `interp info`."""
    cfg = model.cfg
    kind = (
        "MHA"
        if cfg.n_key_value_heads == cfg.n_heads
        else "MQA"
        if cfg.n_key_value_heads == 1
        else "GQA"
    )
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = _part(name)
        parts[part] = parts.get(part, 0) + parameter.numel()
    total = sum(parts.values())
    lines = [
        f"{source}",
        f"layers {cfg.n_layers}, d_model {cfg.d_model}, n_ctx {cfg.n_ctx}, d_vocab {cfg.d_vocab}",
        f"attention {kind}: {cfg.n_heads} query heads over {cfg.n_key_value_heads} key-value heads "
        f"of width {cfg.d_head}"
        + ("" if cfg.n_heads * cfg.d_head == cfg.d_model else " (n_heads * d_head ≠ d_model)"),
        f"positions {cfg.positional_embedding_type}, norm {cfg.normalization_type or 'none'}, "
        + ("attention-only" if cfg.attn_only else f"MLP of {cfg.d_mlp} ({cfg.act_fn})")
        + (", tied embeddings" if cfg.tie_word_embeddings else ""),
        f"dtype {str(cfg.dtype).removeprefix('torch.')}, device {cfg.device}",
        f"parameters {total:,}",
    ]
    return lines + [f"  {part:<10} {n:>12,}  {n / total:6.1%}" for part, n in parts.items()]


def _part(name: str) -> str:
    for part in ("pos_embed", "unembed", "embed", "attn", "mlp"):
        if f"{part}." in name:
            return part
    return "norms"
