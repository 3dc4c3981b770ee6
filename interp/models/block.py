"""One layer of the model: attention and an MLP around the residual stream."""

from jaxtyping import Bool, Float
from torch import Tensor, nn

from interp.config import ModelConfig
from interp.models.heads import GroupedAttention
from interp.models.kv_cache import Past
from interp.models.latent import LatentAttention
from interp.models.layers import MLP, Rotation, hook_point, norm


class Block(nn.Module):
    """One layer: attention and, unless the model is attention-only, an MLP; norms come first."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.ln1 = norm(config.normalization_type, config.d_model, config.eps)
        latent = config.attention.kind == "latent"
        self.attn = (LatentAttention if latent else GroupedAttention)(config, layer)
        self.hook_resid_pre = hook_point()
        self.hook_attn_out = hook_point()
        self.hook_resid_post = hook_point()
        self.mlp = None if config.mlp is None else MLP(config.d_model, config.mlp)
        if config.mlp is not None:
            self.ln2 = norm(config.normalization_type, config.d_model, config.eps)
            self.hook_resid_mid = hook_point()
            self.hook_mlp_out = hook_point()

    def forward(
        self,
        resid: Float[Tensor, "batch pos d_model"],
        *,
        rotation: Rotation | None,
        shortformer: Float[Tensor, "#batch pos d_model"] | None,
        key_mask: Bool[Tensor, "batch pos"] | None,
        last: int | None = None,
        past: Past | None = None,
    ) -> Float[Tensor, "batch kept d_model"]:
        """The residual stream after this layer, of the `last` positions only where that is given.

        Those attend to all positions all the same.
        """
        resid = self.hook_resid_pre(resid)
        attn_out = self.attn(
            self.ln1(resid),
            rotation=rotation,
            shortformer=shortformer,
            key_mask=key_mask,
            last=last,
            past=past,
        )
        resid = resid[:, -attn_out.shape[1] :] + self.hook_attn_out(self.dropout(attn_out))
        return self.after_attention(resid)

    def after_attention(
        self, resid: Float[Tensor, "batch kept d_model"]
    ) -> Float[Tensor, "batch kept d_model"]:
        """The residual stream after this layer, from the one that attention has been added to."""
        if self.mlp is not None:
            resid = self.hook_resid_mid(resid)
            resid = resid + self.hook_mlp_out(self.dropout(self.mlp(self.ln2(resid))))
        return self.hook_resid_post(resid)
