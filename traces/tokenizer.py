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
        # Training leaves both in the file.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.about = (
            f"Tokens counted with {file.name} (sha256 {self.sha256[:16]}...), without a chat template, whose "
            "tokens around each message are left out"
        )

    def ids(self, text: object, name: str) -> npt.NDArray[np.int64]:
        """Token ids, ``[num_tokens]``, of the text of a field. Raises `RowError`."""
        if not isinstance(text, str):
            raise RowError(f"{name} is not a text")
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, written as a JSON escape
            raise RowError(f"{name} is not valid text") from None
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # a model that has no token for what it does not know
            raise RowError("cannot be tokenised", " ".join(str(error).split())) from None
        return np.array(ids, np.int64)
