"""Every head on one text: what it attends to, how far that is from even, and its scores there."""

from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from interp import registry
from interp.errors import AnalysisError
from interp.inputs import Inputs, token_inputs
from interp.measure import score_together
from interp.models.layer_attention import LayerAttention
from interp.models.vocabulary import is_text
from interp.models.watch import HookedModel, as_hooked, layer_window, watch_attention
from interp.patterns import Patterns
from interp.tables import HeadScores, head_label, head_labels, head_words, parse_heads, versions

CELLS = 40 * 2**20
"""Weights kept in all: 160 heads on 512 tokens. A file of so many has some 20 MB."""

SCORE = "from_uniform"


def attend(
    model: object,
    text: object,
    *,
    heads: str | Sequence[str] | None = None,
    index: int | None = None,
    attention_mask: Tensor | None = None,
    prepend_bos: bool | None = None,
    seed: int = 0,
) -> Patterns:
    """What every head attends to on one text, with the scores of every head there.

    `text` is text, where the model has a vocabulary, or ids `[pos]` or `[batch, pos]`, of which
    `index` chooses a row; padding is left out. `heads`, such as "5.1, 7.*", are those whose
    pattern is kept; without it all heads, or the furthest from uniform as far as `CELLS` reach.

    The score is `from_uniform`, the mean of 1 - entropy / ln(number of keys) over the queries that
    see two keys at least: 0 is even attention, 1 is all of it on one key. Beside it stand the
    scores of all analyses that the text allows, with their nulls; `params["refused"]` says why the
    others are not there. They are those of one sequence: without standard errors, and no evidence
    of what a head does elsewhere. `seed` draws the tokens of the nulls.

    Raises: AnalysisError for several sequences without an `index`, or a text too long for a
    picture; ShapeError for a head that the model does not have, or tokens that do not fit it;
    ModelError for text without a vocabulary.
    """
    model = as_hooked(model)
    inputs, index = _one_sequence(model, text, index, attention_mask, prepend_bos)
    tokens = inputs.batches[0].tokens[0]
    n_pos = len(tokens)
    if n_pos**2 > CELLS:
        raise AnalysisError(
            f"{n_pos} tokens: the picture of one head would have {n_pos**2:,} cells; at most "
            f"{int(CELLS**0.5):,} tokens fit"
        )
    there = [(a, b) for a in range(model.cfg.n_layers) for b in model.cfg.heads(a)]
    wanted = _wanted(model, heads, there)

    refused: dict[str, str] = {}
    analyses = [registry.get(name) for name in registry.names()]
    scores = score_together(model, analyses, inputs, seed=seed, refused=refused)
    table = _table(there, scores)

    distance = dict(zip(there, table[SCORE], strict=True))
    ordered = sorted(wanted, key=lambda one: (-np.nan_to_num(distance[one], nan=-1.0), one))
    weights = _weights(model, inputs, ordered[: CELLS // n_pos**2])
    left_out = [head_label(*one) for one in there if one not in weights]
    known = table[SCORE].notna().any()
    best = table.loc[table[SCORE].idxmax()] if known else None
    summary: dict[str, object] = {"patterns": len(weights), "heads": len(there)}
    if best is not None:
        summary |= {
            "best": float(best[SCORE]),
            "best_head": head_label(int(best["layer"]), int(best["head"])),
        }
    gone = head_labels(model.cfg.pruned_heads)
    windows = [layer_window(model, layer) for layer in range(model.cfg.n_layers)]
    vocabulary = model.vocabulary
    ids = tokens.tolist()
    return Patterns(
        table=table,
        score=SCORE,
        unit="1 − entropy / ln(keys)",
        analysis="attention",
        model=model.cfg.model_name,
        params={
            "ids": ids,
            **({} if index is None else {"index": index}),
            "causal": model.cfg.attention_dir == "causal",
            **({"windows": windows} if any(windows) else {}),
            "left_out": left_out,
            **({"pruned_heads": gone} if gone else {}),
            **({"refused": refused} if refused else {}),
        },
        inputs=inputs.description,
        seed=seed,
        summary=summary,
        versions=versions(),
        tokens=tuple(map(str, ids) if vocabulary is None else vocabulary.token_texts(ids)),
        weights=weights,
    )


def _one_sequence(
    model: HookedModel,
    text: object,
    index: int | None,
    attention_mask: Tensor | None,
    prepend_bos: bool | None,
) -> tuple[Inputs, int | None]:
    """One sequence without its padding, and which row it was, where that was a choice."""
    (given,) = token_inputs(model, text, attention_mask, prepend_bos).batches
    n_rows = len(given.tokens)
    if index is None and n_rows > 1:
        raise AnalysisError(
            f"{n_rows} sequences were given, and one is looked at: index (--index) chooses among 0 "
            f"to {n_rows - 1}"
        )
    if index is not None and not 0 <= index < n_rows:
        there = (
            "there is one sequence, 0"
            if n_rows == 1
            else f"the {n_rows} sequences are 0 to {n_rows - 1}"
        )
        raise AnalysisError(f"index = {index}: {there}")
    row = index or 0
    ids = given.tokens[row][given.real[row]]
    if not len(ids):
        raise AnalysisError(f"sequence {row} has no real token")
    what = "a text" if is_text(text) else "given ids"
    description = f"{what} of {len(ids)} token{'' if len(ids) == 1 else 's'}"
    if n_rows > 1:
        description += f", sequence {row} of {n_rows}"
    inputs = token_inputs(model, ids[None])
    return Inputs(inputs.batches, inputs.unrepeated, description, {}), index


def _wanted(
    model: HookedModel, heads: str | Sequence[str] | None, there: Collection[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The heads whose pattern is asked for; of a whole layer those that are there.

    Raises: ShapeError for a head that the model does not have; AnalysisError for a pruned one.
    """
    if heads is None:
        return list(there)
    parsed = parse_heads(heads, model.cfg.n_layers, model.cfg.n_heads)
    single = {one for one in head_words(heads) if one[1] is not None}
    for layer, head in parsed:
        if (layer, head) in single and (layer, head) not in there:
            raise AnalysisError(f"head {head_label(layer, head)} is pruned from this model")
    chosen = [one for one in parsed if one in there]
    if not chosen:
        raise AnalysisError("all heads of the layers that were named are pruned from this model")
    return chosen


def _table(there: Sequence[tuple[int, int]], scores: Sequence[HeadScores]) -> pd.DataFrame:
    """A row for each head: how far from uniform, then each analysis's score and null."""
    table = pd.DataFrame(there, columns=["layer", "head"])
    columns: dict[str, np.ndarray] = {}
    from_uniform = np.full(len(there), np.nan)
    for one in scores:
        own = one.table.set_index(["layer", "head"]).reindex(there)
        if one.analysis == "entropy":
            from_uniform = 1.0 - own["relative"].to_numpy(dtype=float)
        for column in (one.score, f"{one.score}_null"):
            columns[column] = own[column].to_numpy(dtype=float)
    return table.assign(**{SCORE: from_uniform, "n": 1, **columns})


def _weights(
    model: HookedModel, inputs: Inputs, kept: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], Float[np.ndarray, "query key"]]:
    """The patterns of some heads, in their order; one that is not finite is left out."""
    (batch,) = inputs.batches
    n_pos = batch.tokens.shape[1]

    def whole(attention: LayerAttention) -> dict[int, Tensor]:
        own = {head: place for place, head in enumerate(model.cfg.heads(attention.layer))}
        chosen = [head for layer, head in kept if layer == attention.layer]
        if not chosen:
            return {}
        index = torch.tensor([own[head] for head in chosen], device=attention.key_mask.device)
        patterns = torch.zeros(len(chosen), n_pos, n_pos)
        for rows, keys, weights in attention.rows():
            patterns[:, rows, keys] = weights[0].index_select(0, index).float().cpu()
        return dict(zip(chosen, patterns, strict=True))

    layers = watch_attention(model, batch.tokens, whole, batch.key_mask)
    found = {(layer, head): layers[layer][head].numpy() for layer, head in kept}
    return {head: pattern for head, pattern in found.items() if np.isfinite(pattern).all()}
