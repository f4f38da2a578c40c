"""The report page of a run: one HTML file that opens offline.

The input is a `Run`, the output a file. The data are computed here; scripts in the page draw them, the line
charts with Plotly. This package is independent of training.
"""

from gradiometer.web.page import write_page

__all__ = [
    "write_page",
]
