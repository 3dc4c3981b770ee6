"""What a model's attention holds and caches, in lines of text."""

from collections.abc import Iterator

from interp.arithmetic import GB, GIB, AttentionShape


def cache_lines(shape: AttentionShape, context: int, batch: int, dtype: str) -> Iterator[str]:
    """Lines for `interp kv-cache`: sizes, one layer's matrices, the cache beside that of MHA."""
    yield f"{shape.name}: {shape.n_layers} layers, {_heads(shape)}, d_model {shape.d_model:,}"
    if shape.width != shape.d_model:
        yield (
            f"  {shape.n_heads} heads x {shape.d_head} = {shape.width:,} ≠ d_model: only the "
            "output matrix has to end there"
        )
    yield from weight_lines(shape)
    own, other = shape.bytes_per_token(dtype), shape.n_layers * shape.mha_layer_elements()
    elements = f"{shape.layer_elements():,} numbers a token and layer"
    yield f"KV cache in {dtype}: {own:,.0f} bytes a token ({elements})"
    whole = shape.cache_bytes(context, batch, dtype)
    sequences = "1 sequence" if batch == 1 else f"{batch:,} sequences"
    yield f"  {sequences} of {context:,} tokens: {both_units(whole)}"
    if shape.kind != "MHA":
        mha = shape.cache_bytes(context, batch, dtype, mha=True)
        ratio = shape.mha_layer_elements() / shape.layer_elements()
        each = other * own / (shape.n_layers * shape.layer_elements())
        yield (
            f"  with MHA: {each:,.0f} bytes a token, {both_units(mha)}, {ratio:.3g} times as much"
        )
    if any(window is not None and window < context for window in shape.windows):
        windowed = sum(window is not None for window in shape.windows)
        yield f"  {windowed} of {shape.n_layers} layers keep no more than their window"
    for fact in (shape.note, f"source: {shape.source}" if shape.source else ""):
        if fact:
            yield f"  {fact}"


def cache_record(shape: AttentionShape, context: int, batch: int, dtype: str) -> dict[str, object]:
    """The same numbers by name."""
    return {
        "model": shape.name,
        "kind": shape.kind,
        "layers": shape.n_layers,
        "heads": shape.n_heads,
        "kv_heads": shape.n_key_value_heads,
        "d_head": shape.d_head,
        "d_model": shape.d_model,
        "heads_times_d_head": shape.width,
        "differs": shape.width != shape.d_model,
        "attention_weights": sum(shape.weights().values()),
        "numbers_per_token_and_layer": shape.layer_elements(),
        "bytes_per_token": shape.bytes_per_token(dtype),
        "bytes": shape.cache_bytes(context, batch, dtype),
        "mha_bytes": shape.cache_bytes(context, batch, dtype, mha=True),
        "context": context,
        "batch": batch,
        "dtype": dtype,
        "source": shape.source,
        "note": shape.note,
    }


def weight_lines(shape: AttentionShape) -> Iterator[str]:
    """The matrices of one layer's attention."""
    weights = shape.weights()
    named = ", ".join(f"{name} {n:,}" for name, n in weights.items())
    yield f"one layer's attention: {sum(weights.values()):,} weights ({named})"


def both_units(n_bytes: float) -> str:
    """Bytes as GB and as GiB, or MB and MiB where they are few."""
    if n_bytes >= GB:
        return f"{n_bytes / GB:,.2f} GB ({n_bytes / GIB:,.2f} GiB)"
    return f"{n_bytes / 1e6:,.4g} MB ({n_bytes / 2**20:,.4g} MiB)"


def _heads(shape: AttentionShape) -> str:
    if shape.latent is not None:
        latent = shape.latent
        query = "" if latent.query is None else f", queries of {latent.query}"
        return (
            f"{shape.n_heads} heads of width {shape.d_head} + {latent.rope} rotary over a latent "
            f"of {latent.kv}{query} (MLA)"
        )
    return (
        f"{shape.n_heads} query heads over {shape.n_key_value_heads} KV heads of width "
        f"{shape.d_head} ({shape.kind})"
    )
