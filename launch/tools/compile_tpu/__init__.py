"""`python -m launch.tools.compile_tpu`: compiles the learner's steps for a TPU slice without TPU hardware.

`cli` checks the input and `compile_worker` compiles in an environment with libtpu. `estimate` computes memory and time,
and `tpu_tables` prints them.
"""
