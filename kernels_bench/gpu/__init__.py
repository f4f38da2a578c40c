"""Benchmarks that need a GPU: one command that runs them all, a training step of GPT-2, and tuning."""
