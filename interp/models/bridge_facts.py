"""What a bridged model is: its facts, from both libraries' configs, and its output weights."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.errors import ModelError
from interp.models.transformer import FlatConfig
from interp.models.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge
else:
    TransformerBridge = nn.Module


def bridge_facts(bridge: TransformerBridge) -> FlatConfig:
    """The bridge's config under our names; its device and dtype are those of its first weight.

    Raises: ModelError for what is no decoder or encoder of tokens.
    """
    cfg, whole = bridge.cfg, getattr(bridge.original_model, "config", None)
    _check_kind(bridge, whole)
    # Models of pictures and text keep the text's numbers apart.
    hf = whole.get_text_config() if whole is not None else None
    weight = next(bridge.original_model.parameters())
    bidirectional = cfg.attention_dir != "causal" or not bridge.adapter.supports_causal_loss
    bos = getattr(hf, "bos_token_id", None)
    return FlatConfig(
        model_name=cfg.model_name,
        n_layers=cfg.n_layers,
        n_heads=cfg.n_heads,
        n_key_value_heads=cfg.n_key_value_heads or cfg.n_heads,
        d_model=cfg.d_model,
        d_head=cfg.d_head,
        d_mlp=cfg.d_mlp,
        d_vocab=cfg.d_vocab,
        n_ctx=cfg.n_ctx,
        act_fn=cfg.act_fn,
        normalization_type=cfg.normalization_type,
        positional_embedding_type=cfg.positional_embedding_type,
        attention_dir="bidirectional" if bidirectional else "causal",
        window_size=_window(hf, cfg.window_size),
        attn_only=cfg.attn_only,
        gated_mlp=cfg.gated_mlp,
        eps=cfg.eps,
        rotary_base=_rotary_base(hf, cfg.rotary_base),
        tie_word_embeddings=bool(getattr(whole, "tie_word_embeddings", False)),
        bos_token_id=bos if isinstance(bos, int) and bos < cfg.d_vocab else None,
        device=str(weight.device),
        dtype=weight.dtype,
    )


def padding_position(original: nn.Module) -> int | None:
    """The position that stands for padding where a model derives positions from padding ids.

    Real tokens follow it. None for models whose positions start at 0.
    """
    for module in original.modules():
        if callable(getattr(module, "create_position_ids_from_input_ids", None)):
            return int(torch.as_tensor(module.padding_idx))
    return None


def check_vocabulary(vocabulary: Vocabulary | None, facts: FlatConfig) -> None:
    """Refuse a tokenizer of another model.

    Raises: ModelError where it has more tokens than the model.
    """
    if vocabulary is not None and len(vocabulary) > facts.d_vocab:
        raise ModelError(
            f"the tokenizer of {facts.model_name} has {len(vocabulary)} tokens, more than "
            f"d_vocab = {facts.d_vocab}"
        )


class BridgedAttention:
    """What is known of one layer's heads; weights are in TransformerLens's layout."""

    def __init__(self, attention: nn.Module, facts: FlatConfig, layer: int, window: int | None):
        self._attention = attention
        self._d_model = facts.d_model
        self.window = window
        """How many of the latest keys a query sees; None for all."""
        self.heads = facts.heads(layer)
        self.key_value_heads = facts.key_value_heads(layer)

    @property
    def W_O(self) -> Float[Tensor, "n_heads d_head d_model"]:
        """Output weights of each head."""
        return self._attention.W_O  # type: ignore[return-value]

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:
        """Output bias, which belongs to no head; zeros where there is none."""
        bias = self._attention.b_O
        return self.W_O.new_zeros(self._d_model) if bias is None else bias  # type: ignore[return-value]


class BridgedBlock:
    """One layer of a bridged model."""

    def __init__(self, block: nn.Module, layer: int, facts: FlatConfig, window: int | None):
        self._block = block
        self._layer = layer
        self._facts = facts
        self._window = window

    @property
    def attn(self) -> BridgedAttention:
        """Its attention.

        Raises: ModelError for a layer of another kind.
        """
        attention = dict(self._block.named_children()).get("attn")
        if attention is None:
            raise ModelError(f"layer {self._layer} has no attention")
        return BridgedAttention(attention, self._facts, self._layer, self._window)


def _check_kind(bridge: TransformerBridge, whole: object) -> None:
    name = bridge.cfg.model_name
    if getattr(whole, "is_encoder_decoder", False):
        raise ModelError(
            f"{name} is an encoder-decoder: two stacks with attention between them have no one "
            "blocks[L]; decoders and encoders can be bridged"
        )
    if getattr(bridge.cfg, "is_audio_model", False) or getattr(
        bridge.cfg, "is_visual_model", False
    ):
        raise ModelError(f"{name} reads no tokens: decoders and encoders of text can be bridged")
    if "blocks" not in dict(bridge.named_children()):
        raise ModelError(f"{name} has no single stack of blocks that TransformerLens knows")


def _window(hf: object, stated: int | None) -> int | None:
    """How many keys a query of a windowed layer sees; None where no layer has a window."""
    window = getattr(hf, "sliding_window", None)
    kinds = getattr(hf, "layer_types", None)
    if window is None:
        return stated
    return int(window) if kinds is None or "sliding_attention" in kinds else None


def layer_window(bridge: TransformerBridge, layer: int) -> int | None:
    """How many of the latest keys a query of this layer sees; None for all."""
    whole = getattr(bridge.original_model, "config", None)
    hf = whole.get_text_config() if whole is not None else None
    kinds = getattr(hf, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    return _window(hf, None)


def _rotary_base(hf: object, stated: int | float) -> float:
    """The base of the rotary angles; that of full attention where layers differ."""
    settings = getattr(hf, "rope_parameters", None)
    if isinstance(settings, Mapping) and isinstance(settings.get("full_attention"), Mapping):
        settings = settings["full_attention"]
    base = settings.get("rope_theta") if isinstance(settings, Mapping) else None
    return float(stated if base is None else base)
