"""`python -m launch.compile_tpu`: the learner's steps compiled for a TPU slice that is not there."""
