"""A model in words: its shapes, its parameters by part, and what its KV cache would take."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from interp.arithmetic import AttentionShape
from interp.arithmetic.known import hf_shape
from interp.arithmetic.lookup import config_shape
from interp.doctor import NotApplicable, Structure, structure_of
from interp.models.bridge import BridgedModel
from interp.models.transformer import Transformer
from interp.models.watch import HookedModel
from interp.views.terminal.arithmetic import weight_lines

_NATIVE_PARTS = {
    "pos_embed": "positions",
    "unembed": "unembed",
    "embed": "embed",
    "q_proj": "attention Q",
    "q_down_proj": "attention Q",
    "kv_down_proj": "attention KV",
    "k_rope_proj": "attention KV",
    "k_proj": "attention K",
    "v_proj": "attention V",
    "o_proj": "attention O",
    "smear": "attention smear",
    "sink_logit": "attention sink",
    "mlp": "MLP",
    "gate": "attention gate",  # that of a gated MLP is its own
}
_BRIDGED_PARTS = {
    "embed": "embed",
    "token_type_embed": "embed",
    "pos_embed": "positions",
    "mlm_head": "head",
}
_ORDER = (
    "embed",
    "positions",
    "attention Q",
    "attention KV",
    "attention K",
    "attention V",
    "attention O",
    "attention smear",
    "attention sink",
    "attention gate",
    "MLP",
    "norms",
    "head",
    "unembed",
    "other",
)


def describe(model: HookedModel) -> list[str]:
    """Lines for `interp info`."""
    cfg, structure = model.cfg, structure_of(model)
    return [
        _origin(model),
        f"layers {cfg.n_layers}, d_model {cfg.d_model}, n_ctx {cfg.n_ctx}, d_vocab {cfg.d_vocab}",
        *_attention(model, structure),
        _positions(model, structure),
        _rest_of_block(model, structure),
        _tokens(model),
        f"dtype {_dtype(model)}, device {cfg.device}",
        *_parameters(parameters_by_part(model)),
        *weight_lines(_shape(model)),
        *_cache(model, structure),
    ]


def parameters_by_part(model: HookedModel) -> dict[str, int]:
    """How many parameters each part has; a tied unembedding has none of its own."""
    if isinstance(model, BridgedModel):
        counted = _bridged_parts(model)
    else:
        assert isinstance(model, Transformer)  # there is no third kind
        counted = _native_parts(model)
    return {part: counted[part] for part in _ORDER if counted[part]}


def cache_bytes(model: HookedModel) -> int:
    """Bytes that a KV cache needs for each token: keys and values of every layer, or latents."""
    return sum(_layer_cache_bytes(model, layer) for layer in range(model.cfg.n_layers))


def _layer_cache_bytes(model: HookedModel, layer: int) -> int:
    cfg, shape = model.cfg, _shape(model)
    elements = shape.layer_elements()
    if shape.latent is None:  # of the heads that are left
        elements = elements * len(cfg.key_value_heads(layer)) // cfg.n_key_value_heads
    return elements * cfg.dtype.itemsize


def _shape(model: HookedModel) -> AttentionShape:
    cfg = model.cfg
    if isinstance(model, Transformer):
        return config_shape(model.config, cfg.model_name)
    assert isinstance(model, BridgedModel)  # there is no third kind
    bridge: Any = model.bridge
    original = bridge.original_model.config
    if getattr(original, "kv_lora_rank", None):  # of latent attention a bridge tells no sizes
        return hf_shape(original.to_dict(), cfg.model_name)
    return AttentionShape(
        name=cfg.model_name,
        n_layers=cfg.n_layers,
        n_heads=cfg.n_heads,
        n_key_value_heads=cfg.n_key_value_heads,
        d_head=cfg.d_head,
        d_model=cfg.d_model,
    )


def _origin(model: HookedModel) -> str:
    source = model.source
    if source is None:
        return f"{model.cfg.model_name}: made in memory"
    kinds = {"run": "training run", "huggingface": "Hugging Face folder", "gguf": "GGUF file"}
    bridged = "" if isinstance(model, Transformer) else ", bridged"
    return f"{source.name}: {kinds[source.kind]}{bridged}, {source.path}"


def _attention(model: HookedModel, structure: Structure) -> Iterator[str]:
    cfg, shape = model.cfg, _shape(model)
    odd = "" if shape.width == cfg.d_model else " (n_heads * d_head ≠ d_model)"
    yield f"attention {shape.kind}: {_heads(shape)}{odd}"
    if cfg.pruned_heads:
        yield _pruned(model)
    facts = ["causal" if structure.causal else "bidirectional"]
    windows = [structure.window(layer) for layer in range(cfg.n_layers)]
    windowed = [layer for layer, window in enumerate(windows) if window is not None]
    if windowed:
        every = len(windowed) == cfg.n_layers
        where = "" if every else f" in layers {', '.join(map(str, windowed))}"
        facts.append(f"window {windows[windowed[0]]}{where}")
    facts.append("QK norm" if structure.head_norm(0) else "no QK norm")
    biased = [part for part in structure.biases(0) if part != "mlp"]
    facts.append(f"biases of {', '.join(biased)}" if biased else "no biases")
    with suppress(NotApplicable):
        scales = [structure.scale(layer) for layer in (0, cfg.n_layers - 1)]
        if any(abs(scale - _key_width(shape) ** -0.5) > 1e-9 for scale in scales):
            facts.append(f"scale {' to '.join(f'{scale:g}' for scale in dict.fromkeys(scales))}")
    facts.extend(filter(None, [structure.softmax_term(0)]))
    if cfg.sink_logit != "none":
        facts.append(f"{cfg.sink_logit} sink logit: rows of a pattern sum to 1 at most")
    if isinstance(model, Transformer) and model.config.attention.gated_output:
        facts.append("what heads read is gated")
    yield f"  {', '.join(facts)}"


def _heads(shape: AttentionShape) -> str:
    if shape.latent is None:
        return (
            f"{shape.n_heads} query heads over {shape.n_key_value_heads} key-value heads of width "
            f"{shape.d_head}"
        )
    latent = shape.latent
    query = "" if latent.query is None else f", queries from one of {latent.query}"
    return (
        f"{shape.n_heads} heads of width {shape.d_head} + {latent.rope} rotary, values of "
        f"{shape.value_width}, over a latent of {latent.kv}{query}"
    )


def _key_width(shape: AttentionShape) -> int:
    return shape.d_head + (0 if shape.latent is None else shape.latent.rope)


def _positions(model: HookedModel, structure: Structure) -> str:
    cfg = model.cfg
    try:
        rope = structure.rope(0)
    except NotApplicable:
        rope = None
    if rope is None:
        return f"positions {cfg.positional_embedding_type}"
    settings = dict(rope.settings)
    kind, base = settings.pop("rope_type", "default"), settings.pop("rope_theta", cfg.rotary_base)
    facts = [f"base {float(str(base)):,.10g}"]
    width = _key_width(_shape(model))
    if rope.n_turned != width:
        facts.append(f"{rope.n_turned} of {width} dimensions")
    settings.pop("partial_rotary_factor", None)
    if kind != "default":
        words = ", ".join(f"{name} {value}" for name, value in settings.items())
        facts.append(f"scaling {kind}" + (f" ({words})" if words else ""))
    return f"positions rotary: {', '.join(facts)}"


def _rest_of_block(model: HookedModel, structure: Structure) -> str:
    cfg = model.cfg
    norm = (
        "none" if cfg.normalization_type is None else f"{cfg.normalization_type} (eps {cfg.eps:g})"
    )
    tied = ", tied embeddings" if cfg.tie_word_embeddings else ""
    if cfg.attn_only:
        return f"norm {norm}, attention-only{tied}"
    facts = [str(cfg.act_fn), *(["gated"] if cfg.gated_mlp else [])]
    facts.append("biases" if "mlp" in structure.biases(0) else "no biases")
    return f"norm {norm}, MLP of {cfg.d_mlp} ({', '.join(facts)}){tied}"


def _tokens(model: HookedModel) -> str:
    cfg, vocabulary = model.cfg, model.vocabulary
    bos = cfg.bos_token_id
    if vocabulary is None:
        return f"no tokenizer; {'no BOS' if bos is None else f'BOS {bos}'}"
    text = "no BOS" if bos is None else f"BOS {bos} {vocabulary.token_texts([bos])[0]!r}"
    spare = cfg.d_vocab - len(vocabulary)
    rows = f", {spare:,} rows of the embedding without a token" if spare else ""
    return f"tokenizer of {len(vocabulary):,} tokens{rows}; {text}"


def _pruned(model: HookedModel) -> str:
    cfg = model.cfg
    layers = range(cfg.n_layers)
    left = [len(cfg.heads(layer)) for layer in layers]
    shared = sum(len(cfg.key_value_heads(layer)) for layer in layers)
    n_heads, n_shared = cfg.n_layers * cfg.n_heads, cfg.n_layers * cfg.n_key_value_heads
    return (
        f"  pruned: {n_heads - sum(left)} of {n_heads} query heads and {n_shared - shared} of "
        f"{n_shared} key-value heads; a layer has {min(left)} to {max(left)} query heads left"
    )


def _parameters(parts: Mapping[str, int]) -> Iterator[str]:
    total = sum(parts.values())
    yield f"parameters {total:,}"
    for part, n in parts.items():
        yield f"  {part:<15} {n:>14,}  {n / total:6.1%}"


def _cache(model: HookedModel, structure: Structure) -> Iterator[str]:
    cfg = model.cfg
    if not structure.causal:
        yield "KV cache: none, since every token sees every other"
        return
    per_token = cache_bytes(model)
    yield f"KV cache {per_token:,} bytes a token"
    kept = [min(cfg.n_ctx, structure.window(i) or cfg.n_ctx) for i in range(cfg.n_layers)]
    whole = sum(n * _layer_cache_bytes(model, layer) for layer, n in enumerate(kept))
    capped = sum(kept) < cfg.n_ctx * cfg.n_layers
    how = ", where windowed layers keep no more than their window" if capped else ""
    yield (
        f"  {_short(whole / 1e6)} MB ({_short(whole / 2**20)} MiB) for a context of "
        f"{cfg.n_ctx:,} tokens{how}"
    )


def _short(number: float) -> str:
    return f"{number:,.1f}" if number >= 100 else f"{number:.3g}"


def _native_parts(model: Transformer) -> Counter[str]:
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        words = name.split(".")
        known = (part for word, part in _NATIVE_PARTS.items() if word in words)
        parts[next(known, "norms")] += parameter.numel()
    return parts


def _bridged_parts(model: BridgedModel) -> Counter[str]:
    bridge: Any = model.bridge
    owners: dict[int, str] = {}
    copies: set[int] = set()

    def claim(component: object, part: str) -> None:
        for parameter in component.parameters() if isinstance(component, nn.Module) else ():
            owners.setdefault(id(parameter), part)

    for name, part in _BRIDGED_PARTS.items():
        claim(getattr(bridge, name, None), part)
    for block in bridge.blocks:
        joint = getattr(block.attn, "qkv", None)
        for letter in "qkv":
            component = getattr(block.attn, letter, None)
            claim(component, f"attention {letter.upper()}")
            if joint is not None and component is not None:
                copies.update(map(id, component.parameters()))
        claim(joint, "attention QKV")
        claim(getattr(block.attn, "o", None), "attention O")
        claim(getattr(block, "mlp", None), "MLP")
    claim(bridge.unembed, "unembed")

    parts: Counter[str] = Counter()
    seen = set(copies)
    for module in bridge.original_model.modules():
        norm = "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                part = "norms" if norm else owners.get(id(parameter), "other")
                parts[part] += parameter.numel()
    cfg = model.cfg
    heads = {"Q": cfg.n_heads, "K": cfg.n_key_value_heads, "V": cfg.n_key_value_heads}
    joined = parts.pop("attention QKV", 0)
    for letter, n in heads.items():  # the joint matrix, by its rows
        parts[f"attention {letter}"] += joined * n // sum(heads.values())
    return parts


def _dtype(model: HookedModel) -> str:
    return str(model.cfg.dtype).removeprefix("torch.")
