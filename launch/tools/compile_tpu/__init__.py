"""`python -m launch.tools.compile_tpu`: compiles the learner's steps for a TPU slice without TPU hardware."""
