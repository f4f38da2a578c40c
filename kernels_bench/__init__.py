"""Benchmarks of gradiometer, each a module that is run by ``python -m``; README.md lists them."""
