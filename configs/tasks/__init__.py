"""Rows of small tasks, made by index: what `launch.write_tasks` writes as files of prompts."""
