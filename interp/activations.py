"""The largest activations in the residual stream: where they stand, and which ones are massive.

One invariant: every layer counts the blocks before it, in tables, files, figures and words alike;
and an activation that is not finite is named, never ranked.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

import pandas as pd
import torch
from torch import Tensor

from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError, ModelError
from interp.inputs import Inputs
from interp.largest import Group, Largest, Massive, Site
from interp.measure import sequences_at_once, token_text
from interp.models.modes import looking_at
from interp.models.transformer import Transformer
from interp.models.watch import HookedModel, as_hooked
from interp.tables import Activations, head_labels
from interp.text_inputs import inputs_from

TOP = 8
"""Cells listed for each layer unless it is said otherwise."""

MAGNITUDE, RATIO = 100.0, 1000.0
"""From where on an activation is massive. Source: Sun et al. 2024, "Massive Activations in Large
Language Models", section 2, who call the criterion loose."""

RECORDS = 20
"""Dimensions, positions and tokens that the summary lists, those with the most first."""

NUMBERING = (
    "layer L is the residual stream before block L, counted from 0; the last one is what leaves "
    "the last block, and, as a site of its own, that after the final norm"
)


def outliers(
    model: object,
    tokens: object = None,
    *,
    attention_mask: Tensor | None = None,
    seed: int = 0,
    blocks: Sequence[int] | None = None,
    batch: int | None = None,
    prepend_bos: bool | None = None,
    corpus: str | None = None,
    length: int | None = None,
    sequences: int | None = None,
    exclude_bos: bool = False,
    top: int = TOP,
    magnitude: int | float = MAGNITUDE,
    ratio: int | float = RATIO,
) -> Activations:
    """The largest activations of the residual stream, layer by layer.

    Layer L is the stream before block L, counted from 0: the same as `hidden_states[L]` of
    transformers, or `blocks.L.hook_resid_pre`. Layer n_layers is what leaves the last block (site
    `resid_post`). The output of the final norm, gain and bias applied, has rows of its own under
    the same number (site `ln_final`), but for models without such a norm, and encoders, whose last
    norm belongs to the blocks or to the prediction head.

    The table has, for each layer and site, the `top` cells, a position and a dimension, with the
    largest |x| over the sequences, and where it was: `sequence`, from 0, `position` among the real
    tokens of it, `token`, `dimension`, signed `value`, `magnitude` |x|. `median` is that of |x|
    over all real tokens and dimensions of the same layer, site and sequence, for an even count the
    mean of the two in the middle; `ratio` is the magnitude over it, infinite over a median of 0.
    `massive` says that the magnitude is above `magnitude` and the ratio at least `ratio`.

    `summary` counts every massive activation of the residual stream, in all sequences and layers,
    with the dimensions, positions and tokens they are in, a position with its token where
    that is one and the same; `layers` has one record for each layer and site,
    with the mean of its medians. One spike that stays over ten layers counts ten times. Massive is
    a matter of size alone: whether the model needs it only an intervention tells. A layer's largest
    values say nothing of its common ones, and with one token a sequence the median is of that one.

    Inputs are those of `analyze`: `tokens`, a `corpus`, or repeated random tokens. With
    `exclude_bos` BOS tokens are not looked at. Numbers are in float32 at least; memory is that of a
    forward pass, and fixed for any number of sequences.

    Raises: AnalysisError for an activation that is not finite, naming it, `top` below 1, or as
    `analyze`; ModelError for a model without hooks on the residual stream.

    Source: the criterion of Sun et al. 2024 (arXiv 2402.17762), section 2.
    """
    hooked = as_hooked(model)
    inputs = inputs_from(
        hooked,
        tokens,
        attention_mask=attention_mask,
        blocks=blocks,
        batch=batch,
        corpus=corpus,
        length=length,
        sequences=sequences,
        prepend_bos=prepend_bos,
        exclude_bos=exclude_bos,
        seed=seed,
    )
    return outliers_in(hooked, inputs, seed=seed, top=top, magnitude=magnitude, ratio=ratio)


def outliers_in(
    model: HookedModel,
    inputs: Inputs,
    *,
    seed: int = 0,
    top: int = TOP,
    magnitude: int | float = MAGNITUDE,
    ratio: int | float = RATIO,
) -> Activations:
    """`outliers` on inputs that are already made. Raises: as `outliers`."""
    check_thresholds(top, magnitude, ratio)
    sites = _sites(model)
    massive = Massive()
    kept = [Largest(site, top, float(magnitude), float(ratio), massive) for site in sites]
    first = 0
    device = torch.device(str(model.cfg.device))
    for whole in inputs.batches:
        size = sequences_at_once(model, whole.tokens.shape[1])
        for start in range(0, len(whole.tokens), size):
            part = slice(start, start + size)
            batch = whole.each(itemgetter(part)).each(lambda tensor: tensor.to(device))
            _pass(model, batch, kept, first)
            first += len(batch.tokens)
    if not any(own.medians for own in kept):
        raise AnalysisError("there is no token to look at")
    text = token_text(model)
    gone = head_labels(model.cfg.pruned_heads)
    rows = {own.site: own.rows(text) for own in kept}
    return Activations(
        table=pd.DataFrame([row for own in rows.values() for row in own]),
        score="magnitude",
        unit="activation",
        analysis="outliers",
        model=model.cfg.model_name,
        params={
            **inputs.params,
            "top": top,
            "magnitude": float(magnitude),
            "ratio": float(ratio),
            "numbering": NUMBERING,
            "median": "of |x| over the real tokens and dimensions of one layer and sequence",
            **({"pruned_heads": gone} if gone else {}),
        },
        inputs=inputs.description,
        seed=seed,
        summary=_summary(kept, rows, massive, text),
    )


def check_thresholds(top: int, magnitude: int | float, ratio: int | float) -> None:
    """Refuse what can be told before a model is read.

    Raises: AnalysisError for `top` below 1, or a threshold that is negative or not a number.
    """
    if top < 1:
        raise AnalysisError(f"top = {top}: at least one activation a layer is listed")
    for name, value in (("magnitude", magnitude), ("ratio", ratio)):
        if not value >= 0:
            raise AnalysisError(f"{name} = {value:g}: a threshold is 0 or above")


def _sites(model: HookedModel) -> list[Site]:
    """Before each block, after the last, after the final norm, in the order of the pass.

    Raises: ModelError for a model that shows its residual stream nowhere, or not everywhere.
    """
    n_layers = model.cfg.n_layers
    sites = [
        Site(layer, "resid_pre", f"blocks.{layer}.hook_resid_pre") for layer in range(n_layers)
    ]
    sites.append(Site(n_layers, "resid_post", f"blocks.{n_layers - 1}.hook_resid_post"))
    for site in sites:
        if site.hook not in model.hook_dict:
            raise ModelError(
                f"{model.cfg.model_name} has no {site.hook}: outliers looks at the residual stream "
                "before every block and after the last"
            )
    if isinstance(model, Transformer):
        normed = model.config.normalization_type != "none"
    else:
        normed = model.cfg.attention_dir == "causal" and "ln_final.hook_out" in model.hook_dict
    return [*sites, Site(n_layers, "ln_final", "ln_final.hook_out")] if normed else sites


def _pass(model: HookedModel, batch: TokenBatch, kept: Sequence[Largest], first: int) -> None:
    """One forward pass, in which every site sees its activations; `first` is the first sequence."""
    looked = batch.real if batch.counted is None else batch.counted
    places = batch.real.long().cumsum(dim=1) - 1

    def looking(own: Largest) -> Callable[..., None]:
        def look(value: Tensor, hook: object = None) -> None:
            for row, wanted in enumerate(looked):
                if wanted.any():
                    positions, tokens = places[row][wanted], batch.tokens[row][wanted]
                    own.see(value[row][wanted], positions, tokens, first + row)

        return look

    with looking_at(model):
        hooks = [(own.site.hook, looking(own)) for own in kept]
        handle = None
        if isinstance(model, Transformer) and kept[-1].site.kind == "ln_final":
            # Our norms have a hook before their gain, and none behind it.
            last = looking(kept[-1])
            handle = model.ln_final.register_forward_hook(lambda norm, given, out: last(out))
            del hooks[-1]
        try:
            model.run_with_hooks(
                batch.tokens, fwd_hooks=hooks, attention_mask=batch.key_mask, return_type=None
            )
        finally:
            if handle is not None:
                handle.remove()


def _summary(
    kept: Sequence[Largest],
    rows: Mapping[Site, Sequence[Mapping[str, object]]],
    massive: Massive,
    text: Callable[[int], str],
) -> dict[str, object]:
    """Figures of the whole model; `largest` and `massive` are of the residual stream."""
    stream = [own for own in kept if own.site.kind != "ln_final"]
    layers = [own.record() for own in kept]
    most = max((row for own in stream for row in rows[own.site]), key=_magnitude)
    summary: dict[str, object] = {
        "massive": sum(own.number for own in stream),
        "massive_layers": [own.site.layer for own in stream if own.number],
        "largest": most["value"],
        "largest_ratio": most["ratio"],
        **{
            f"largest_{name}": most[name]
            for name in ("layer", "sequence", "position", "token", "dimension")
        },
        "layers": layers,
    }
    if massive.dimensions:
        summary |= {
            "massive_dimensions": len(massive.dimensions),
            "massive_positions": len(massive.positions),
            "massive_tokens": len(massive.tokens),
            "dimensions": [
                {"dimension": dimension, **group.record()}
                for dimension, group in _most(massive.dimensions)
            ],
            "positions": [
                {
                    "position": position,
                    **({} if group.only is None else {"token": text(group.only)}),
                    **group.record(),
                }
                for position, group in _most(massive.positions)
            ],
            "tokens": [
                {
                    "token": text(token),
                    **({} if group.only is None else {"position": group.only}),
                    **group.record(),
                }
                for token, group in _most(massive.tokens)
            ],
        }
    return summary


def _magnitude(row: Mapping[str, object]) -> float:
    return float(str(row["magnitude"]))


def _most(groups: Mapping[int, Group]) -> list[tuple[int, Group]]:
    order = sorted(groups.items(), key=lambda item: (-item[1].number, -abs(item[1].largest)))
    return order[:RECORDS]
