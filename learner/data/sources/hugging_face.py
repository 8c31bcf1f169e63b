"""Data sets of the Hugging Face Hub, or folders in its format, by the `datasets` library (the extra `huggingface`)."""

from collections.abc import Sequence

from configs.extras import install_command
from configs.sections.prompt_source import HUGGING_FACE, PromptSource
from learner.data.sources.rows import ArrowRows, wanted_columns


def load(source: PromptSource, columns: Sequence[str], *, split: str) -> ArrowRows:
    """A split's rows, mapped from the library's own cache.

    Raises:
      ValueError: the library is not installed, there is no such data set or split, or the Hub can't be reached.
    """
    name = source.path.removeprefix(HUGGING_FACE)
    try:
        import datasets  # only where one is used: it is an extra, and loads pandas
    except ImportError as e:
        raise ValueError(
            f"{source.path} needs the library `datasets`: {install_command('huggingface')}, or give a file ({e})"
        ) from e
    try:
        found = datasets.load_dataset(name, source.subset or None, split=split, revision=source.revision or None)
    except Exception as e:  # the library's own, the Hub's and every file format's errors have no base class
        said = " ".join(str(e).split())
        raise ValueError(f"{source.path} (subset {source.subset!r}, split {split!r}) can't be loaded: {said}") from e
    if not isinstance(found, datasets.Dataset):
        raise ValueError(f"{source.path}: split {split!r} gives a {type(found).__name__}, want one split, as `train`")
    kept = found.select_columns(wanted_columns(found.column_names, columns))
    return ArrowRows(kept.with_format("arrow")[:])
