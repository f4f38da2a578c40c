"""Serve the report page of a run until Ctrl-C."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradiometer.runs import to_json
from gradiometer.terminal import printable
from gradiometer.web import PageServer

if TYPE_CHECKING:
    from gradiometer.runs import Run


def serve(run: Run, *, port: int = 0, as_json: bool = False) -> None:
    """Print the address of a run's page, and serve it until Ctrl-C.

    Args:
        run: the run; it is refreshed.
        port: the port; 0 selects a free one.
        as_json: print the address as a line of JSON.

    Raises:
        OSError: if the port is in use.
        KeyboardInterrupt: at Ctrl-C.
    """
    try:
        server = PageServer(run, port)
    except OSError as error:
        msg = f"port {port} of 127.0.0.1 cannot be used: {error.strerror}; pass another --port, or none"
        raise OSError(msg) from None
    with server:
        if as_json:
            line = to_json({"url": server.url}, indent=None)
        else:
            line = f"{printable(str(run.path))} at {server.url} (Ctrl-C ends)"
        print(line, flush=True)
        server.serve_forever()
