"""Pages to look at in a browser, made of small made-up results whose every number is known."""

import base64
import zlib
from dataclasses import replace

import numpy as np
import pandas as pd
from pages import NASTY

from interp.views.figures.heads import head_heatmap, heads_at_steps
from interp.views.figures.matrices import composition_matrix
from interp.views.pages.explorer import Score, Subject, Text
from interp.views.pages.page import (
    Explorer,
    Folded,
    Page,
    Plot,
    Points,
    Section,
    Source,
    Table,
    Words,
    frame_table,
)

# "the" comes three times; a space, a line break and markup are tokens too.
TOKENS = ("<bos>", "the", " cat", " and", " the", "\n", "the", NASTY, " ", "the")
N_LAYERS, N_HEADS = 6, 4
STEPS = (0, 100, 200, 400)


def pattern(index, size):
    """A causal pattern whose rows sum to 1, another one for each head."""
    weights = np.tril(np.random.default_rng(index).random((size, size)) ** 4 + 1e-3)
    return weights / weights.sum(axis=1, keepdims=True)


def packed(weights, bits=16):
    """What a page embeds of a pattern, written out from its description alone."""
    codes = np.round(weights * 65535) if bits == 16 else np.round(np.sqrt(weights) * 255)
    raw = codes.astype("<u2" if bits == 16 else "u1").tobytes()
    return base64.b64encode(zlib.compress(raw)).decode()


def text(
    heads, tokens=TOKENS, *, bits=16, step=None, about="A text of ten tokens.", seed=0, **more
):
    """The patterns of heads, given by their numbers, on a text."""
    return Text(
        tokens=tokens,
        about=about,
        bits=bits,
        heads=tuple(f"{index // N_HEADS}.{index % N_HEADS}" for index in heads),
        data=tuple(packed(pattern(seed + index, len(tokens)), bits) for index in heads),
        step=step,
        **more,
    )


def score(name, rows, *, nulls=None, effect=False, unit="attention probability"):
    """A score with an error of 0.01 everywhere it has a value."""
    finite = [v for row in rows for v in row if v is not None and np.isfinite(v)]
    reach = max((abs(v) for v in finite), default=1.0) or 1.0
    return Score(
        name=name,
        unit=unit,
        about=f"How {name.replace('_', ' ')} was measured, on 64 made-up sequences.",
        values=tuple(map(tuple, rows)),
        errors=tuple(tuple(0.01 for _ in row) for row in rows),
        nulls=nulls,
        low=-reach if effect else 0.0,
        high=reach,
        diverging=effect,
        effect=effect,
    )


COUNT = N_LAYERS * N_HEADS
# Head 5.1 is the strongest by far, head 2.3 has no value, head 0.2 not a finite one.
INDUCTION = tuple(
    None if i == 11 else np.nan if i == 2 else 0.9 if i == 21 else round(0.01 * i, 4)
    for i in range(COUNT)
)
EFFECTS = tuple(-1.5 if i == 9 else round(0.02 * (i - 8), 4) for i in range(COUNT))


def model(*, gone=("4.0",), texts=None, name="smollm2-tiny"):
    """A model of 24 heads, one of them pruned, eight of whose patterns are embedded."""
    blank = tuple(None if f"{i // 4}.{i % 4}" in gone else v for i, v in enumerate(INDUCTION))
    spread = tuple(round(1 - i / COUNT, 4) for i in range(COUNT))
    nulls = (tuple(0.02 for _ in range(COUNT)),)
    return Subject(
        name=name,
        n_layers=N_LAYERS,
        n_heads=N_HEADS,
        gone=gone,
        scores=(
            score("induction", [blank], nulls=nulls),
            score("From uniform, on the text", [spread], unit=""),
            score("loss", [EFFECTS], effect=True, unit="nats"),
        ),
        texts=(text((21, 0, 5, 9, 12, 13, 14, 23)),) if texts is None else texts,
    )


def run(name="two-layer, seed 0"):
    """A training run of four logged steps, with patterns at steps 100 and 400."""
    rows = [tuple(round(i * step / 10000, 4) for i in range(8)) for step in STEPS]
    return Subject(
        name=name,
        n_layers=2,
        n_heads=N_HEADS,
        gone=(),
        scores=(score("induction", rows), score("sink", [rows[1]])),
        texts=(text((7, 3), step=400, seed=50), text((7, 3), step=100, seed=70)),
        steps=STEPS,
        tokens=tuple(step * 4096 for step in STEPS),
    )


def single():
    """A model of one head whose only score is missing and whose patterns are not embedded."""
    return Subject("one-head", 1, 1, (), (score("induction", [(None,)]),), ())


def encoder():
    """A model that looks both ways."""
    return replace(model(), name="encoder", texts=(text((21,), causal=False),))


def windowed():
    """A model whose layer 5 sees three keys; one of its weights lies where no query can look."""
    band = np.tril(np.triu(pattern(21, len(TOKENS)), -2))
    band[2, 7] = 0.25
    seen = replace(text((21,), windows=(None,) * 5 + (3,)), data=(packed(band),))
    return replace(model(), name="windowed", texts=(seen,))


def long_text(size=300):
    """A model with one pattern of many tokens, kept to 8 bits."""
    tokens = tuple(f"w{i % 50}" for i in range(size))
    return replace(model(), name="long", texts=(text((21,), tokens, bits=8, about="A long text."),))


def head_map(name="smollm2-tiny"):
    """A map of heads as a report has it; a click on it chooses a head of the subject."""
    table = pd.DataFrame(
        {
            "layer": [i // N_HEADS for i in range(COUNT)],
            "head": [i % N_HEADS for i in range(COUNT)],
            "induction": [None if v is None else v for v in INDUCTION],
        }
    )
    figure = head_heatmap(table, "induction", title=f"Induction of {name}", pruned=[(4, 0)])
    figure.data[0].meta = {"subject": name}
    return figure


def run_maps(name="two-layer, seed 0"):
    """Small maps of one run at two steps."""
    rows = [
        {"model": "two-layer", "seed": 0, "step": step, "layer": i // 4, "head": i % 4}
        | {"induction": i * step / 10000}
        for step in (100, 400)
        for i in range(8)
    ]
    figure = heads_at_steps(pd.DataFrame(rows), "induction", [100, 400])
    for trace, step in zip(figure.data, (100, 400), strict=True):
        trace.meta = {"subject": name, "step": step}
    return figure


def score_table(rows=COUNT):
    """A table with a missing number, a comma, a quote and a number of many digits."""
    return pd.DataFrame(
        {
            "head": [f"L{i // N_HEADS}H{i % N_HEADS}" for i in range(rows)],
            "induction": [1 / (i + 3) if i != 1 else np.nan for i in range(rows)],
            "n": [1000 * i for i in range(rows)],
            "token": [f'say "{i}", again' for i in range(rows)],
        }
    )


def rich_page():
    """A page with a part of every kind, around an explorer."""
    table = frame_table(score_table(), "All heads, strongest first.", ["head", "token"])
    facts = Table("Where this comes from.", ("fact", "value"), (("model", NASTY),), words=2)
    return Page(
        "Heads of a small model",
        "smollm2-tiny and a training run, made up",
        ("One head does induction: L5H1.", NASTY),
        (
            Section("explore", "Explore", (Explorer((model(), run(), single(), long_text())),)),
            Section("induction", "Induction", (Plot(head_map()), table)),
            Section("training", "Training", (Plot(run_maps()), Words("Two moments of a run."))),
            Section(
                "facts",
                "Facts",
                (
                    facts,
                    Points(("A point.", NASTY)),
                    Folded("The same again", table),
                    Source("config.toml", f'name = "{NASTY}"\n' * 3),
                ),
            ),
        ),
    )


def sight_page():
    """A page of two models whose queries do not see what those of a causal one see."""
    explorer = Explorer((encoder(), windowed()))
    return Page("Sight", sections=(Section("explore", "Explore", (explorer,)),))


def pairs_page(n_layers=11, n_heads=10):
    """A page of one matrix of so many heads against as many."""
    heads = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
    rows = [(*a, *b) for a in heads for b in heads if b[0] > a[0]]
    table = pd.DataFrame(rows, columns=["layer_a", "head_a", "layer_b", "head_b"])
    table["k_composition"] = np.random.default_rng(0).random(len(rows))
    section = Section("pairs", "Pairs", (Plot(composition_matrix(table, "k_composition")),))
    return Page("Pairs", sections=(section,))


def long_table_page():
    """A page without figures: a table long enough to be filtered, one written by hand, facts."""
    table = frame_table(score_table(40), "Forty heads.", ["head", "token"])
    cells = ("1,200\n4.9M tokens", "680\n2.8M tokens", "–", "−5 ± 0.1")
    rows = tuple((name, cell) for name, cell in zip("abcd", cells, strict=True))
    by_hand = Table("Steps.", ("run", "step"), rows)
    ids = ", ".join(map(str, range(512)))
    facts = Table("Where this comes from.", ("fact", "value"), (("ids", ids),), words=2)
    return Page("Tables", sections=(Section("tables", "Tables", (table, by_hand, facts)),))


def one_head_page():
    """A page of nothing but an explorer with nothing to show."""
    section = Section("explore", "Explore", (Explorer((single(),)),))
    return Page("One head", sections=(section,))


def twelve_maps_page():
    """Twelve maps of heads, without an explorer."""
    sections = tuple(
        Section(f"map-{place}", f"Map {place}", (Plot(head_map(f"model {place}")),))
        for place in range(12)
    )
    return Page("Twelve figures", sections=sections)
