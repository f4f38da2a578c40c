"""The report page of a run: one HTML file that opens offline.

The input is a `Run`, the output a file. Tables are computed here and drawn by Plotly in the browser. This
package is independent of training.
"""

from gradiometer.web.page import write_page

__all__ = [
    "write_page",
]
