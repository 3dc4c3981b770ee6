"""Figures and report pages, on small tables made up to look like real runs."""

import base64
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from pages import NASTY, Elements, figures_of, strict, without_library
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from interp.errors import AnalysisError
from interp.tables import HeadScores
from interp.views.figures.curves import training_curves
from interp.views.figures.heads import ablation_bars, head_heatmap, heads_at_steps
from interp.views.pages.explorer import Score, Subject, Text
from interp.views.pages.page import (
    Explorer,
    Page,
    Plot,
    Section,
    Table,
    Words,
    frame_table,
    render,
)
from interp.views.pages.scores import scores_chapter
from interp.views.report import result_page, write_report

TOKENS_PER_STEP = 4096


def bend(steps, middle, width=120.0):
    """0 before, 1 after, with a smooth change around `middle`."""
    return 1 / (1 + np.exp(-(np.asarray(steps) - middle) / width * 4))


def made_heads(model, seed, steps, n_layers, n_heads=4):
    """Probes of a run: a previous-token head first, then induction heads in the last layer."""
    random = np.random.default_rng(seed)
    rows = []
    for step in steps:
        for layer in range(n_layers):
            for head in range(n_heads):
                noise = abs(random.normal(0, 0.01))
                rises = bend(step, 800 + 150 * seed)
                strong = n_layers == 2 and layer == 1 and head in (seed % 4, 3)
                previous = layer == 0 and head == (seed + 1) % 4
                rows.append(
                    {
                        "model": model,
                        "seed": seed,
                        "step": step,
                        "tokens": step * TOKENS_PER_STEP,
                        "layer": layer,
                        "head": head,
                        "induction": 0.02 + noise + 0.7 * rises * strong,
                        "previous_token": 0.05 + noise + 0.8 * bend(step, 600) * previous,
                        "sink": 0.1 + noise + 0.3 * bend(step, 1200) * (head == 2),
                    }
                )
    return pd.DataFrame(rows)


def made_curves(model, seed, steps):
    """Losses of a run; only a two-layer model changes."""
    random = np.random.default_rng(seed + 10)
    rise = bend(steps, 820 + 150 * seed) * (model == "two-layer")
    noise = random.normal(0, 0.03, len(steps))
    fall = 3.6 - 0.4 * (1 - np.exp(-np.asarray(steps) / 300))
    return pd.DataFrame(
        {
            "model": model,
            "seed": seed,
            "step": steps,
            "tokens": np.asarray(steps) * TOKENS_PER_STEP,
            "train_loss": fall - 1.2 * rise + 3 * noise,
            "loss": fall - 1.2 * rise + noise / 3,
            "icl_score": -0.7 - 2.4 * rise + noise,
            "first_copy_loss": fall + noise / 3,
            "second_copy_loss": fall - 2.5 * rise + noise / 3,
            "predictable_loss": fall - 1.1 * rise + noise / 3,
            "other_loss": fall - 0.1 * rise + noise / 3,
            "best_induction": 0.03 + 0.7 * rise + abs(noise) / 6,
        }
    )


def change(model, seed, curve, onset, middle, end):
    """A row of changes.csv; `onset` is None where no change was found."""
    row = {"model": model, "seed": seed, "curve": curve, "found": onset is not None}
    places = {"onset": onset, "step": middle, "end": end}
    places["width"] = None if onset is None else end - onset
    for name, value in places.items():
        row[name] = value
        row[f"{name}_tokens"] = None if value is None else value * TOKENS_PER_STEP
    row["size"] = None if onset is None else 0.68
    row["reason"] = "the rise is 0.01, under the floor of 0.1" if onset is None else ""
    return row


FACTS = {
    "kind": "phase-change",
    "name": "phase-change-repeated",
    "title": "Induction heads form in one abrupt change",
    "findings": [
        "In all 3 seeds of the two-layer model the induction score rises within 260 steps.",
        "The in-context-learning score falls in the same window; the one-layer model has neither.",
        "Ablating the induction heads costs 2.1 nats of in-context learning, control heads 0.02.",
    ],
    "rule": "The onset is the first logged step at which the smoothed curve leaves a band of 3 "
    "standard deviations around its mean before; the end is where it stays within 10% of its last "
    "value; a change must cover at least a quarter of the curve's range in a tenth of the run.",
    "notes": ["The tokens are synthetic: Zipf-distributed and repeated once in each sequence."],
    "command": "interp run configs/phase-change-repeated.toml",
    "versions": {"python": "3.11.7", "torch": "2.13.0", "interp": "0.1.0"},
    "seeds": [0, 1, 2],
    "device": "cpu",
    "threads": 2,
    "dtype": "float32",
    "corpus": {"kind": "repeated tokens", "vocabulary": 64, "length": 64, "sha256": "9f86d081" * 8},
    "n_parameters": 41216,
    "times": {"started": "2026-03-02T09:14:07Z", "seconds": 412.5},
}


def write_experiment(folder, facts=FACTS, seeds=(0, 1, 2), control=True):
    """A phase-change folder as an experiment leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = np.arange(0, 2001, 20)
    models = [("two-layer", seed) for seed in seeds] + [("one-layer", 0)] * control
    curves = pd.concat([made_curves(model, seed, steps) for model, seed in models])
    heads = pd.concat(
        [made_heads(m, s, steps[::5], 2 if m == "two-layer" else 1) for m, s in models]
    )
    changes = []
    for model, seed in models:
        for curve, late in (("induction", 0), ("icl_score", 20)):
            middle = 800 + 150 * seed + late
            places = (middle - 120, middle, middle + 140) if model == "two-layer" else (None,) * 3
            changes.append(change(model, seed, curve, *places))
    ablation = [
        {
            "seed": seed,
            "group": group,
            "heads": heads_of,
            "n_heads": len(heads_of.split()),
            "icl_score": -3.1,
            "icl_score_ablated": -3.1 + effect,
            "effect": effect + 0.05 * seed,
            "effect_se": 0.04,
            "loss": 2.0,
            "loss_ablated": 2.0 + effect / 2,
            "n": 256,
        }
        for seed in seeds
        for group, heads_of, effect in (
            ("induction heads", "1.0 1.3", 2.1),
            ("previous-token heads", "0.1", 1.7),
            ("control heads (same layers, drawn at random)", "1.10", 0.02),
        )
    ]
    (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    (folder / "config.toml").write_text('name = "phase-change-repeated"\n', encoding="utf-8")
    for name, table in {
        "curves": curves,
        "heads": heads,
        "changes": pd.DataFrame(changes),
        "ablation": pd.DataFrame(ablation),
    }.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    return folder


def write_training_run(folder, name="stdlib-two-layer"):
    """A training run's folder as the trainer leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = np.arange(0, 3001, 25)
    curves = made_curves("two-layer", 0, steps).drop(columns=["model", "seed", "best_induction"])
    lines = [json.dumps(row) for row in curves.to_dict("records")]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    probes = made_heads("", 0, steps[::4], 2, 8).drop(columns=["model", "seed"])
    probes.to_csv(folder / "probes.csv", index=False)
    (folder / "config.toml").write_text('name = "x"\n[train]\nlr = 4e-3\n', encoding="utf-8")
    facts = {k: v for k, v in FACTS.items() if k not in ("title", "findings", "rule", "notes")}
    facts |= {"kind": "train", "name": name, "seed": 0}
    (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def made_scores(n_layers=12, n_heads=12):
    """Scores of a GPT-2-sized model: a few strong heads, the rest near the null."""
    random = np.random.default_rng(0)
    rows = [
        {
            "layer": layer,
            "head": head,
            "induction": 0.9 * (layer in (5, 6, 7) and head in (1, 5, 9)) + random.uniform(0, 0.05),
            "induction_se": 0.004,
            "induction_null": 0.02,
            "n": 64,
        }
        for layer in range(n_layers)
        for head in range(n_heads)
    ]
    return HeadScores(
        table=pd.DataFrame(rows),
        score="induction",
        unit="attention probability",
        analysis="induction",
        model="gpt2",
        params={"block": [12, 20, 31]},
        inputs="repeated tokens, 64 sequences",
        seed=0,
        summary={"highest_null": 0.031, "heads_above_null": 7},
        versions={"torch": "2.13.0"},
    )


def grid(n_layers, n_heads, value):
    cells = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
    return pd.DataFrame([{"layer": i, "head": j, "score": value(i, j), "n": 8} for i, j in cells])


# The page as a file


@pytest.fixture(scope="module")
def experiment_page(tmp_path_factory):
    folder = write_experiment(tmp_path_factory.mktemp("experiment"))
    return write_report(folder).read_text(encoding="utf-8")


def test_the_library_is_in_the_page_once_and_each_figure_has_its_own_id(experiment_page):
    library = get_plotlyjs()
    assert experiment_page.count("* plotly.js v") == library.count("* plotly.js v") == 1
    assert len(experiment_page.encode()) < len(library.encode()) + 2_000_000
    names = [name for name, _, _ in figures_of(experiment_page)]
    ids = Elements(without_library(experiment_page)).ids
    assert len(names) >= 5
    assert len(set(ids)) == len(ids)
    assert [i for i in ids if re.fullmatch(r"fig-\d+", i)] == names


def test_the_page_needs_nothing_from_outside(experiment_page):
    body = without_library(experiment_page)
    outside = [
        (tag, name, value)
        for tag, name, value in Elements(body).attributes
        if name in ("src", "href") and not value.startswith(("#", "data:"))
    ]
    assert outside == []
    assert not re.search(r"https?:|file:|@import|url\(", body)
    # The library's default button that uploads a figure is off.
    assert 'showSendToCloud: false, plotlyServerURL: ""' in body


def test_the_same_results_give_the_same_bytes(tmp_path):
    first = write_report(write_experiment(tmp_path / "a")).read_bytes()
    # Another process: nothing may hang on the hash seed or on what was drawn before.
    write_experiment(tmp_path / "b")
    code = f"from interp.views.report import write_report; write_report({str(tmp_path / 'b')!r})"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONHASHSEED": "7"}
    )
    assert (tmp_path / "b" / "report.html").read_bytes() == first
    assert sorted(p.name for p in (tmp_path / "a").iterdir() if "report" in p.name) == [
        "report.html"
    ]


def test_text_from_outside_is_shown_as_written_and_runs_nothing(tmp_path, experiment_page):
    facts = FACTS | {"name": NASTY, "title": NASTY, "findings": [NASTY], "corpus": {NASTY: NASTY}}
    folder = write_experiment(tmp_path, facts)
    for name in ("curves", "heads", "changes"):
        table = pd.read_csv(folder / f"{name}.csv")
        table["model"] = table["model"].replace("two-layer", NASTY)
        table.to_csv(folder / f"{name}.csv", index=False)
    ablation = pd.read_csv(folder / "ablation.csv")
    ablation.assign(group=NASTY, heads=NASTY).to_csv(folder / "ablation.csv", index=False)
    page = write_report(folder).read_text(encoding="utf-8")
    body = without_library(page)
    seen, plain = Elements(body), Elements(without_library(experiment_page))
    # The library, the page's own, and what its explorer knows.
    assert seen.tags.count("script") == plain.tags.count("script") == 3
    assert seen.tags.count("b") == 0
    assert NASTY in seen.text
    assert "alert(1)</script>" not in body
    for _, data, layout in figures_of(page):
        # A map's subject is compared with the explorer's and never shown.
        shown = [{**trace, "meta": None} for trace in data]
        for text in strings({"data": shown, "layout": layout}):
            assert "<script" not in text
            assert "%{z}$" not in text
            assert "$x$" not in text


def strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def test_a_page_of_words_and_tables_carries_no_library():
    table = Table("Facts.", ("fact", "value"), (("a", "b"),), words=2)
    page = render(Page("Words", sections=(Section("one", "One", (Words("Hello."), table)),)))
    assert "plotly.js v" not in page
    assert len(page) < 60_000
    assert "<footer" not in page


def test_a_page_can_fetch_the_library_instead_and_carry_a_stamp():
    section = Section("one", "One", (Plot(head_heatmap(grid(2, 2, lambda i, j: i), "score")),))
    page = render(Page("Map", sections=(section,)), cdn=True, stamp=f"made by {NASTY}")
    assert get_plotlyjs() not in page
    seen = Elements(page)
    outside = {value for _, name, value in seen.attributes if name == "src"}
    assert outside == {f"https://cdn.plot.ly/plotly-{get_plotlyjs_version()}.min.js"}
    digest = base64.b64encode(hashlib.sha256(get_plotlyjs().encode()).digest()).decode()
    assert ("script", "integrity", f"sha256-{digest}") in seen.attributes
    assert ("script", "crossorigin", "anonymous") in seen.attributes
    assert re.findall(r"https?://[^/]*", page) == ["https://cdn.plot.ly"]
    assert f"made by {NASTY}" in seen.text


def explorer_of(*, tokens=("a", NASTY), values=(0.5, math.nan), name=NASTY):
    score = Score("sink", "", NASTY, (values,), ((math.inf, 0.1),), None, 0.0, 1.0, False, False)
    text = Text(tokens, NASTY, 16, ("0.0",), ("eJw=",))
    return Explorer((Subject(name, 1, 2, (), (score,), (text,)),))


def test_an_explorer_is_strict_json_beside_its_packed_patterns():
    page = render(Page("Heads", sections=(Section("one", "One", (explorer_of(),)),)))
    body = without_library(page)
    seen = Elements(body)
    # The library, the facts, one pattern, and the page's own.
    assert seen.tags.count("script") == 4
    assert seen.tags.count("b") == 0
    start = body.index(">", body.index('id="explorer-data"')) + 1
    inside = body[start : body.index("</script>", start)]
    assert "<" not in inside
    [subject] = json.loads(inside, parse_constant=lambda token: pytest.fail(token))["subjects"]
    assert subject["name"] == NASTY
    assert subject["texts"][0]["tokens"] == ["a", NASTY]
    assert "data" not in subject["texts"][0]
    assert subject["scores"][0]["values"] == [[0.5, None]]
    assert subject["scores"][0]["errors"] == [[None, 0.1]]
    assert subject["scores"][0]["nulls"] is None
    assert '<script type="text/plain" id="pattern-0-0-0.0">eJw=</script>' in body


def test_a_page_has_one_explorer_of_at_least_one_subject():
    several = Section("one", "One", (explorer_of(), explorer_of()))
    with pytest.raises(ValueError, match="one explorer for all its subjects, not 2"):
        render(Page("Heads", sections=(several,)))
    with pytest.raises(ValueError, match="an explorer needs a subject"):
        render(Page("Heads", sections=(Section("one", "One", (Explorer(()),)),)))


def test_a_table_keeps_the_numbers_that_its_cells_round():
    frame = pd.DataFrame({"head": ["L0H0", "L0H1"], "score": [1 / 3, math.nan], "n": [12345, 2]})
    table = frame_table(frame.assign(sure=[True, False]), "Scores.", ["head"])
    assert table.rows == (("L0H0", "0.3333", "12,345", "yes"), ("L0H1", "–", "2", "no"))
    assert table.values == (
        ("L0H0", repr(1 / 3), "12345", "True"),
        ("L0H1", "", "2", "False"),
    )
    page = render(Page("Table", sections=(Section("one", "One", (table,)),)))
    assert f'data-value="{1 / 3!r}">0.3333</td>' in page
    assert 'data-value="">–</td>' in page
    assert '<th scope="row">L0H0</th>' in page


def test_nan_becomes_null_and_is_told(tmp_path):
    table = made_scores().table
    table.loc[3, "induction"] = math.nan
    table.loc[5, "induction"] = math.inf
    page = result_page(replace(made_scores(), table=table))
    [(_, data, layout)] = figures_of(page)
    assert data[0]["z"][0][3] is None
    assert all(math.isfinite(layout["coloraxis"][end]) for end in ("cmin", "cmax"))
    assert "Blank, without a finite value: L0H3, L0H5 (2 of 144 heads)." in Elements(page).text


def test_all_nan_is_a_sentence():
    table = made_scores().table.assign(induction=math.nan)
    page = result_page(replace(made_scores(), table=table))
    assert "No head has a finite value" in Elements(page).text
    assert figures_of(page) == []


# Figures


def test_each_cell_is_where_its_head_is_and_layer_0_is_at_the_top():
    figure = strict(head_heatmap(grid(3, 2, lambda i, j: i + 10 * j), "score"))
    [trace], layout = figure["data"], figure["layout"]
    assert trace["z"] == [[0, 10], [1, 11], [2, 12]]
    assert layout["yaxis"]["autorange"] == "reversed"
    assert (layout["xaxis"]["title"]["text"], layout["yaxis"]["title"]["text"]) == ("head", "layer")


def test_positions_are_numbers_so_labels_cannot_merge():
    figure = strict(head_heatmap(grid(2, 12, lambda i, j: j), "score"))
    [trace], layout = figure["data"], figure["layout"]
    assert trace["x"] == list(range(12))
    assert layout["xaxis"]["ticktext"][10] == "10"
    assert "L1H10" not in trace["x"]
    bars = strict(ablation_bars(pd.DataFrame({"group": ["1.1", "1.10"], "effect": [1.0, 2.0]})))
    assert len(set(bars["data"][0]["y"])) == 2


def test_two_rows_for_one_head_are_refused():
    twice = pd.concat([grid(2, 2, lambda i, j: 0.5)] * 2)
    with pytest.raises(AnalysisError, match="L0H0 has several"):
        head_heatmap(twice, "score")


def test_an_unknown_column_names_the_known_ones():
    with pytest.raises(AnalysisError, match=r"no column 'sink'.*known: .*'score'"):
        head_heatmap(grid(2, 2, lambda i, j: 0.5), "sink")


@pytest.mark.parametrize("value", [0.0, 0.5, -2.0])
@pytest.mark.parametrize("diverging", [False, True])
def test_a_constant_grid_has_a_colour_range(value, diverging):
    figure = head_heatmap(grid(2, 2, lambda i, j: value), "score", diverging=diverging)
    low, high = figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax
    assert math.isfinite(low)
    assert math.isfinite(high)
    assert low < high
    assert not diverging or low == -high


def test_effects_are_coloured_symmetrically_around_zero():
    scores = replace(made_scores(), analysis="ablation", unit="nats")
    [(_, _, layout), _bars] = figures_of(result_page(scores))
    assert layout["coloraxis"]["cmin"] == -layout["coloraxis"]["cmax"]


def test_maps_at_steps_share_one_colour_range():
    heads = made_heads("two-layer", 0, [0, 400, 800, 1200], 2)
    figure = strict(heads_at_steps(heads, "induction", [0, 790, 5000], labels=["a", "b", "c"]))
    assert len(figure["data"]) == 3
    assert {trace["coloraxis"] for trace in figure["data"]} == {"coloraxis"}
    shown = [v for trace in figure["data"] for row in trace["z"] for v in row]
    assert figure["layout"]["coloraxis"]["cmax"] == max(shown)
    said = [a["text"] for a in figure["layout"]["annotations"]]
    assert "b<br>step 800" in said
    assert "c<br>step 1,200" in said


def test_curves_share_one_step_axis_and_the_change_is_marked():
    steps = np.arange(0, 2001, 100)
    curves = pd.concat([made_curves("one-layer", 0, steps), made_curves("two-layer", 0, steps)])
    changes = pd.DataFrame(
        [
            change("two-layer", 0, "induction", 680, 800, 940),
            # The best candidate of a curve in which the rule found nothing is not a change.
            change("one-layer", 0, "induction", 100, 200, 300) | {"found": False},
        ]
    )
    figure = strict(training_curves(curves, changes))
    assert {trace.get("xaxis", "x") for trace in figure["data"]} == {"x"}
    assert [key for key in figure["layout"] if key.startswith("xaxis")] == ["xaxis"]
    bands = [s for s in figure["layout"]["shapes"] if s["type"] == "rect"]
    lines = [s for s in figure["layout"]["shapes"] if s["type"] == "line"]
    assert {(band["x0"], band["x1"]) for band in bands} == {(680, 940)}
    assert {line["x0"] for line in lines} == {800}
    # In the score's own panel only its own change is marked, and none was found for it here.
    assert len(bands) == 4
    colours = {trace["name"]: trace["line"]["color"] for trace in figure["data"]}
    assert colours == {"one-layer, seed 0": "#D55E00", "two-layer, seed 0": "#1A7DC0"}
    assert "2,000<br>8.19M" in figure["layout"]["xaxis"]["ticktext"]


def test_a_gap_in_a_curve_is_left_out_and_long_lines_are_thinned():
    steps = np.arange(6001)
    curves = made_curves("two-layer", 0, steps)
    curves.loc[curves["step"] % 2 == 1, "loss"] = math.nan
    figure = strict(training_curves(curves[["step", "tokens", "loss"]]))
    [trace] = figure["data"]
    assert len(trace["x"]) <= 501
    assert trace["x"][-1] == 6000
    assert None not in trace["y"]


def test_bars_carry_their_standard_errors():
    table = pd.DataFrame(
        {
            "seed": [0, 0, 1, 1],
            "group": ["induction heads", "control heads"] * 2,
            "heads": ["1.10", "1.1", "1.2", "1.3"],
            "effect": [2.0, 0.1, 2.2, math.nan],
            "effect_se": [0.1, 0.05, 0.1, math.nan],
            "n": 64,
        }
    )
    figure = strict(ablation_bars(table))
    assert [bar["name"] for bar in figure["data"]] == ["seed 0", "seed 1"]
    assert figure["data"][0]["error_x"]["array"] == [0.1, 0.05]
    assert figure["data"][1]["x"] == [2.2, None]
    assert figure["data"][0]["customdata"][0][0] == "1.10"


# Folders


def test_an_experiment_page_tells_the_change_in_words_and_numbers(experiment_page):
    text = Elements(without_library(experiment_page)).text
    for expected in (
        *FACTS["findings"],
        FACTS["rule"],
        *FACTS["notes"],
        "two-layer, seed 2",
        "3 of 3",
        "+20 +81.9k tokens",
        "one-layer, seed 0, induction score: the rise is 0.01, under the floor of 0.1",
        "2.1 ± 0.04",
        "versions.torch",
        "2026-03-02T09:14:07Z",
    ):
        assert expected in text


def test_head_names_in_a_file_stay_text(tmp_path):
    folder = write_experiment(tmp_path)
    rows = ["seed,group,heads,effect,effect_se,n", "0,one,1.1,2.0,0.1,8", "0,other,1.10,1.0,0.1,8"]
    (folder / "ablation.csv").write_text("\n".join(rows), encoding="utf-8")
    page = write_report(folder).read_text(encoding="utf-8")
    assert {"1.1", "1.10"} <= set(Elements(without_library(page)).text.split())


def test_a_training_run_page_says_where_the_run_ended(tmp_path):
    page = write_report(write_training_run(tmp_path)).read_text(encoding="utf-8")
    text = Elements(without_library(page)).text
    assert "At step 3,000 (12.3M tokens): held-out loss" in text
    assert re.search(r"Highest induction score at step 3,000: 0\.7\d* \(L1H[03]\)", text)
    assert "lr = 4e-3" in text
    assert len(figures_of(page)) == 4


def test_a_metrics_line_cut_off_by_a_stop_is_left_out_and_told(tmp_path):
    folder = write_training_run(tmp_path)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3025, "lo')
    text = Elements(without_library(write_report(folder).read_text(encoding="utf-8"))).text
    assert "The last line of metrics.jsonl is cut off and was left out." in text
    assert "At step 3,000" in text


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("curves", "Highest induction score"),
        ("heads", "No head maps"),
        ("changes", "No change points"),
        ("ablation", "No ablation"),
    ],
)
@pytest.mark.parametrize("how", ["absent", "blank", "header only"])
def test_a_missing_table_costs_its_section_only(tmp_path, missing, expected, how):
    folder = write_experiment(tmp_path)
    path = folder / f"{missing}.csv"
    header = path.read_text(encoding="utf-8").splitlines()[0]
    path.write_text({"absent": "", "blank": "\n", "header only": header + "\n"}[how])
    if how == "absent":
        path.unlink()
    page = write_report(folder).read_text(encoding="utf-8")
    seen = " ".join([Elements(without_library(page)).text, *strings(figures_of_lists(page))])
    assert expected in seen


def figures_of_lists(page):
    return [[data, layout] for _, data, layout in figures_of(page)]


def test_one_seed_without_control_or_change_is_told_in_words(tmp_path):
    folder = write_experiment(tmp_path / "one", seeds=(0,), control=False)
    text = Elements(without_library(write_report(folder).read_text(encoding="utf-8"))).text
    assert "no interval over seeds" in text
    assert "no control model" in text
    changes = pd.DataFrame([change("two-layer", 0, "induction", None, None, None)])
    changes.to_csv(folder / "changes.csv", index=False)
    text = Elements(without_library(write_report(folder).read_text(encoding="utf-8"))).text
    assert "The rule found no change in any run." in text
    assert "Four evenly spaced moments" in text


def test_a_run_with_facts_only_still_has_a_page(tmp_path):
    (tmp_path / "run.json").write_text('{"kind": "train"}', encoding="utf-8")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "No training curves" in Elements(page).text


def test_a_folder_of_analyses_is_one_page(tmp_path):
    table = made_scores().table
    table.loc[0, "induction"] = math.nan
    replace(made_scores(), table=table).save(tmp_path)
    replace(made_scores(2, 4), analysis="prefix-matching").save(tmp_path)
    (tmp_path / "other.json").write_text("[1, 2]")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert len(figures_of(page)) == 2
    text = Elements(without_library(page)).text
    assert "Blank, without a finite value: L0H0" in text
    assert "heads above null" in text.lower()


def test_a_folder_of_neither_kind_is_refused_in_one_line(tmp_path):
    with pytest.raises(AnalysisError, match=r"nothing to report: no run\.json") as caught:
        write_report(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.json").write_text('{"kind": "bake"}', encoding="utf-8")
    with pytest.raises(AnalysisError, match=r"kind 'bake'.*expected run\.json with kind train"):
        write_report(tmp_path)
    with pytest.raises(AnalysisError, match="no such folder"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("run.json", "{", r"run\.json: not JSON"),
        ("run.json", "[]", r"run\.json: a run's facts are one JSON object, not list"),
        ("metrics.jsonl", '{"a":\n{}\n', r"metrics\.jsonl, line 1: not JSON"),
        ("probes.csv", 'a,b\n1,2\n3,4,5\n"', r"probes\.csv: not a readable table"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, text, expected):
    folder = write_training_run(tmp_path)
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(AnalysisError, match=expected):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_tokens_are_quoted_and_records_and_the_strongest_head_read_as_in_the_tables():
    scores = made_scores(n_layers=1, n_heads=2)
    table = scores.table.assign(token=[" ", "<b>"], offset=[-1, 2], selected=[True, False])
    summary = {"best": 0.1, "best_head": "0.1", "sink_tokens": [{"position": 3, "token": "\n"}]}
    page = result_page(replace(scores, table=table, summary=summary, params={"ids": ""}))
    for cell in ("&#39; &#39;", "&#39;&lt;b&gt;&#39;", "&#39;\\n&#39;", "L0H1", "−1", "yes", "no"):
        assert f">{cell}</td>" in page
    assert "<span>Sink tokens.</span>" in page
    assert re.search(r'<th scope="row">ids</th>\s*<td>–</td>', page)


def test_headings_name_the_model_only_where_there_are_several():
    one = made_scores(n_layers=1, n_heads=2)
    other = replace(one, analysis="sinks")
    alone = scores_chapter([one, other], "").page.sections
    assert [section.heading for section in alone] == ["Induction", "Sinks"]
    several = scores_chapter([one, replace(other, model="tiny")], "").page.sections
    assert [section.heading for section in several] == ["Induction, gpt2", "Sinks, tiny"]


def test_a_score_below_zero_ranks_below_and_an_effect_by_its_size():
    table = pd.DataFrame({"layer": 0, "head": [0, 1, 2], "copying": [-0.9, 0.2, 0.5]})
    scores = replace(made_scores(), table=table, score="copying", analysis="copying")
    for analysis, heads in (("copying", [2, 1, 0]), ("ablation", [0, 2, 1])):
        page = result_page(replace(scores, analysis=analysis))
        expected = [f"L0H{head}" for head in heads]
        assert re.findall(r'<th scope="row">(L\dH\d)</th>', page)[:3] == expected
