"""`python -m launch.tools.compile_tpu`: the learner's steps compiled for a TPU slice that is not there.

`command` checks the input, `worker` compiles where libtpu is (`venv` makes that environment), `estimate` turns its
answer into memory and time, `report` prints them.
"""
