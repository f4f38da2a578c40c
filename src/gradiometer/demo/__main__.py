"""``python -m gradiometer.demo``."""

import sys

from gradiometer.demo import main

if __name__ == "__main__":
    sys.exit(main())
