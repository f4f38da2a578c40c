"""The page of a run: one HTML file that opens offline.

A `Run` comes in, a file goes out: tables are computed here, and drawn by Plotly in the browser. Nothing here
knows of training.
"""

from gradiometer.web.page import write_page

__all__ = [
    "write_page",
]
