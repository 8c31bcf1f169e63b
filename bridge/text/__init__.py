"""Text handling that learner and actors share: chat templates, tokenization, thinking marks."""
