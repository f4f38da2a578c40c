"""The second family of the zoo: transformers under ``gm.watch``, with faults that people make in practice."""
