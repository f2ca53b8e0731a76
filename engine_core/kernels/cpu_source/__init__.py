"""The kernels' sources. They import numba, so nothing else may import them: `cpu_cache` does when code is missing."""
