"""Activations that stand out, at every site of a model: where they are, and which are massive.

One invariant: every layer counts the blocks before it, in tables, files, figures and words alike;
and an activation that is not finite is named, never ranked.
"""

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from interp.activation_tables import Activations
from interp.activations.criteria import MAGNITUDE, RATIO, Criteria
from interp.activations.features import SITES as FEATURE_SITES
from interp.activations.features import outlier_features
from interp.activations.largest import Group, Largest, Massive
from interp.activations.massive import parts
from interp.activations.sites import RESIDUAL, Site, every_site, look_at_sites
from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError
from interp.inputs import Inputs
from interp.measure import token_text
from interp.models.watch import HookedModel, as_hooked
from interp.tables import head_labels
from interp.text_inputs import inputs_from

RECORDS = 20
"""Dimensions, positions and tokens that the summary lists, those with the most first."""

NUMBERING = (
    "layer L is the residual stream before block L, counted from 0, or a site inside block L; the "
    "last one is what leaves the last block, and, as a site of its own, that after the final norm"
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
    sites: Sequence[str] | None = None,
    top: int = 3,
    magnitude: int | float = MAGNITUDE,
    ratio: int | float = RATIO,
    deviations: int | float = 6.0,
    feature_magnitude: int | float = 6.0,
    feature_layers: int | float = 0.25,
    feature_positions: int | float = 0.06,
) -> Activations:
    """The largest activations of every layer and site, and how each site is distributed.

    Layer L is the residual stream before block L, counted from 0 (site `resid_pre`): the same as
    `hidden_states[L]` of transformers, or `blocks.L.hook_resid_pre`. Layer n_layers is what leaves
    the last block (`resid_post`). The output of the final norm, gain and bias applied, has rows of
    its own under the same number (`ln_final`), but for models without such a norm, and encoders,
    whose last norm belongs to the blocks or to the prediction head. The sites inside block L are
    `attn_in`, `k`, `v`, `z`, `attn_out`, `mlp_in`, `mlp_post` and `mlp_out`:
    `interp.activations.sites.KINDS` says what each is. `sites` names some of all these; a layer
    without a site, such as one whose heads are pruned, has no row of it. Dimensions of `k`, `v` and
    `z` run head by head over the heads that are left.

    The table has, for each layer and site, the `top` cells, a position and a dimension, with the
    largest |x| over the sequences, and where it was: `sequence`, from 0, `position` among the real
    tokens of it, `token`, `dimension`, signed `value`, `magnitude` |x|. What it is compared with is
    of all real tokens and dimensions of the same layer, site and sequence: `median` is that of |x|,
    for an even count the mean of the two in the middle, and `ratio` the magnitude over it, infinite
    over a median of 0; `deviation` is |x - m| / (1.4826 MAD) with the median m of x and the median
    absolute deviation from it, so that one peak does not hide the next. `massive` says that the
    magnitude is above `magnitude` and the ratio at least `ratio`.

    `sites` of the result has a row for each layer and site: `n` real tokens; means over sequences
    of the `median`, of the largest |x| (`infinity_norm`) and of the `kurtosis`, Pearson's, 3 for a
    Gaussian, over the sequences whose values are not all equal, NaN if none is; the signed
    `largest`, with its `ratio`; the number of `massive` activations; and how many activations are
    more than `deviations` standard deviations from the mean of their layer, site and sequence
    (`beyond_sigma`), or 1.4826 MAD from its median (`beyond_robust`), with their shares of all.
    Where more than half of the values are equal, as behind a ReLU, the MAD is 0 and every other
    value is beyond.

    `features` of the result has the outlier features of what the projections read (`attn_in`, `z`,
    `mlp_in`): dimensions with |x| of `feature_magnitude` at least, at `feature_positions` of all
    real tokens of a layer at least, in `feature_layers` of the layers that have the site at least.
    See `interp.activations.features.outlier_features` for its columns.

    `summary` counts every massive activation of the residual stream, in all sequences and layers,
    with the dimensions, positions and tokens they are in, a position with its token where that is
    one and the same; `largest_elsewhere` is the largest of any other site, `features` the number
    of outlier features by site. One spike that stays over ten layers counts ten times. Massive is a
    matter of size alone: whether the model needs it only an intervention tells. A layer's largest
    values say nothing of its common ones, and with one token a sequence the median is of that one.

    Inputs are those of `analyze`: `tokens`, a `corpus`, or repeated random tokens. With
    `exclude_bos` BOS tokens are not looked at. Numbers are in float32 at least, moments in float64;
    memory is that of a forward pass, and fixed for any number of sequences.

    Raises: AnalysisError for an activation that is not finite, naming it, a site that is none or
    that the model has not, `top` below 1, a threshold that means nothing, or as `analyze`;
    ModelError for a model without hooks on the residual stream.

    Source: massive: Sun et al. 2024 (arXiv 2402.17762), section 2. Beyond six standard deviations,
    infinity norm, kurtosis: Bondarenko et al. 2023 (arXiv 2306.12929), sections 3 and 5. Features:
    Dettmers et al. 2022 (arXiv 2208.07339), section 4.
    """
    hooked = as_hooked(model)
    criteria = Criteria(
        top, magnitude, ratio, deviations, feature_magnitude, feature_layers, feature_positions
    )
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
    return outliers_in(hooked, inputs, seed=seed, sites=sites, criteria=criteria)


def outliers_in(
    model: HookedModel,
    inputs: Inputs,
    *,
    seed: int = 0,
    sites: Sequence[str] | None = None,
    criteria: Criteria | None = None,
) -> Activations:
    """`outliers` on inputs that are already made. Raises: as `outliers`."""
    criteria = criteria or Criteria()
    massive = Massive()
    kept = [Largest(site, criteria, massive) for site in every_site(model, sites)]
    first = 0
    device = torch.device(str(model.cfg.device))
    for whole in inputs.batches:
        for start, part in parts(model, whole):
            _pass(model, part.each(lambda tensor: tensor.to(device)), kept, first + start)
        first += len(whole.tokens)
    if not any(own.totals.sequences for own in kept):
        raise AnalysisError("there is no token to look at")
    text = token_text(model)
    gone = head_labels(model.cfg.pruned_heads)
    rows = {own.site: own.rows(text) for own in kept}
    reached = {own.site: own.reached for own in kept if own.reached is not None}
    features = outlier_features(reached, criteria)
    return Activations(
        table=pd.DataFrame([row for own in rows.values() for row in own]),
        score="magnitude",
        unit="activation",
        analysis="outliers",
        model=model.cfg.model_name,
        params={
            **inputs.params,
            **criteria.params,
            "sites": list(dict.fromkeys(own.site.kind for own in kept)),
            "numbering": NUMBERING,
            "median": "of |x| over the real tokens and dimensions of one layer, site and sequence",
            **({"pruned_heads": gone} if gone else {}),
        },
        inputs=inputs.description,
        seed=seed,
        summary={
            **_stream(kept, rows, massive, text),
            **_elsewhere(rows),
            "features": {
                kind: int((features["site"] == kind).sum())
                for kind in FEATURE_SITES
                if any(site.kind == kind for site in reached)
            },
        },
        sites=pd.DataFrame([own.record() for own in kept]),
        features=features,
    )


def _pass(model: HookedModel, batch: TokenBatch, kept: Sequence[Largest], first: int) -> None:
    """One forward pass, in which every site sees its activations; `first` is the first sequence."""
    looked = batch.real if batch.counted is None else batch.counted
    places = batch.real.long().cumsum(dim=1) - 1
    seen = [
        (row, wanted, places[row][wanted], batch.tokens[row][wanted])
        for row, wanted in enumerate(looked)
        if wanted.any()
    ]

    def looking(own: Largest) -> Callable[[Tensor], None]:
        def look(value: Tensor) -> None:
            for row, wanted, positions, tokens in seen:
                x = value[row] if len(positions) == value.shape[1] else value[row][wanted]
                own.see(x, positions, tokens, first + row)

        return look

    look_at_sites(model, batch, {own.site: looking(own) for own in kept})


def _stream(
    kept: Sequence[Largest],
    rows: Mapping[Site, Sequence[Mapping[str, object]]],
    massive: Massive,
    text: Callable[[int], str],
) -> dict[str, object]:
    """Figures of the residual stream; none where it is not among the sites."""
    stream = [own for own in kept if own.site.kind in RESIDUAL]
    if not stream:
        return {}
    most = max((row for own in stream for row in rows[own.site]), key=_magnitude)
    summary: dict[str, object] = {
        "massive": sum(own.number for own in stream),
        "massive_layers": [own.site.layer for own in stream if own.number],
        "largest": most["value"],
        "largest_ratio": most["ratio"],
        **{
            f"largest_{name}": most[name]
            for name in ("layer", "site", "sequence", "position", "token", "dimension")
        },
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


def _elsewhere(rows: Mapping[Site, Sequence[Mapping[str, object]]]) -> dict[str, object]:
    """The largest activation outside the residual stream, if another site is looked at."""
    others = [row for site, own in rows.items() if site.kind not in RESIDUAL for row in own]
    if not others:
        return {}
    most = max(others, key=_magnitude)
    names = ("layer", "site", "position", "token", "dimension", "value", "ratio")
    return {"largest_elsewhere": {name: most[name] for name in names}}


def _magnitude(row: Mapping[str, object]) -> float:
    return float(str(row["magnitude"]))


def _most(groups: Mapping[int, Group]) -> list[tuple[int, Group]]:
    order = sorted(groups.items(), key=lambda item: (-item[1].number, -abs(item[1].largest)))
    return order[:RECORDS]
