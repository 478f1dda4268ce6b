"""Texts as tokens, for traces that hold what was said and no counts.

The library ``tokenizers`` comes with the extra ``text``.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from traces.formats.base import RowError, TraceError

_FILE = "tokenizer.json"


class TextTokenizer:
    """A model's ``tokenizer.json``, used on bare text: no chat template, no special tokens around it.

    Parameters
    ----------
    path : the file, or a folder that holds it.

    Raises
    ------
    TraceError
        It cannot be read, it is no tokenizer, or the library is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        file = Path(path)
        if file.is_dir():
            file /= _FILE
        try:
            data = file.read_bytes()
        except OSError as error:
            raise TraceError(
                f"tokenizer {file}: cannot be read: {error.strerror or error}"
            ) from None
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise TraceError(
                "--tokenizer needs the library tokenizers: python -m pip install 'kvplan[text]'"
            ) from None
        try:
            self._backend = Tokenizer.from_buffer(data)
        except Exception as error:  # tokenizers raises plain Exception
            words = " ".join(str(error).split())
            raise TraceError(f"tokenizer {file}: is no {_FILE}: {words}") from None
        self.about = (
            f"Tokens are counted with {file} (sha256 {hashlib.sha256(data).hexdigest()[:16]}...), without a "
            "chat template: its tokens around each message are not counted."
        )
        """What the report says of it."""

    def ids(self, text: object, name: str) -> npt.NDArray[np.int64]:
        """Token ids, ``[num_tokens]``, of the text of a field. Raises `RowError`."""
        if not isinstance(text, str):
            raise RowError(f"{name} is not a text")
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, written as a JSON escape
            raise RowError(f"{name} is not valid text") from None
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int64)
