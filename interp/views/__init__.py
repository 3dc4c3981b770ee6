"""Pictures and pages: plotly figures and one-file HTML reports, drawn from tables only.

`figures` makes single plotly figures, `report` writes whole pages; the other files here serve
these two.
"""
