"""What massive activations do: the loss and the sinks after each of several changes of them.

One invariant: every row says how many cells really changed. A change that changes none is no
evidence, whatever the model does.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from interp.activation_tables import OutlierEffects
from interp.activations.changes import Change, Tally, every_change
from interp.activations.largest import median_of
from interp.activations.mass import STRONG, Masses, counted_tokens, masses
from interp.activations.massive import MAGNITUDE, RATIO, MassiveCells, find_massive, parts
from interp.activations.sinks import cell_rows, check_linkable, number_of_tokens, token_records
from interp.activations.sites import residual_sites
from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError, ModelError
from interp.evidence import sequence_statistics
from interp.inputs import Inputs
from interp.measure import sequence_documents, token_text, without_pruned
from interp.models.watch import HookedModel, as_hooked
from interp.tables import head_labels
from interp.text_inputs import inputs_from

DRAWS = 3
"""How often what is random is drawn: a move to one dimension may cost five times as much as to
another."""

UNCHANGED = "none"
"""The name of the model as it is, among the changes."""

NOTHING = "no cells changed"

MEANINGS = {
    "zero": "0",
    "mean": "the mean of the massive cells with the same layer, dimension and token",
    "resample": "such a cell of another sequence",
    "median": "the median of the stream of its layer and sequence",
    "flip": "the value with the other sign",
    "move": "0, and the value added to a dimension of the same token that is massive nowhere",
    "random-direction": "0, and a vector as long along a random direction of the same token",
    "random-cells": "0 in as many cells at other tokens and dimensions, as a control",
}
"""What each change puts into the cells."""


def outlier_effects(
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
    magnitude: int | float = MAGNITUDE,
    ratio: int | float = RATIO,
    draws: int = DRAWS,
) -> OutlierEffects:
    """What changing the massive activations does to the loss and to every head's sink.

    Cells are found as `outliers` finds them, on the unchanged model: a layer of the residual
    stream, a token, a dimension. Each is changed at the input of every layer in which it is
    massive, n_layers being the stream after the last block, and there what the blocks have written
    into it since the last change: one change of sign is not undone by the next. The changes put
    into a cell

    - `zero`: 0;
    - `mean`: the mean of the massive cells with the same layer, dimension and token id, over all
      sequences; `resample`: such a cell of the next sequence that has one;
    - `median`: the median of the stream in its layer and sequence, which is near 0;
    - `flip`: the same with the other sign;
    - `move`: 0, while what arrives is added to another dimension of the same token, one that is
      massive nowhere, drawn anew each time;
    - `random-direction`: 0, while what a token's cells hold is carried along one random unit
      direction without the massive dimensions, a vector of equal norm;
    - `random-cells`: 0, in as many cells of the same layers and sequences at other tokens and
      dimensions: the control.

    The table has a row for each change and `draw`: `cells` set, over layers; `changed`, in how many
    of these something else stood before, by more than 1e-4 of it; `loss` in nats, a mean over
    sequences of each one's mean over its real next tokens; `loss_change`, against the unchanged
    model, with its standard error over the same sequences, clustered by document; `n` sequences;
    `outlier_mass`, the mean over heads of the attention that the found tokens draw, as in
    `outlier_sinks`; `sink_heads`, how many heads give the first token more than 0.3; and a `note`.
    `heads` has `sinks`, the analysis of that name, and `outlier_mass` for each change, draw and
    head; change "none" is the unchanged model.

    At position 0 after BOS the vector is the same in every sequence: "mean" and "resample" change
    nothing there, and say "no cells changed". That is no evidence that a cell does not matter.
    What a change costs is no proof of what the value does: a model may depend on the direction, on
    the length, or on what the final norm makes of the two; the changes of equal norm tell these
    apart. A change of a token that a model has never seen changed may cost for that alone.

    Raises: AnalysisError where nothing is massive, naming the largest activation, for thresholds
    below 0, `draws` below 1, sequences without a next token, a loss that is not finite before
    anything is changed, a model whose heads are all pruned, or as `outliers`; ModelError for an
    encoder, which has no next-token loss, or a model without hooks on the residual stream.

    Source: setting massive activations to zero or to their mean: Sun et al. 2024 (arXiv
    2402.17762), section 3; the other changes are controls of ours.
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
    return outlier_effects_in(
        hooked, inputs, seed=seed, magnitude=magnitude, ratio=ratio, draws=draws
    )


def outlier_effects_in(
    model: HookedModel,
    inputs: Inputs,
    *,
    seed: int = 0,
    magnitude: int | float = MAGNITUDE,
    ratio: int | float = RATIO,
    draws: int = DRAWS,
    progress: Callable[[int, int], None] | None = None,
) -> OutlierEffects:
    """`outlier_effects` on inputs that are already made; `progress` is told how many changes of
    how many are measured. Raises: as `outlier_effects`."""
    check_linkable(model, magnitude, ratio)
    if draws < 1:
        raise AnalysisError(f"draws = {draws}: at least one is needed")
    if model.cfg.attention_dir == "bidirectional":
        raise ModelError(
            f"{model.cfg.model_name} is an encoder, where every token sees the next one: it has no "
            "next-token loss"
        )
    batches = inputs.batches
    found = find_massive(model, batches, float(magnitude), float(ratio))
    documents = sequence_documents(batches)
    rows = pd.concat(cell_rows(batches, found), ignore_index=True)
    medians = [torch.zeros(len(cells)) for cells in found]
    clean = [
        [
            _pass(model, part, tokens, _median_hooks(model, part, cells, start, into))
            for start, part, tokens in _parts(model, batch, cells)
        ]
        for batch, cells, into in zip(batches, found, medians, strict=True)
    ]
    base = _joined([own for chunk in clean for own in chunk])
    if np.isinf(base.loss).any():
        raise AnalysisError("the loss of the unchanged model is not finite on these tokens")
    if np.isnan(base.loss).all():
        raise AnalysisError(f"{inputs.description} has no next token to predict")
    changes = every_change(model, batches, found, rows, medians, draws=draws, seed=seed)
    table, heads = [], [_head_rows(model, UNCHANGED, 0, base, documents)]
    for done, change in enumerate(changes):
        if progress is not None:
            progress(done, len(changes))
        tally = Tally()
        after = _joined(
            [
                _changed(model, change, number, start, part, tokens, known, tally)
                for number, (batch, cells) in enumerate(zip(batches, found, strict=True))
                for (start, part, tokens), known in zip(
                    _parts(model, batch, cells), clean[number], strict=True
                )
            ]
        )
        heads.append(_head_rows(model, change.name, change.draw, after, documents))
        table.append(_row(change, tally, base, after, heads[-1], documents))
    gone = head_labels(model.cfg.pruned_heads)
    return OutlierEffects(
        table=pd.DataFrame(table),
        heads=pd.concat(heads, ignore_index=True),
        score="loss_change",
        unit="nats",
        analysis="outlier-effects",
        model=model.cfg.model_name,
        params={
            **inputs.params,
            "magnitude": float(magnitude),
            "ratio": float(ratio),
            "draws": draws,
            "changes": MEANINGS,
            "strong": STRONG,
            **({"pruned_heads": gone} if gone else {}),
        },
        inputs=inputs.description,
        seed=seed,
        summary={
            "loss": _mean(base.loss, documents)[0],
            "cells": len(rows),
            "found": number_of_tokens(rows),
            "sequences": int(rows["sequence"].nunique()),
            "dimensions": sorted({int(d) for d in rows["dimension"]}),
            "layers": sorted({int(layer) for layer in rows["layer"]}),
            "outlier_mass": float(heads[0]["outlier_mass"].mean()),
            "sink_heads": _strong(heads[0]),
            "heads": len(heads[0]),
            "tokens": token_records(rows, token_text(model)),
        },
    )


class _Measured:
    """The loss of each sequence, and what its tokens draw from each layer and head.

    A loss is NaN where there is no next token, and infinite where it is not finite.
    """

    def __init__(self, loss: Float[np.ndarray, " sequence"], mass: Masses):
        self.loss = loss
        self.mass = mass


def _parts(
    model: HookedModel, batch: TokenBatch, cells: MassiveCells
) -> list[tuple[int, TokenBatch, Tensor]]:
    """The batch as it goes through the model: the first sequence, the part, its found tokens."""
    device = torch.device(str(model.cfg.device))
    tokens = cells.tokens(batch.tokens.shape)
    return [
        (
            first,
            part.each(lambda tensor: tensor.to(device)),
            tokens[first : first + len(part.tokens)].to(device),
        )
        for first, part in parts(model, batch)
    ]


def _pass(
    model: HookedModel,
    part: TokenBatch,
    tokens: Tensor,
    hooks: Sequence[tuple[str, Callable]],
) -> _Measured:
    mass, losses = masses(model, part, tokens, fwd_hooks=hooks, losses=True)
    assert losses is not None  # they were asked for
    counted = counted_tokens(part)
    predicted = counted[:, :-1] & counted[:, 1:]
    number = predicted.sum(dim=1).double()
    total = losses.double().where(predicted, 0.0).sum(dim=1)
    total = total.where(total.isfinite(), float("inf"))
    return _Measured((total / number.where(number > 0, float("nan"))).cpu().numpy(), mass)


def _changed(
    model: HookedModel,
    change: Change,
    number: int,
    start: int,
    part: TokenBatch,
    tokens: Tensor,
    known: _Measured,
    tally: Tally,
) -> _Measured:
    """A changed pass; sequences without a cell are as they were."""
    hooks = change.hooks(model, number, start, len(part.tokens), tally)
    return _pass(model, part, tokens, hooks) if hooks else known


def _median_hooks(
    model: HookedModel,
    part: TokenBatch,
    cells: MassiveCells,
    start: int,
    into: Float[Tensor, " cell"],
) -> list[tuple[str, Callable]]:
    """Hooks that put the median of each cell's layer and sequence away."""
    counted = counted_tokens(part)

    def see(x: Tensor, hook: object = None, *, layer: int) -> None:
        for row, wanted in enumerate(counted):
            own = (cells.layer == layer) & (cells.row == start + row)
            if own.any():
                values = x[row, wanted].to(torch.promote_types(x.dtype, torch.float32))
                into[own] = median_of(values.flatten())

    sites = residual_sites(model)
    layers = cells.layer.unique().tolist()
    return [(sites[layer].hook, partial(see, layer=layer)) for layer in layers]


def _joined(measured: Sequence[_Measured]) -> _Measured:
    names = measured[0].mass
    return _Measured(
        np.concatenate([own.loss for own in measured]),
        {name: np.concatenate([own.mass[name] for own in measured], axis=1) for name in names},
    )


def _head_rows(
    model: HookedModel, name: str, draw: int, measured: _Measured, documents: np.ndarray
) -> pd.DataFrame:
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    layer, head = np.meshgrid(np.arange(n_layers), np.arange(n_heads), indexing="ij")
    table = pd.DataFrame(
        {
            "change": name,
            "draw": draw,
            "layer": layer.ravel(),
            "head": head.ravel(),
            "sinks": sequence_statistics(measured.mass["sinks"], documents)[0].ravel(),
            "outlier_mass": sequence_statistics(measured.mass["on_found"], documents)[0].ravel(),
        }
    )
    return without_pruned(model, table)


def _row(
    change: Change,
    tally: Tally,
    base: _Measured,
    after: _Measured,
    heads: pd.DataFrame,
    documents: np.ndarray,
) -> dict[str, object]:
    loss = np.where(np.isfinite(after.loss), after.loss, np.nan)
    mean, error, n = _mean(loss - base.loss, documents)
    lost = int((~np.isfinite(after.loss) & ~np.isnan(base.loss)).sum())
    notes = [
        "" if tally.changed else NOTHING,
        change.note,
        f"the loss of {lost} sequences is not finite, and they are left out" if lost else "",
    ]
    return {
        "change": change.name,
        "draw": change.draw,
        "cells": tally.cells,
        "changed": tally.changed,
        "loss": _mean(loss, documents)[0],
        "loss_change": mean,
        "loss_change_se": error,
        "n": n,
        "outlier_mass": float(heads["outlier_mass"].mean()),
        "sink_heads": _strong(heads),
        "note": "; ".join(filter(None, notes)),
    }


def _mean(
    values: Float[np.ndarray, " sequence"], documents: np.ndarray
) -> tuple[float, float, int]:
    mean, error, n = sequence_statistics(values[None, :, None], documents)
    return float(mean.item()), float(error.item()), int(n.item())


def _strong(heads: pd.DataFrame) -> int:
    return int((heads["sinks"] > STRONG).sum())
