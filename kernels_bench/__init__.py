"""Benchmarks of gradiometer. Run each module with ``python -m``; README.md lists them."""
