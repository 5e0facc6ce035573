"""Files and archive members that hold sounds and signals, opened as safely as pictures."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from mmjax.data import images
from mmjax.data.files import open_regular, reason
from mmjax.data.sources.conversation import ImageFile, Sound, SoundContent
from mmjax.errors import DataError

Stream = BinaryIO


@contextmanager
def opened(sound: Sound, expected: str) -> Iterator[Stream]:
    """The bytes of a sound or signal: a regular file inside its root, or what an archive or a row holds.

    Raises:
      DataError: it cannot be opened, or reading it fails while the block runs.
    """
    where = f"{sound.where}, {sound.kind} {sound.path!r}"
    try:
        if isinstance(sound, SoundContent):
            yield io.BytesIO(sound.read())
            return
        path = images.confined(ImageFile(where=sound.where, root=sound.root, path=sound.path), where)
        with open_regular(path) as stream:
            yield stream
    except DataError:
        raise
    except OSError as error:
        raise DataError(
            where, found=f"no readable file ({reason(error)})", expected=expected, remedy="check the path and the file"
        ) from error
