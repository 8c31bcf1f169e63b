"""A run, or several side by side, as one HTML file: `python -m launch.tools.report`."""
