"""Jinja as chat templates are written in it: the filters, functions and tags that Hugging Face gives them.

`strftime_now` is a variable of each rendering, not a function of this module: the date is the run's.
"""

import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: the text in it, which a trainer may mask by; here only the text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Reads the tag's body as a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@functools.cache
def compiled(source: str) -> jinja2.Template:
    """Returns the template in the environment that transformers gives it.

    Raises:
      jinja2.TemplateSyntaxError: the source is no template.
    """
    return _environment().from_string(source)


@functools.cache
def variables(source: str) -> frozenset[str]:
    """Returns the names that a template takes from outside: its arguments.

    Raises:
      jinja2.TemplateSyntaxError: the source is no template.
    """
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(source)))


@functools.cache
def names(source: str) -> frozenset[str]:
    """Returns all field names and texts of a template: a field of a message that is not among them is not read.

    Raises:
      jinja2.TemplateSyntaxError: the source is no template.
    """
    tree = _environment().parse(source)
    fields = {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
    return frozenset(fields | {c.value for c in tree.find_all(jinja2.nodes.Const) if isinstance(c.value, str)})


@functools.cache
def _environment() -> jinja2.Environment:
    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson  # pyright: ignore[reportUnknownMemberType]
    env.globals["raise_exception"] = raise_exception  # pyright: ignore[reportUnknownMemberType]
    return env
