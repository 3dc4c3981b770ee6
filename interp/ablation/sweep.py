"""A sweep: a model, its sequences, how heads are taken away, and what is read.

Whatever its numbers depend on is in its parameters, which every table carries.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from interp.ablation.interventions import Head, Site, site_heads
from interp.ablation.journal import Journal
from interp.ablation.measuring import Heads, Measured, Progress, Setting, label, measure_sets
from interp.ablation.methods import Method, check_method, prepare
from interp.ablation.metrics import METRICS, AnyMetric, Metric
from interp.errors import AnalysisError, ModelError
from interp.inputs import Inputs
from interp.models.watch import HookedModel
from interp.tables import head_labels

JOURNAL = "ablation.journal.jsonl"
TOGETHER = 5
"""How many of the strongest heads of a whole sweep are ablated together."""
SAMPLE = 8
"""Sets of heads on which bfloat16 is held against float32."""


@dataclass(frozen=True)
class Options:
    """How a sweep takes heads away, and what it reads."""

    method: str = "zero"
    metric: AnyMetric = METRICS["loss"]
    site: Site = "z"
    reference: Inputs | None = None
    """What means are taken over, or the tokens of another run for `patch`."""
    pooled: bool = False
    """One mean over all places, not one for each."""
    draws: int = 4
    seed: int = 0
    direct: bool = True
    """Also tell what the heads' own contribution to the logits does."""
    bfloat16: bool = False

    def check(self) -> None:
        """Refuse what cannot be.

        Raises: AnalysisError for an unknown method, site, or two that do not go together.
        """
        check_method(self.method)
        if self.site not in ("z", "k", "v"):
            raise AnalysisError(f"no site {self.site!r}; heads are ablated at z, k or v")
        if self.method == "pattern-preserving" and self.site == "k":
            raise AnalysisError("keys make the pattern: it cannot be kept while they are ablated")

    def check_for(self, model: HookedModel) -> None:
        """Refuse what cannot be measured of a model.

        Raises: AnalysisError as `check` does, and for a model without heads; ModelError for an
        encoder's next-token loss.
        """
        self.check()
        layers = range(model.cfg.n_layers)
        if not any(site_heads(model, layer, self.site) for layer in layers):
            raise AnalysisError(f"{model.cfg.model_name} has no head left: all of them are pruned")
        if (
            model.cfg.attention_dir != "causal"
            and isinstance(self.metric, Metric)
            and self.metric.name in METRICS
        ):
            raise ModelError(
                f"{model.cfg.model_name} is an encoder, where every token sees the next one: it "
                "has no next-token loss; give a metric of your own"
            )


@dataclass
class Sweep:
    """A model, its sequences and the options, ready to measure any sets of heads.

    With a folder `out` what is measured is noted there as it comes, and `resume` goes on with what
    a killed sweep has noted.
    """

    model: HookedModel
    inputs: Inputs
    options: Options
    out: Path | None = None
    resume: bool = False
    progress: Progress | None = None
    kind: str = "heads"
    methods: list[Method] = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        options.check_for(self.model)
        if isinstance(options.metric, Metric) and options.metric.n_sequences is not None:
            n_sequences = sum(len(batch.tokens) for batch in self.inputs.batches)
            if n_sequences != options.metric.n_sequences:
                raise AnalysisError(
                    f"{options.metric.n_sequences} answers were given for {n_sequences} sequences"
                )
        self.methods = prepare(
            self.model,
            self.inputs,
            options.method,
            site=options.site,
            reference=options.reference,
            pooled=options.pooled,
            seed=options.seed,
            draws=options.draws,
        )
        self._journal = Journal(
            None if self.out is None else self.out / JOURNAL, self._facts(), resume=self.resume
        )

    @property
    def heads(self) -> list[Head]:
        """Every head of the model at the site that is ablated."""
        layers = range(self.model.cfg.n_layers)
        return [
            (layer, head)
            for layer in layers
            for head in site_heads(self.model, layer, self.options.site)
        ]

    @property
    def params(self) -> dict[str, object]:
        """What its results depend on, for the reader of a table."""
        options = self.options
        facts = {name: value for method in self.methods for name, value in method.facts.items()}
        labels = head_labels(self.model.cfg.pruned_heads)
        return {
            **self.inputs.params,
            "method": options.method,
            "metric": options.metric.name,
            **options.metric.params,
            "site": options.site,
            **facts,
            "dtype": "bfloat16" if options.bfloat16 else str(self.model.cfg.dtype)[6:],
            **({"pruned_heads": labels} if labels else {}),
        }

    def measure(self, sets: Sequence[Heads], *, direct: bool = False) -> dict[str, Measured]:
        """The numbers of each method under each set of heads."""
        options = self.options
        return measure_sets(
            self.model,
            self.inputs,
            self.methods,
            sets,
            Setting(options.metric, options.site, direct, options.bfloat16),
            journal=self._journal,
            progress=self.progress,
        )

    def strays(self, sets: Sequence[Heads], measured: Measured) -> dict[str, object]:
        """How far bfloat16 lies from float32, on some of the sets of heads."""
        sample = evenly([heads for heads in sets if heads not in measured.failed])
        setting = Setting(self.options.metric, self.options.site)
        exact = measure_sets(self.model, self.inputs, self.methods[:1], sample, setting)
        whole = exact[self.methods[0].name]
        apart = [
            float(np.nanmean(measured.effect(one)) - np.nanmean(whole.effect(one)))
            for one in sample
            if one not in whole.failed
        ]
        return {
            "bfloat16_sample": " ".join(label(one) for one in sample),
            "bfloat16_largest_difference": float(np.abs(apart).max()),
            "bfloat16_clean_difference": float(np.nanmean(measured.clean - whole.clean)),
        }

    def close(self) -> None:
        """The results are written: the journal has done its work."""
        self._journal.close()

    def _facts(self) -> dict[str, object]:
        reference = self.options.reference
        return {
            "kind": self.kind,
            "model": self.model.cfg.model_name,
            "tokens_sha256": _sha256(self.inputs),
            "reference_sha256": None if reference is None else _sha256(reference),
            "direct": self.options.direct,
            **self.params,
        }


def evenly(sets: Sequence[Heads]) -> list[Heads]:
    """At most `SAMPLE` of some sets of heads, spread evenly over them."""
    places = np.linspace(0, len(sets) - 1, SAMPLE).round().astype(int)
    return list(dict.fromkeys(sets[place] for place in places))


def _sha256(inputs: Inputs) -> str:
    sha = hashlib.sha256()
    for batch in inputs.batches:
        sha.update(str(list(batch.tokens.shape)).encode())
        sha.update(batch.tokens.cpu().numpy().tobytes())
        sha.update(batch.real.cpu().numpy().tobytes())
    return sha.hexdigest()
