"""The HTML file: everything in it, nothing from elsewhere.

What models, environments and data sets wrote reaches it in two ways alone: through the template, which escapes, and as
JSON that the script puts onto the page as text, never as markup. Scripts that are not the page's own have no nonce, and
don't run.
"""

import pathlib
import secrets
from collections.abc import Mapping
from typing import Any

import jinja2
from bokeh.embed import components
from bokeh.models import Model
from bokeh.resources import Resources
from markupsafe import Markup

from launch.report.page.escaping import json_for_script

_FOLDER = pathlib.Path(__file__).parent


def render(*, models: Mapping[str, Model], data: Mapping[str, Any], follow: str, **values: Any) -> str:
    """The page.

    Args:
      models: figures by the name under which the template has them.
      data: what the script shows; JSON.
      follow: what is asked by a page that is served whether it is still the newest; empty in a file.
      values: what else the template shows; as text.
    """
    nonce = secrets.token_urlsafe(16)
    script, figures = components(dict(models), wrap_script=False) if models else ("", {})
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        **values,
        nonce=nonce,
        follow=follow,
        figures={name: Markup(figure) for name, figure in figures.items()},
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        library=Markup(_in_script("\n".join(Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw))),
        figures_script=Markup(_in_script(script)),
        page_script=Markup(_in_script((_FOLDER / "page.js").read_text(encoding="utf-8"))),
        data=Markup(json_for_script(data)),
    )


def _in_script(source: str) -> str:
    r"""Source that doesn't end its script element; in strings, where alone it may be, `<\/` is the same as `</`."""
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")
