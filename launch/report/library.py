"""What the figures are drawn with, which not every installation has."""


def check_library() -> None:
    """Refuses to go on without what draws the figures.

    Raises:
      ValueError: says what to install.
    """
    try:
        import bokeh  # noqa: F401
    except ImportError as e:
        raise ValueError("launch.report draws with bokeh, which is not installed: pip install 'sluice[report]'") from e
