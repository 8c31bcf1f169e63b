"""Problems, prompts and the tokenizer."""
