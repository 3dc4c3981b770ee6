"""Composition of heads, from their weights: how much a later head reads what an earlier one writes.

One invariant: no matrix of d_model x d_model is ever formed; Frobenius norms are taken of products
as wide as a head.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from interp.errors import AnalysisError, ModelError
from interp.models.transformer import Transformer
from interp.tables import SetScores, head_label

KINDS = ("q", "k", "v")

DRAWS = 64
"""Pairs of random heads whose mean is the null; it varies so little that more would not tell."""

Weights = Float[Tensor, "n_heads d_model d_head"]


def composition(model: object, *, seed: int = 0) -> SetScores:
    """How much each later head reads from each earlier one, by their weights alone.

    With row vectors, W_QK = W_Q W_K^T and W_OV = W_V W_O, the scores of an earlier head a and a
    later one b are, in Frobenius norms,

        q: |W_OV^a W_QK^b| / (|W_OV^a| |W_QK^b|)
        k: |W_OV^a W_QK^b^T| / (|W_OV^a| |W_QK^b|)
        v: |W_OV^a W_OV^b| / (|W_OV^a| |W_OV^b|)

    between 0, where b reads nothing of what a writes, and 1. The table has one row a pair, with
    `layer_a`, `head_a`, `layer_b`, `head_b`, then `k_composition`, the score, `q_composition` and
    `v_composition`, each with its `_null`: the mean over pairs of heads whose four matrices are
    Gaussian, of the same shapes, drawn from `seed`; about d_model^-0.5. Heads of one model have one
    shape, so all pairs share it. NaN where a head's weights are all zero.

    It misleads where what is left out matters: the gains of the norms, unless they are folded
    into the weights first (`interp.fold_layer_norm`), what the norms divide by, rotary positions,
    biases, smeared keys, the MLPs and heads between the two, and whether the heads ever attend
    where it would count. Grouped query heads share the keys and values of their group.

    Raises: ModelError for anything but our own model, or one that normalises queries and keys,
    whose product is not of weights alone; AnalysisError where no head has an earlier one.

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", on composition.
    """
    if not isinstance(model, Transformer):
        raise ModelError(
            f"composition needs the native backend: the weights of a {type(model).__name__} stay "
            "in another library"
        )
    config = model.config
    if config.attention.kind == "latent":
        raise ModelError(
            f"{model.model_name} has latent attention: queries, keys and values go through norms "
            "of their own, and composition of weights alone is not defined"
        )
    if config.attention.qk_norm:
        raise ModelError(
            f"{model.model_name} normalises queries and keys (qk_norm): what a head attends to is "
            "no product of its weights, and Q- and K-composition are not defined"
        )
    layers = [_Layer(model, layer) for layer in range(config.n_layers)]
    rows: list[dict[str, object]] = []
    for later in layers:
        for earlier in layers[: later.number]:
            scores = _scores(earlier, later)
            for i, head_a in enumerate(earlier.heads):
                for j, head_b in enumerate(later.heads):
                    rows.append(
                        {
                            "layer_a": earlier.number,
                            "head_a": head_a,
                            "layer_b": later.number,
                            "head_b": head_b,
                            **{f"{kind}_composition": scores[kind][i, j] for kind in KINDS},
                        }
                    )
    if not rows:
        raise AnalysisError(f"{model.model_name} has no head with one in an earlier layer")
    null, spread = _null(config.d_model, config.d_head, seed)
    table = pd.DataFrame(rows).sort_values(
        ["layer_a", "head_a", "layer_b", "head_b"], ignore_index=True
    )
    columns = ["layer_a", "head_a", "layer_b", "head_b"]
    for kind in ("k", "q", "v"):
        table[f"{kind}_composition_null"] = null
        columns += [f"{kind}_composition", f"{kind}_composition_null"]
    table = table[columns]
    folded = all(bool(torch.all(layer.gain == 1)) for layer in layers)
    return SetScores(
        table=table,
        score="k_composition",
        unit="share of the norm",
        analysis="composition",
        model=model.model_name,
        params={
            "null": f"mean of {DRAWS} pairs of Gaussian heads of the same shape",
            "null_sd": spread,
            "norm_gains": "in the weights, or 1" if folded else "left out",
            **(
                {"positions": "left out (rotary)"}
                if config.positional_embedding_type == "rotary"
                else {}
            ),
        },
        inputs="weights alone, no tokens",
        seed=seed,
        summary=_summary(table, null),
    )


class _Layer:
    """The weights of one layer's heads in float64, each with its own keys and values."""

    def __init__(self, model: Transformer, number: int):
        blocks: Any = model.blocks  # a ModuleList says only Module
        attn = blocks[number].attn
        self.gain: Tensor = getattr(blocks[number].ln1, "w", torch.ones(1))
        group = model.config.attention.n_heads // model.config.n_key_value_heads
        shared = [attn.key_value_heads.index(head // group) for head in attn.heads]
        self.number: int = number
        self.heads: tuple[int, ...] = attn.heads
        q, k, v, o = (own.detach().double() for own in (attn.W_Q, attn.W_K, attn.W_V, attn.W_O))
        self.q, self.k, self.v = q, k[shared], v[shared]
        self.o = o.transpose(1, 2)  # n_heads d_model d_head, as the others
        self.squares = {name: _gram(own) for name, own in self._named().items()}
        self.ov = _norms(self.squares["v"], self.squares["o"])
        self.qk = _norms(self.squares["q"], self.squares["k"])

    def _named(self) -> dict[str, Weights]:
        return {"q": self.q, "k": self.k, "v": self.v, "o": self.o}


def _scores(earlier: _Layer, later: _Layer) -> Mapping[str, Float[np.ndarray, "earlier later"]]:
    """Of each head of two layers, by kind: what b reads with, and what it does with it."""
    sides = {
        "q": (later.q, later.squares["k"], later.qk),
        "k": (later.k, later.squares["q"], later.qk),
        "v": (later.v, later.squares["o"], later.ov),
    }
    found = {}
    for kind, (reads, beyond, norms) in sides.items():
        # |V M R^T|^2 is the trace of (V^T V) M (R^T R) M^T, M = O^T reads.
        between = torch.einsum("amd,bme->abde", earlier.o, reads)
        left = torch.einsum("acd,abde->abce", earlier.squares["v"], between)
        right = torch.einsum("abce,bef->abcf", between, beyond)
        squared = (left * right).sum(dim=(-2, -1)).clamp(min=0.0)
        found[kind] = (squared.sqrt() / (earlier.ov[:, None] * norms)).cpu().numpy()
    return found


def _gram(weights: Weights) -> Float[Tensor, "n_heads d_head d_head"]:
    return weights.transpose(1, 2) @ weights


def _norms(
    left: Float[Tensor, "n_heads d_head d_head"], right: Float[Tensor, "n_heads d_head d_head"]
) -> Float[Tensor, " n_heads"]:
    """The Frobenius norms of A B^T, from A^T A and B^T B."""
    return (left * right).sum(dim=(-2, -1)).clamp(min=0.0).sqrt()


def _null(d_model: int, d_head: int, seed: int) -> tuple[float, float]:
    """The mean score of Gaussian heads of this shape, and its standard deviation over draws.

    The same for the three kinds, which are all products of four such matrices.
    """
    rng = np.random.default_rng([seed, 11])
    scores = []
    for _ in range(DRAWS):
        v, o, reads, beyond = rng.standard_normal((4, d_model, d_head))
        between = o.T @ reads
        squared = np.sum((v.T @ v @ between) * (between @ (beyond.T @ beyond)))
        norms = [np.sum((a.T @ a) * (b.T @ b)) for a, b in ((v, o), (reads, beyond))]
        scores.append(np.sqrt(squared / (norms[0] * norms[1])))
    return float(np.mean(scores)), float(np.std(scores, ddof=1))


def _summary(table: pd.DataFrame, null: float) -> dict[str, object]:
    """The pair with the most of each kind, and the share of pairs above the null."""
    summary: dict[str, object] = {"pairs": len(table), "null": null}
    for kind in KINDS:
        own = table[f"{kind}_composition"]
        if not own.notna().any():
            continue
        best = table.loc[own.idxmax()]
        a, b = (head_label(int(best[f"layer_{e}"]), int(best[f"head_{e}"])) for e in "ab")
        summary |= {
            f"largest_{kind}": float(own.max()),
            f"largest_{kind}_pair": f"{a} then {b}",
            f"{kind}_above_null": float((own.dropna() > null).mean()),
        }
    return summary
