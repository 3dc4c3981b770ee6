"""Plotly figures, from tables only: the functions a user may call, and the look they share."""
