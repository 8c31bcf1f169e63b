"""What the figures are drawn with, which not every installation has."""

from configs.extras import install_command


def check_library() -> None:
    """Refuses to go on without what draws the figures.

    Raises:
      ValueError: says what to install.
    """
    try:
        import bokeh  # noqa: F401
    except ImportError as e:
        raise ValueError(f"launch.report draws with bokeh, which is not installed: {install_command('report')}") from e
