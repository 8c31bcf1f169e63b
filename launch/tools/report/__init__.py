"""Report of one or several runs as one HTML file: `python -m launch.tools.report`."""
