"""Figures: described once (`figure`), drawn by plotly in a page (`interactive`) and by matplotlib in a file (`static`).

Whoever has something to show builds a `Figure` of plain numbers in SI units and knows nothing of either library.
"""
