"""Files of results on activations: whole ones come back, others are refused in one line."""

import json
from pathlib import Path

import pytest

from interp.errors import AnalysisError
from interp.views.pages.scores import read_scores

EXAMPLES = Path(__file__).parent.parent / "reports" / "examples" / "smollm2"
FRAMES = {
    "outliers": ("table", "sites", "features"),
    "outlier_sinks": ("table", "layers"),
    "outlier_effects": ("table", "heads"),
    "quantization": ("table", "layers"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_saved_result_comes_back_with_all_its_tables(name, tmp_path):
    path = EXAMPLES / f"{name}.json"
    result = read_scores(path)
    result.save(tmp_path)
    again = read_scores(tmp_path / f"{name}.json")
    for frame in FRAMES[name]:
        assert getattr(again, frame).equals(getattr(result, frame))
        own = tmp_path / (f"{name}.csv" if frame == "table" else f"{name}_{frame}.csv")
        assert own.is_file()
    assert (tmp_path / f"{name}.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["outliers", "outlier_sinks", "outlier_effects"])
def test_a_file_that_lacks_a_column_or_a_figure_is_refused_in_one_line(name, tmp_path):
    whole = json.loads((EXAMPLES / f"{name}.json").read_text(encoding="utf-8"))
    path = tmp_path / "broken.json"
    refused = 0
    for frame in FRAMES[name]:
        for column in whole[frame][0]:
            rows = [{k: v for k, v in row.items() if k != column} for row in whole[frame]]
            path.write_text(json.dumps({**whole, frame: rows}), encoding="utf-8")
            with pytest.raises(AnalysisError, match=f"its {frame} has no {column}") as caught:
                read_scores(path)
            assert "\n" not in str(caught.value)
            refused += 1
    for figure in whole["summary"] if name != "outliers" else ():
        summary = {k: v for k, v in whole["summary"].items() if k != figure}
        path.write_text(json.dumps({**whole, "summary": summary}), encoding="utf-8")
        with pytest.raises(AnalysisError, match=f"its summary has no {figure}"):
            read_scores(path)
        refused += 1
    assert refused >= 20
