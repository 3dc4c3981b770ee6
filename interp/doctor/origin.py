"""Whether the model is what it was made from: the same weights, the same log-probs."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from interp.doctor.diagnosis import Measured, NotApplicable, listed
from interp.doctor.subject import Subject
from interp.errors import InterpError
from interp.models.hub import WEIGHTS, Source
from interp.models.loading import load_model
from interp.models.modes import looking_at
from interp.models.original import original_model
from interp.models.pretrained import save_pretrained
from interp.models.transformer import Transformer
from interp.models.watch import HookedModel
from interp.models.weights import read_tensors


def same_weights(subject: Subject) -> Measured:
    """Every parameter equals the one it was made from, bit for bit. Counts those that do not."""
    own, stated = subject.structure.weights(), _stated_weights(subject)
    different = [name for name, value in stated.items() if not _equal(own.get(name), value)]
    return Measured(float(len(different)), 0.0, listed(different))


def same_log_probs(subject: Subject) -> Measured:
    """The transformers library computes the same log-probs from the same weights."""
    original = subject.original
    with looking_at(original):
        tokens = subject.tokens.to(next(original.parameters()).device)
        theirs = original(input_ids=tokens).logits.cpu().double()
    ours = subject.logits.double()
    error = (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max()
    return Measured(float(error), subject.pass_rounding())


def original_of(model: HookedModel) -> nn.Module:
    """The source by transformers; of a run, or weights in memory, what they are written out as.

    Raises: NotApplicable where nothing else implements the model.
    """
    if model.source is not None and model.source.kind != "run":
        return original_model(model.source, model.cfg.dtype)
    if model.source is not None:
        return _written_out(load_model(model.source, dtype=_dtype_name(model)))
    if not isinstance(model, Transformer):
        raise NotApplicable("the model was given in memory, without its original")
    return _written_out(model)


def _written_out(model: Transformer) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_pretrained(model, Path(folder))
        except InterpError as error:
            raise NotApplicable(f"nothing else implements this model: {error}") from None
        exported = Source("huggingface", Path(folder), model.model_name)
        return original_model(exported, model.cfg.dtype)


def _stated_weights(subject: Subject) -> Mapping[str, Tensor]:
    model = subject.model
    if not subject.given:
        if model.source is None:
            raise NotApplicable("the model was given in memory: there is nothing to compare with")
        if model.source.kind == "run" and isinstance(model, Transformer):
            return read_tensors(model.source.path / WEIGHTS)
    return subject.structure.weights_of(subject.original)


def _dtype_name(model: HookedModel) -> str:
    return str(model.cfg.dtype).removeprefix("torch.")


def _equal(own: Tensor | None, stated: Tensor) -> bool:
    return own is not None and torch.equal(own.cpu(), stated.cpu().to(own.dtype))
