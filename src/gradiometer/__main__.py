"""``python -m gradiometer``: the command line."""

import sys

from gradiometer.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
