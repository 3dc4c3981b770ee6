"""Any decoder or encoder of `transformers`, behind the same members as our `Transformer`.

TransformerLens's `TransformerBridge` puts the hooks in; this module keeps it exact: token ids go in
as they are given, neither a tokenizer nor the Hub is needed, and a model given in memory stays as
it was, bit for bit.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.errors import ModelError, ShapeError
from interp.models.bridge_facts import (
    BridgedBlock,
    bridge_facts,
    check_vocabulary,
    layer_window,
    padding_position,
)
from interp.models.bridge_hooks import N_POS, Hook, detach, honest_hooks, shown
from interp.models.hooks import HookName, NamesFilter, kept_copy, matching_hooks
from interp.models.hub import Source
from interp.models.inputs import ReadsTokens, checked_key_mask
from interp.models.losses import mean_loss, next_token_losses
from interp.models.modes import looking_at
from interp.models.transformer import (
    ActivationCache,
    FlatConfig,
    HookPoint,
    ReturnType,
    Slice,
)
from interp.models.vocabulary import Vocabulary, is_text

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge
else:
    TransformerBridge = nn.Module


class BridgedModel(ReadsTokens):
    """A `TransformerBridge`, which stays reachable as `.bridge`, with the members of our models.

    `hook_dict` holds both kinds of names, TransformerLens's own (`blocks.0.attn.o.hook_in`) and the
    familiar ones (`blocks.0.attn.hook_z`), and only those that fire and hold what they say. On
    blocks with a norm after attention, `hook_attn_out` is what is added to the residual stream;
    `attn.hook_out` comes before that norm, and is what `hook_result` and `b_O` sum to. An encoder
    whose norm follows the sum has `hook_resid_mid = hook_resid_pre + hook_attn_out` before it.

    Padding positions hold whatever transformers computes there; real tokens never see them.
    """

    def __init__(
        self,
        bridge: TransformerBridge,
        *,
        vocabulary: Vocabulary | None = None,
        source: Source | None = None,
    ):
        self.bridge = bridge
        self.vocabulary = vocabulary
        self.source = source
        self._facts = bridge_facts(bridge)
        check_vocabulary(vocabulary, self._facts)
        self._hooks = honest_hooks(bridge, self._try)
        self.blocks = [
            BridgedBlock(block, layer, self._facts, layer_window(bridge, layer))
            for layer, block in enumerate(bridge.blocks)
        ]

    @property
    def cfg(self) -> FlatConfig:
        """The model's facts, flat and under TransformerLens's names."""
        weight = next(self.bridge.original_model.parameters())
        return replace(self._facts, device=str(weight.device), dtype=weight.dtype)

    @property
    def model_name(self) -> str:
        """What results call the model."""
        return self._facts.model_name

    @property
    def hook_dict(self) -> Mapping[str, HookPoint]:
        """Every hook by name; several names may mean one point."""
        return self._hooks.points

    def modules(self) -> Iterator[nn.Module]:
        """Every part that has a mode: the hooks' and those of transformers."""
        seen: set[int] = set()
        for whole in (self.bridge, self.bridge.original_model):
            for part in whole.modules():
                if id(part) not in seen:
                    seen.add(id(part))
                    yield part

    def to(self, device: str | torch.device) -> "BridgedModel":
        """The same model, moved to a device."""
        self.bridge.to(device, print_details=False)
        return self

    # --- running --------------------------------------------------------------------------------

    def __call__(
        self,
        tokens: object,
        *,
        attention_mask: object = None,
        return_type: ReturnType = "logits",
        loss_per_token: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """Logits `[batch, pos, d_vocab]`, the next-token loss in nats, both, or None.

        `tokens` are ids `[batch, pos]` or `[pos]`, or text where the model has a vocabulary:
        several texts are padded, and their padding masked, as `tokenize` does. In `attention_mask`
        `[batch, pos]` 1 marks a real token; left padding corrects positions. The loss is a mean
        over real next tokens; with `loss_per_token` it is `[batch, pos - 1]`, where element p
        belongs to the prediction of token p + 1 and padding holds 0.

        Raises: ModelError for a next-token loss of an encoder, or text without a vocabulary;
        ShapeError for a sequence longer than `n_ctx`, ids outside the vocabulary, or a mask of
        another shape.
        """
        return self.run_with_hooks(
            tokens,
            attention_mask=attention_mask,
            return_type=return_type,
            loss_per_token=loss_per_token,
        )

    def run_with_hooks(
        self,
        tokens: object,
        *,
        fwd_hooks: Sequence[tuple[HookName, Callable]] = (),
        attention_mask: object = None,
        return_type: ReturnType = "logits",
        loss_per_token: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """A pass with temporary hooks, as `model(...)` returns it; none of them outlives the call.

        A hook is called as `hook(value, hook=point)`, where `point.name` is the name that was
        asked for; what it returns takes the value's place.

        Raises: as `model(...)`; ModelError for a name that is no hook, with near ones or the reason
        why it is withheld, and for an edit that transformers would not see.
        """
        named = [(name, hook) for wanted, hook in fwd_hooks for name in self._chosen(wanted)]
        if is_text(tokens):
            tokens, own = self.tokenize(tokens)
            attention_mask = own if attention_mask is None else attention_mask
        ids = self.to_tokens(tokens)
        key_mask = self._check(ids, attention_mask, return_type)
        with self._hooked(named, key_mask):
            logits = self._logits(ids, key_mask, unread=return_type is None)
        if return_type is None:
            return None
        if return_type == "logits":
            return logits
        losses = next_token_losses(logits, ids, key_mask)
        loss = losses if loss_per_token else mean_loss(losses, key_mask)
        return loss if return_type == "loss" else (logits, loss)

    def run_with_cache(
        self,
        tokens: object,
        *,
        names_filter: NamesFilter = None,
        device: str | torch.device | None = None,
        remove_batch_dim: bool = False,
        pos_slice: object = None,
        attention_mask: object = None,
        return_type: ReturnType = "logits",
        loss_per_token: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor] | None, ActivationCache]:
        """The model's output, and copies of its activations in an `ActivationCache`.

        Without `names_filter` everything is kept under every name it has, except `hook_result`,
        which is d_model wide for every head. `pos_slice` slices positions (queries, for scores and
        patterns) on every hook.

        Raises: as `run_with_hooks`; ShapeError for `remove_batch_dim` on a batch of several.
        """
        if names_filter is None:
            names = [name for name in self.hook_dict if not name.endswith("hook_result")]
        else:
            names = matching_hooks(names_filter, self.hook_dict, self._hooks.withheld)
        keep = Slice.unwrap(pos_slice)
        stored: dict[str, Tensor] = {}

        def hook_for(point: HookPoint, aliases: list[str]) -> Hook:
            square = aliases[0].endswith(("hook_attn_scores", "hook_pattern"))
            pos_dim = point.pos_dim or (2 if square else 1)

            def store(value: Tensor, hook: object) -> None:
                kept = kept_copy(
                    value,
                    pos_dim=pos_dim,
                    keep=keep,
                    device=device,
                    remove_batch_dim=remove_batch_dim,
                )
                stored.update(dict.fromkeys(aliases, kept))

            return store

        aliases: dict[int, list[str]] = {}
        for name in names:
            aliases.setdefault(id(self.hook_dict[name]), []).append(name)
        out = self.run_with_hooks(
            tokens,
            fwd_hooks=[
                (same[0], hook_for(self.hook_dict[same[0]], same)) for same in aliases.values()
            ],
            attention_mask=attention_mask,
            return_type=return_type,
            loss_per_token=loss_per_token,
        )
        return out, ActivationCache(stored, self.bridge, has_batch_dim=not remove_batch_dim)

    def _check(
        self, ids: Int[Tensor, "batch pos"], attention_mask: object, return_type: ReturnType
    ) -> Bool[Tensor, "batch pos"] | None:
        if return_type not in ("logits", "loss", "both", None):
            raise ModelError(
                f"return_type = {return_type!r}: one of 'logits', 'loss', 'both', None"
            )
        if return_type in ("loss", "both") and self._facts.attention_dir == "bidirectional":
            raise ModelError(
                f"{self.model_name} is an encoder, where every token sees the next one: it has no "
                "next-token loss"
            )
        if ids.shape[1] > self._facts.n_ctx:
            raise ShapeError(f"sequence {ids.shape[1]} > n_ctx {self._facts.n_ctx}")
        return checked_key_mask(attention_mask, ids.shape, ids.device)

    def _logits(
        self,
        ids: Int[Tensor, "batch pos"],
        key_mask: Bool[Tensor, "batch pos"] | None,
        *,
        unread: bool,
    ) -> Float[Tensor, "batch scored d_vocab"]:
        """Logits of every position; where they are `unread`, perhaps of the last one only."""
        given: dict[str, object] = {}
        if key_mask is not None:
            given["attention_mask"] = key_mask.long()
            if self._padding_position is not None:
                # By itself the model would read them off ids that look like padding.
                after = self._padding_position + key_mask.long().cumsum(dim=1)
                given["position_ids"] = torch.where(key_mask, after, self._padding_position)
        if "use_cache" in self._parameters:
            given["use_cache"] = False
        if unread and "logits_to_keep" in self._parameters and not self._unembed_is_watched():
            given["logits_to_keep"] = 1  # the unembedding is the dearest product
        return self.bridge(ids, return_type="logits", **given)

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.bridge.original_model.forward).parameters)

    @cached_property
    def _padding_position(self) -> int | None:
        return padding_position(self.bridge.original_model)

    def _unembed_is_watched(self) -> bool:
        return any(
            point.has_hooks()
            for name, point in self.hook_dict.items()
            if name.startswith("unembed.")
        )

    def _try(self) -> None:
        """One pass over the first tokens of the vocabulary."""
        ids = torch.arange(N_POS, device=self.cfg.device)[None] % self._facts.d_vocab
        with looking_at(self):
            logits = self._logits(ids, None, unread=False)
        expected = (1, N_POS, self._facts.d_vocab)
        if not isinstance(logits, Tensor) or logits.shape != expected:
            given = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ModelError(f"{self.model_name} gives {given}, not logits {list(expected)}")

    # --- hooks ----------------------------------------------------------------------------------

    def _chosen(self, wanted: HookName) -> list[str]:
        names = matching_hooks(wanted, self.hook_dict, self._hooks.withheld)
        # A predicate may choose one point by several of its names; it is still called once.
        return list({id(self.hook_dict[name]): name for name in reversed(names)}.values())

    @contextmanager
    def _hooked(
        self,
        named: Sequence[tuple[str, Hook]],
        key_mask: Bool[Tensor, "batch pos"] | None,
    ) -> Iterator[None]:
        masked = torch.finfo(self.cfg.dtype).min
        before = self.bridge.cfg.use_attn_result
        results = any(name.endswith("hook_result") for name, _ in named)
        attached: list[tuple[HookPoint, object]] = []
        try:
            if results and not before:
                self.bridge.set_use_attn_result(True)
            for name, hook in named:
                point = self.hook_dict[name]
                if before or results:
                    point = self._hooks.summed.get(id(point), point)
                read_only = name in self._hooks.read_only
                call = shown(name, hook, read_only=read_only, masked=masked, key_mask=key_mask)
                attached.append((point, point.add_hook(call, alias_names=[name])))
            yield
        finally:
            for point, handle in reversed(attached):
                detach(point, handle)
            if results and not before:
                self.bridge.set_use_attn_result(False)
