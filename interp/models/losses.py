"""Next-token losses in nats, where padding counts for nothing."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def next_token_losses(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    key_mask: Bool[Tensor, "batch pos"] | None = None,
) -> Float[Tensor, "batch pos-1"]:
    """Cross-entropy in nats of each next token: element p is the prediction of token p + 1.

    0 where either token is padding. Computed in float32 at least.
    """
    # The last position predicts nothing; giving it a dummy target spares a copy of the logits.
    targets = torch.cat((tokens[:, 1:], tokens[:, :1]), dim=1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none")
    losses = losses.unflatten(0, tokens.shape)[:, :-1]
    if key_mask is None:
        return losses
    return losses.masked_fill(~(key_mask[:, :-1] & key_mask[:, 1:]), 0.0)


def mean_loss(
    losses: Float[Tensor, "batch targets"], key_mask: Bool[Tensor, "batch pos"] | None = None
) -> Float[Tensor, ""]:
    """The mean over real next tokens, in nats; NaN where there is none."""
    if key_mask is None:
        return losses.mean()
    return losses.sum() / (key_mask[:, :-1] & key_mask[:, 1:]).sum()
