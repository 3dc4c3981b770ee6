"""What the models of a series are measured on, where no training run's config says it.

Repeated random tokens as in every analysis; with text, windows as wide as the in-context-learning
score of Olsson et al. needs, from the model's own tokenizer.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from interp.data.corpus import HELD_OUT, read_corpus, read_text
from interp.data.stream import TextStream
from interp.errors import AnalysisError, ConfigError, ModelError
from interp.inputs import random_inputs
from interp.models.vocabulary import Vocabulary
from interp.models.watch import HookedModel
from interp.training.probes import IclScore, SequenceProbe

Positions = tuple[int, int]

WIDTH = 512
"""Tokens in a window, where the context allows."""
EARLY, LATE = (40, 60), (490, 510)
"""Positions of the in-context-learning score in such a window: Olsson et al. 2022 take token 50
and token 500; the ten on either side make the score less noisy."""
LEAST_WIDTH = 8
"""Below it there are no early and late positions."""
SAMPLE = 2000
"""Characters whose encoding tells whether two checkpoints have one tokenizer."""


@dataclass(frozen=True)
class ProbeOptions:
    """What a caller chooses of the probe; None is the default."""

    text: Path | None = None
    corpus: str | None = None
    blocks: tuple[int, ...] | None = None
    batch: int = 8
    """Sequences of repeated tokens for each block length."""
    sequences: int = 64
    """Windows of text."""
    seed: int = 0
    icl_early: Positions | None = None
    icl_late: Positions | None = None

    def given(self) -> list[str]:
        """The flags that differ from their defaults."""
        default = ProbeOptions()
        flags = {"blocks": "--block", "icl_early": "--icl-early", "icl_late": "--icl-late"}
        return [
            flags.get(name, f"--{name}")
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(default, name)
        ]

    def facts(self) -> dict[str, object]:
        """What was asked for, beside the text."""
        return {
            "block": self.blocks,
            "batch": self.batch,
            "sequences": self.sequences,
            "seed": self.seed,
            "icl_early": self.icl_early,
            "icl_late": self.icl_late,
        }


class Texts:
    """The text of a probe, and its encoding by the tokenizer that came first."""

    def __init__(self, name: str, texts: Mapping[str, str], sha256: str):
        self.name = name
        self.texts = dict(texts)
        self.sha256 = sha256
        self._sample = "".join(self.texts.values())[:SAMPLE]
        self._encoded: list[int] | None = None

    def facts(self) -> dict[str, object]:
        """What identifies the text."""
        characters = sum(map(len, self.texts.values()))
        return {"name": self.name, "characters": characters, "sha256": self.sha256}

    def encode(self, model: HookedModel, ref: str) -> Int[np.ndarray, " tokens"]:
        """The ids of all the text, without BOS.

        Raises: ModelError for a model without a tokenizer.
        """
        vocabulary = model.vocabulary
        if vocabulary is None:
            raise ModelError(
                f"{ref} has no tokenizer: without one a series is measured without text"
            )
        self._encoded = self._encode_sample(vocabulary)
        encoded = vocabulary.encode(list(self.texts.values()), prepend_bos=False)
        return np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded])

    def refuse_another_vocabulary(self, model: HookedModel, ref: str) -> None:
        """Refuse a checkpoint whose tokenizer gives the text other ids; one without may go on."""
        vocabulary = model.vocabulary
        if vocabulary is not None and self._encode_sample(vocabulary) != self._encoded:
            raise ModelError(
                f"{ref} encodes the text otherwise than the first checkpoint: they are not of one "
                "series"
            )

    def _encode_sample(self, vocabulary: Vocabulary) -> list[int]:
        (ids,) = vocabulary.encode(self._sample, prepend_bos=False)
        return list(ids)


def read_texts(options: ProbeOptions) -> Texts | None:
    """The text that the options name, read before any model is; None where they name none.

    Of a corpus, the files that training runs hold out; of a file, all of it.

    Raises: ConfigError for a text that is missing, empty or not UTF-8, and for positions of the
    in-context-learning score without a text.
    """
    if options.text is not None and options.corpus is not None:
        raise ConfigError("--text and --corpus: one source of text at a time")
    if options.text is not None:
        text = read_text(options.text)
        return Texts(str(options.text), {options.text.name: text}, _sha256(text))
    if options.corpus is not None:
        corpus = read_corpus(options.corpus, HELD_OUT)
        return Texts(options.corpus, corpus.held_out, corpus.sha256)
    if options.icl_early is not None or options.icl_late is not None:
        raise ConfigError(
            "--icl-early and --icl-late say where in a text losses are compared: give --text or "
            "--corpus"
        )
    return None


def probe_for(
    model: HookedModel, options: ProbeOptions, texts: Texts | None
) -> tuple[SequenceProbe, dict[str, object]]:
    """The probe of a series that begins with this model, and what it measures on.

    Raises: AnalysisError for blocks, positions or a text that do not fit; ModelError for a model
    without next-token losses, or without a tokenizer where there is text.
    """
    if model.cfg.attention_dir != "causal":
        raise ModelError(
            f"{model.cfg.model_name} attends to later tokens too: it has no next-token loss, and "
            "no phase change to look for"
        )
    blocks = None if options.blocks is None else list(options.blocks)
    repeated = random_inputs(model, blocks, options.batch, options.seed)
    facts: dict[str, object] = {"repeated": repeated.description, **repeated.params}
    if texts is None:
        return SequenceProbe(repeated.batches), {**facts, "text": "none"}
    early, late, width = _positions(model.cfg.n_ctx, options)
    windows = _windows(model, texts, width, options.sequences)
    facts |= {
        "text": texts.facts(),
        "windows": f"{len(windows)} of {width} tokens",
        "icl_early": early,
        "icl_late": late,
        "source": "Olsson et al. 2022: loss at token 500 minus loss at token 50",
    }
    return SequenceProbe(repeated.batches, windows, IclScore(early, late)), facts


def _positions(n_ctx: int, options: ProbeOptions) -> tuple[Positions, Positions, int]:
    """Early and late positions, and how wide a window is: as published, else in proportion."""
    wide = max(
        WIDTH, *(last + 1 for _, last in (options.icl_early or EARLY, options.icl_late or LATE))
    )
    width = min(n_ctx, wide)
    if width < LEAST_WIDTH:
        raise AnalysisError(f"n_ctx = {n_ctx}: an in-context-learning score needs {LEAST_WIDTH}")

    def scaled(positions: Positions) -> Positions:
        first, last = (round(place * min(width, WIDTH) / WIDTH) for place in positions)
        return max(1, min(first, width - 1)), max(1, min(last, width - 1))

    early = options.icl_early or scaled(EARLY)
    late = options.icl_late or scaled(LATE)
    for flag, (first, last) in (("--icl-early", early), ("--icl-late", late)):
        if not 1 <= first <= last < width:
            raise AnalysisError(
                f"{flag} {first},{last} should lie within 1 and n_ctx - 1 = {width - 1}"
            )
    return early, late, width


def _windows(
    model: HookedModel, texts: Texts, width: int, n_windows: int
) -> Int[Tensor, "window pos"]:
    """Windows spread evenly over the text, each led by BOS where the model has one."""
    ids = texts.encode(model, model.cfg.model_name)
    bos = model.cfg.bos_token_id
    taken = width - (bos is not None)
    if len(ids) < taken:
        raise AnalysisError(f"{texts.name}: {len(ids)} tokens are fewer than one window of {taken}")
    windows = TextStream(ids, ids, taken, {}).held_out(n_windows)
    if bos is None:
        return windows
    return torch.cat([torch.full((len(windows), 1), bos), windows], dim=1)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
