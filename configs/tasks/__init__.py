"""Generated rows of small tasks, which `launch.tools.write_tasks` writes as prompt files."""
