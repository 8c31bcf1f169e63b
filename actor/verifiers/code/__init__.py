"""Programs in responses, judged by the test cases of their rows: run in the sandbox, compared outside of it."""
