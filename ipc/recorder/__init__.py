"""The flight recorder: every process writes what it does into a ring of its own in shared memory, always.

`events` says what is recorded, `ring` is the file and its writer, `reader` reads it (also while it is written, also
after its writer was killed), `store` is where the files live, `nvtx` shows the same spans to NVIDIA's profilers.
"""
