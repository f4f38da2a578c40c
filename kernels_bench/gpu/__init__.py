"""What needs a GPU: one command that runs all of it, a training step of GPT-2, and tuning."""
