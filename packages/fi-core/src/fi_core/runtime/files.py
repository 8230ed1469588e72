"""Opens, creates and reads the files of fi: private to this user, in places that `trust` accepts, as one open file."""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
import stat
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from fi_core.runtime import trust

if TYPE_CHECKING:
    from io import TextIOWrapper


def make(path: Path) -> None:
    """Creates a directory with its parents, all with mode 0700 whatever the umask.

    Raises:
        PermissionError: Another user could write there.
    """
    place = trust.resolve(path)
    for directory in reversed((place, *place.parents)):
        if not os.path.isdir(directory):
            directory.mkdir(mode=0o700, exist_ok=True)
            directory.chmod(0o700)  # the umask may take bits away
    trust.resolve(path)


def opened(path: Path, mode: str) -> IO[Any]:
    """Opens an empty file ("w", "wb") or one to append to ("a"): owned by this user, mode 0600, no links; or a device.

    Raises:
        PermissionError: Another user could have put it there, or it has a second name elsewhere.
    """
    place = trust.resolve(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe without a reader does not hold us up
    flags |= os.O_APPEND if mode == "a" else 0
    is_open = place.is_relative_to("/proc")  # a file that this process has open already, as /dev/stdout
    if not is_open:
        place = trust.resolve(path.parent) / path.name
        flags |= os.O_NOFOLLOW
    descriptor = os.open(place, flags, 0o600)
    try:
        state = os.fstat(descriptor)
        if stat.S_ISREG(state.st_mode) and not is_open:
            if state.st_uid != os.geteuid() or state.st_nlink != 1:
                raise trust.error(path, "a file of this user with one name is required")
            os.fchmod(descriptor, 0o600)
            if mode != "a":
                os.ftruncate(descriptor, 0)
        elif not trust.is_owner(state):
            raise trust.error(path, f"it belongs to another user (uid {state.st_uid})")
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8")


def log_handler(path: Path) -> logging.FileHandler:
    """A handler that appends to a file as `opened` does."""
    handler = logging.FileHandler(path, delay=True)
    handler.stream = cast("TextIOWrapper", opened(path, "a"))
    return handler


def write(path: Path, text: str) -> None:
    """Writes a text file, in a directory that is created where it is missing."""
    make(path.parent)
    with opened(path, "w") as file:
        file.write(text)


def write_if_new(path: Path, text: str) -> None:
    """Writes a text file unless it has this text: ninja looks at modification times."""
    if not path.exists() or content(path) != text.encode():
        write(path, text)


def _reader(path: Path) -> IO[bytes]:
    """Opens a regular file; a pipe would hold us up."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def content(path: Path) -> bytes:
    """The bytes of a regular file of any owner."""
    with _reader(path) as file:
        return file.read()


def private(path: Path, owner: int | None = None) -> bytes:
    """The bytes of a file that only this user, root or `owner` can have written.

    Raises:
        PermissionError: Another user owns it or may write it.
    """
    with _reader(path) as file:
        state = os.fstat(file.fileno())
        if not trust.is_owner(state, owner) or trust.is_open(state, file.fileno()):
            raise trust.error(path, f"another user can have written it (uid {state.st_uid}, mode {state.st_mode:o})")
        return file.read()


PACKED = ".xz"
# Machine code of 16 bytes an instruction: its place in one tells the meaning of a byte. The dictionary holds an archive
# of `fi_core.aot`; the 8 MB of the preset cost a fifth more time for the same size.
_FILTERS = ({"id": 0x21, "preset": 6, "dict_size": 1 << 20, "lc": 0, "lp": 2, "pb": 4},)  # lzma.FILTER_LZMA2


def packed(content: bytes) -> bytes:
    """Device binaries as packages ship them, in a file whose name ends in PACKED."""
    import lzma

    return lzma.compress(content, filters=_FILTERS)


def unpacked(path: Path, content: bytes, span: tuple[int, int] | None = None) -> bytes:
    """The content of a file, unpacked if its name ends in PACKED; span: only these bytes, from an offset to an end.

    Raises:
        OSError: It cannot be unpacked, or ends before the span does.
    """
    if path.suffix == PACKED:
        try:
            content = _unpacked(content)
        except ImportError as error:
            raise OSError(errno.ENOSYS, f"{error}: this Python cannot unpack it", str(path)) from None
        except (ValueError, MemoryError) as error:
            raise OSError(errno.EIO, f"it cannot be unpacked: {error}", str(path)) from None
    begin, end = span or (0, len(content))
    if end > len(content):
        raise OSError(errno.EIO, f"it holds {len(content)} bytes, not {end}", str(path))
    return content[begin:end]


@functools.lru_cache(maxsize=2)  # kernels of an op, which lie in one file, are often bound one after another
def _unpacked(content: bytes) -> bytes:
    import lzma  # a Python may be built without it

    try:
        return lzma.decompress(content, lzma.FORMAT_XZ)
    except lzma.LZMAError as error:
        raise ValueError(error) from None


def verified(path: Path, digest: str) -> IO[bytes]:
    """Opens a file whose content has this sha256; what is then read or loaded through it is what was hashed.

    Raises:
        OSError: It is gone or differs.
    """
    file = _reader(path)
    if hashlib.sha256(file.read()).hexdigest() != digest:
        file.close()
        raise OSError(errno.EIO, "it does not match its digest", str(path))
    file.seek(0)
    return file
