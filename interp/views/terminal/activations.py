"""The largest activations, and composition of heads, as tables on a terminal."""

from rich.console import Console

from interp.activation_tables import Activations
from interp.tables import SetScores
from interp.views.pages.activations import activation_findings, stream_rows, strongest_sites
from interp.views.pages.composition import composition_findings, strongest_pairs
from interp.views.pages.page import number
from interp.views.terminal.scores import print_columns

ROWS = 12


def print_outliers(result: Activations) -> None:
    """Print the largest of each layer of the stream, each site at its largest, what stands out."""
    console = Console(highlight=False, markup=False)  # a token may hold brackets
    rows = stream_rows(result)
    if len(rows):
        names = {"resid_pre": "", "resid_post": " end", "ln_final": " norm"}
        labels = [
            f"{layer}{names[site]}" for layer, site in zip(rows["layer"], rows["site"], strict=True)
        ]
        cells = {name: [number(value) for value in rows[name]] for name in _NUMBERS}
        cells["token"] = [repr(token) for token in rows["token"]]
        cells["massive"] = ["yes" if massive else "" for massive in rows["massive"]]
        print_columns(console, f"outliers of {result.model}", labels, cells, "layer")
        console.print(
            "the largest activation before each block, after the last, after the final norm"
        )
    sites = strongest_sites(result)
    cells = {name.replace("_", " "): [number(value) for value in sites[name]] for name in _OF_SITES}
    print_columns(console, f"sites of {result.model}", list(sites["site"]), cells, "site")
    console.print("each site in the layer where its infinity norm is largest")
    for line in activation_findings(result):
        console.print(line)
    console.print(f"{result.inputs}; seed {result.seed}")


_NUMBERS = ("value", "ratio", "position", "dimension")

_OF_SITES = ("layer", "infinity_norm", "kurtosis", "massive", "beyond_sigma", "beyond_robust")


def print_composition(result: SetScores) -> None:
    """Print the strongest pairs, then what the whole table shows."""
    console = Console(highlight=False, markup=False)
    rows = strongest_pairs(result).head(ROWS)
    columns = [name for name in rows if name != "pair"]
    cells = {
        str(name).replace("_", " "): [number(value) for value in rows[name]] for name in columns
    }
    print_columns(console, f"composition of {result.model}", list(rows["pair"]), cells, "pair")
    console.print(f"the {len(rows)} strongest of {len(result.table)} pairs")
    for line in composition_findings(result):
        console.print(line)
    console.print(f"{result.inputs}; gains of the norms: {result.params.get('norm_gains')}")
