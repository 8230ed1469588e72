"""Answers one question: could another user put something at a path?

The answer comes from what is on disk: every directory from / on is looked at, and links are resolved step by step. A
directory is safe if it belongs to this user or to root and no one else may write into it. A sticky directory such as
/tmp may be open to all, but then the next step must belong to this user or to root.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import stat
from pathlib import Path

_LINKS = 40  # as many as Linux follows
_OPEN_FILE = re.compile(r"/proc/\d+/fd/\d+")  # a link of the kernel, as behind /dev/stdout


def error(path: str | Path, reason: str) -> PermissionError:
    return PermissionError(errno.EPERM, reason, str(path))


@functools.cache
def _private_group(group: int) -> bool:
    """Whether the group is this user's own: named as the user, without other members."""
    import grp
    import pwd

    try:
        name, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}


@functools.cache
def _unmapped() -> int | None:
    """The uid that stands for all users whom this user namespace does not know, such as root outside a container."""
    try:
        uid = int(Path("/proc/sys/fs/overflowuid").read_text())
        ranges = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    return None if any(first <= uid < first + count for first, _, count in ranges) else uid


def is_open(state: os.stat_result, path: str | Path | int) -> bool:
    """Whether the mode lets others write. The group of one user does not count, unless an access list adds users."""
    if state.st_mode & stat.S_IWOTH:
        return True
    if not state.st_mode & stat.S_IWGRP:
        return False
    try:
        listed = "system.posix_acl_access" in os.listxattr(path)
    except OSError:
        listed = False  # a file system without access lists
    return listed or not _private_group(state.st_gid)


def is_owner(state: os.stat_result, owner: int | None = None) -> bool:
    """Whether it belongs to this user, to root, or to `owner`, whom the user has named."""
    return state.st_uid in (os.geteuid(), 0, owner)


def owner_of(directory: Path) -> int:
    """The owner of a directory that this user has named."""
    return os.lstat(os.path.realpath(directory)).st_uid


def _enter(here: str, owner: int | None, is_last: bool) -> bool:
    """Checks a directory on the way; whether others may add to it (it is sticky then)."""
    state = os.lstat(here)
    if not is_owner(state, owner) and (is_last or state.st_uid != _unmapped()):
        raise error(here, f"it belongs to another user (uid {state.st_uid})")
    is_shared = is_open(state, here)
    if is_shared and not state.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(state.st_mode)
        raise error(here, f"other users may write into it (mode {mode:04o}): chmod go-w {here}")
    return is_shared


def resolve(path: Path, owner: int | None = None) -> Path:
    """The path without links. Steps that do not exist yet are safe if the last one that exists is.

    Args:
        path: of a directory or a file.
        owner: another user whom this user has named as the owner.

    Raises:
        PermissionError: Another user could put something there.
        OSError: A step cannot be looked at.
    """
    todo = list(reversed(path.absolute().parts[1:]))
    here, links = "/", 0
    while todo:
        is_shared = _enter(here, owner, False)
        name = todo.pop()
        child = os.path.dirname(here) if name == ".." else os.path.join(here, name)
        try:
            state = os.lstat(child)
        except FileNotFoundError:
            return Path(child, *reversed(todo))
        if is_shared and not is_owner(state):  # whoever came first, and not whom this user has named
            raise error(child, f"it belongs to another user (uid {state.st_uid}), in a directory open to all")
        if _OPEN_FILE.fullmatch(child):
            return Path(child, *reversed(todo))
        if stat.S_ISLNK(state.st_mode):
            links += 1
            if links > _LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = Path(os.readlink(child))
            here = "/" if target.is_absolute() else here
            todo += reversed(target.parts[target.is_absolute() :])
        else:
            here = child
    if os.path.isdir(here):
        _enter(here, owner, True)
    return Path(here)


def problem(path: Path, owner: int | None = None) -> str | None:
    """The reason why `resolve` refuses a path, or None."""
    try:
        resolve(path, owner)
    except OSError as refusal:
        return f"{refusal.filename}: {refusal.strerror}"
    return None
