"""A model as `transformers` itself computes it: what a bridge wraps and every other is held to."""

import io
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stderr

import torch
from torch import nn

from interp.errors import ModelError
from interp.models.hub import Source

# Weights of heads that BERT was trained with and masked-language models leave out.
_OTHER_HEADS = ("pooler.", "seq_relationship.")


def original_model(source: Source, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model at `source` by `transformers`: eager attention, in eval mode, from local files.

    An encoder comes with its masked-language-model head, everything else with its causal one.

    Raises: ModelError where `transformers` cannot load it, or the checkpoint leaves weights out or
    holds more than the model has.
    """
    if source.kind == "run":
        raise ModelError(
            f"{source.name} is a run of this toolkit, which transformers does not know; use the "
            "native backend"
        )
    import transformers

    folder, where = source.path, {}
    if source.kind == "gguf":
        folder, where = source.path.parent, {"gguf_file": source.path.name}
    local = {"local_files_only": True, "trust_remote_code": False, **where}
    try:
        with _quiet():
            config = transformers.AutoConfig.from_pretrained(str(folder), **local)
            kind = (
                transformers.AutoModelForMaskedLM
                if _is_encoder(config.architectures or ())
                else transformers.AutoModelForCausalLM
            )
            model, report = kind.from_pretrained(
                str(folder),
                dtype=dtype,
                attn_implementation="eager",
                output_loading_info=True,
                **local,
            )
    except Exception as error:  # it raises whatever its readers, parsers and quantizers raise
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{source.name}: transformers cannot load it: {reason}") from error
    _check_complete(report["missing_keys"], "lacks", source)
    more = [name for name in report["unexpected_keys"] if not _of_another_head(name)]
    _check_complete(more, f"holds, beside the weights of a {type(model).__name__},", source)
    return model.eval()


def _is_encoder(architectures: Collection[str]) -> bool:
    return any(name.endswith(("ForMaskedLM", "ForPreTraining")) for name in architectures)


def _of_another_head(name: str) -> bool:
    return any(f".{head}" in f".{name}" for head in _OTHER_HEADS)


def _check_complete(names: Collection[str], what: str, source: Source) -> None:
    if names:
        shown = ", ".join(sorted(names)[:3])
        rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ModelError(f"{source.path} {what} {shown}{rest}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither bars nor reports on standard error; faults are raised."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
