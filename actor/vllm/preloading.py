"""Libraries that vLLM preloads into an engine on a CPU, where the environment lies below a path with a space.

LD_PRELOAD separates its paths by spaces and colons and has no way to quote them: the loader would ignore PyTorch's
OpenMP, without which an engine uses one core, and the allocator.
"""

import atexit
import importlib.util
import pathlib
import re
import shutil
import tempfile
from collections.abc import MutableMapping

_VARIABLE = "LD_PRELOAD"
_LIBRARIES = {
    "torch": ("../torch.libs/libgomp*.so*", "lib/libgomp*.so*"),
    "vllm": ("libs/libtcmalloc_minimal*.so*", "libs/libtcmalloc.so*"),
}
"""By package: where vLLM looks for the one library that it preloads; the first that exists is taken."""
_SEPARATORS = re.compile(r"[\s:]")


def preload_through_links(environment: MutableMapping[str, str]) -> None:
    """Preloads the libraries through links whose paths LD_PRELOAD can hold; changes nothing where it needs none.

    The links are removed when this process ends. vLLM adds no library whose name LD_PRELOAD has already.
    """
    found = [library for library in map(_library, _LIBRARIES) if library and _SEPARATORS.search(str(library))]
    wanted = [library for library in found if library.name.split(".")[0] not in environment.get(_VARIABLE, "")]
    if not wanted:
        return
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    links = [folder / library.name for library in wanted]
    for link, library in zip(links, wanted, strict=True):
        link.symlink_to(library)
    given = environment.get(_VARIABLE)
    environment[_VARIABLE] = ":".join([*([given] if given else []), *map(str, links)])


def _library(package: str) -> pathlib.Path | None:
    """Finds a package's library without importing the package."""
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for pattern in _LIBRARIES[package]:
            parent, _, name = pattern.rpartition("/")
            if libraries := sorted((pathlib.Path(place) / parent).resolve().glob(name)):
                return libraries[0]
    return None
