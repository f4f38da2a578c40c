"""The report page of one run or two: one HTML file that opens offline.

The input is a `Run`, the output a file, or answers of an HTTP server on the loopback interface. The data are
computed here; scripts in the page draw them. This package is independent of training.
"""

from gradiometer.web.page import write_page
from gradiometer.web.server import PageServer

__all__ = [
    "PageServer",
    "write_page",
]
