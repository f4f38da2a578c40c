"""Run the benchmark against other implementations: ``python -m kernels_bench``."""

from kernels_bench.bench import main

if __name__ == "__main__":
    raise SystemExit(main())
