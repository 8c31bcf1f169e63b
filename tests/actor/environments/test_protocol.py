"""Built-in environments by name."""

import ast
import importlib.util
import pathlib

import pytest

from actor.environments.protocol import CLASSES


@pytest.mark.unit
@pytest.mark.parametrize("name", CLASSES)
def test_class_of_a_built_in_environment_exists_in_its_module(name):
    # Parsed, not imported: the libraries of some environments are not installed here.
    module, _, attribute = CLASSES[name].partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(pathlib.Path(spec.origin).read_text())
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert attribute in classes
