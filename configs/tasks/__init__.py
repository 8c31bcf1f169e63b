"""Rows of small tasks, made by index: what `launch.tools.write_tasks` writes as files of prompts."""
