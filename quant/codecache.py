"""The on-disk cache of compiled code. Its content is executed, so only this user may be able to write it.

`private_folder` checks a folder and all its parents up to the home directory (or up to the root, outside it);
`CodeCache` stores files in such a folder. Windows has access lists instead of modes; there the folder must be in the
user's profile, which other users cannot enter. A folder that fails the check is not used. Code is then compiled again
at every start, and the warning `NoCodeCache` gives the reason; the command line shows it as a note.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import warnings
from pathlib import Path

from localllm.base.files.atomic import NewFile
from localllm.base.files.regular import open_regular, others_write

_DIGEST = hashlib.sha256().digest_size
_MAX_LINKS = 40  # maximum symbolic links to follow, as in Linux


class NoCodeCache(UserWarning):
    """The warning that compiled code is not cached; the message gives the reason."""


class _Refused(Exception):
    """Raised if another user can modify a folder or file."""


def default_folder(kind: str) -> Path | None:
    """Return `kind` under `~/.cache/localllm` or XDG_CACHE_HOME; without a home directory, warn and return None.

    On macOS it is under `~/Library/Caches/localllm`, on Windows under `localllm/Cache` in LOCALAPPDATA. These are the
    folders of platformdirs, which this package does not import.
    """
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "")
        if os.path.isabs(base):
            return Path(base, "localllm", "Cache", kind)
        _tell("the variable LOCALAPPDATA is not set; set it to the folder AppData/Local of your profile")
        return None
    base, home = os.environ.get("XDG_CACHE_HOME", ""), _home()
    if os.path.isabs(base):  # https://specifications.freedesktop.org/basedir-spec: a relative path is ignored
        return Path(base, "localllm", kind)
    if home is None:
        _tell("this user has no home directory; set XDG_CACHE_HOME to a folder that you own")
        return None
    return Path(home, *(("Library", "Caches") if sys.platform == "darwin" else (".cache",)), "localllm", kind)


def private_folder(folder: Path | None) -> Path | None:
    """Return `folder`, links resolved, created if missing (mode 0700); if others can write to it,
    warn and return None."""
    if folder is None:
        return None
    try:
        return _in_profile(folder) if sys.platform == "win32" else Path(_walk(folder))
    except _Refused as problem:
        _tell(str(problem))
    except OSError as error:
        _tell(f"{error.filename or folder}: {error.strerror or error}")
    return None


def check_tree(folder: Path) -> bool:
    """Return whether a private folder contains only files and folders of this user; warn about the first violation.

    For caches whose files another package opens. File modes do not matter, because other users cannot enter the folder.
    """
    if sys.platform == "win32":
        return True  # `private_folder` has checked that it is in the profile
    try:
        if os.stat(folder).st_mode & 0o077:
            raise _Refused(f"other users can read {folder}; chmod go= {folder}")
        for place, folders, files in os.walk(folder, onerror=_fail):
            for path, wanted in [(os.path.join(place, name), stat.S_ISDIR) for name in folders] + [
                (os.path.join(place, name), stat.S_ISREG) for name in files
            ]:
                facts = os.lstat(path)
                if not wanted(facts.st_mode) or facts.st_uid != os.geteuid():
                    raise _Refused(f"{path} is a link or belongs to another user; remove it")
    except _Refused as problem:
        _tell(str(problem))
        return False
    except OSError as error:
        _tell(f"{error.filename or folder}: {error.strerror or error}")
        return False
    return True


class CodeCache:
    """Files of compiled code in a private folder; None disables the cache. Files begin with the SHA-256 of the rest."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._checked = folder, False

    def read(self, name: str) -> bytes | None:
        """Return the data that `write` stored under this name; None if the file is missing or untrusted."""
        folder = self._private()
        if folder is None:
            return None
        try:
            with open_regular(folder / name, own=True) as file:
                if not _ours(os.fstat(file.fileno())):
                    return None
                data = file.read()
        except OSError:
            return None
        return data[_DIGEST:] if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST] else None

    def write(self, name: str, data: bytes) -> None:
        """Store `data`. On failure, issue a warning; the next start then takes longer."""
        folder = self._private()
        if folder is None:
            return
        try:
            with NewFile(folder / name, 0o600) as new:
                new.file.write(hashlib.sha256(data).digest() + data)
                new.commit(durable=False)
        except OSError as error:
            tell_unwritten(folder, error)

    def _private(self) -> Path | None:
        if not self._checked:
            self._folder, self._checked = private_folder(self._folder), True
        return self._folder


def _ours(facts: os.stat_result) -> bool:
    """Return whether this is a file that only this user can write."""
    if not stat.S_ISREG(facts.st_mode):
        return False
    return sys.platform == "win32" or (facts.st_uid == os.geteuid() and not others_write(facts))


def _in_profile(folder: Path) -> Path:
    """Return the real path of a folder in the user's profile, created if missing."""
    profile = os.environ.get("USERPROFILE", "")
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(os.path.realpath(folder))
    if not os.path.isabs(profile) or not place.is_relative_to(os.path.realpath(profile)):
        raise _Refused(f"{place} is not in your profile; set LOCALAPPDATA to a folder in your profile")
    return place


def tell_unwritten(folder: Path, error: OSError) -> None:
    """Warn that the cache in `folder` cannot be written."""
    _tell(f"{folder}: {error.strerror or error}")


def _tell(problem: str) -> None:
    """Issue a warning. Python shows the same warning from the same line only once."""
    warnings.warn(f"compiled code cannot be saved, so every start is slower: {problem}", NoCodeCache, stacklevel=1)


def _home() -> str | None:
    """Return the home directory, which must exist."""
    home = os.environ.get("HOME", "")
    if not home:
        import pwd  # missing on Windows

        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:
            return None
    return home if os.path.isabs(home) and os.path.isdir(home) else None


def _walk(folder: Path) -> str:
    """Return the real path of `folder`, checked component by component from the home directory or the root.

    Because the check starts at the top, other users cannot replace a component afterwards.
    """
    folder, home = folder.absolute(), _home()
    trusted = Path(home) if home is not None and folder.is_relative_to(home) else Path("/")
    place, left = os.path.realpath(trusted), list(folder.parts[: len(trusted.parts) - 1 : -1])
    _check(place, os.stat(place))
    links = 0
    while left:
        name = left.pop()
        if name in ("", "."):
            continue
        if name == "..":
            place = os.path.dirname(place)
            continue
        at = os.path.join(place, name)
        facts = _made(at)
        if stat.S_ISLNK(facts.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise _Refused(f"{folder} has too many links; remove them")
            if facts.st_uid not in (0, os.geteuid()):
                raise _Refused(f"{at} is a link of another user; remove it")
            target = os.readlink(at)
            place = "/" if target.startswith("/") else place
            left += target.split("/")[::-1]
            continue
        _check(at, facts)
        place = at
    facts = os.stat(place)
    # a folder owned by root, or sticky, is acceptable only as a parent
    if facts.st_uid != os.geteuid() or others_write(facts):
        raise _Refused(f"{place} does not belong to this user; set XDG_CACHE_HOME to a folder that you own")
    return place


def _made(path: str) -> os.stat_result:
    """Return lstat of `path`, after creating a folder for this user if the path does not exist."""
    try:
        return os.lstat(path)
    except FileNotFoundError:
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)  # an umask can remove the user's permissions
        except FileExistsError:  # created by another process
            pass
        return os.lstat(path)


def _check(path: str, facts: os.stat_result) -> None:
    if not stat.S_ISDIR(facts.st_mode):
        raise NotADirectoryError(20, "Not a directory", path)
    if facts.st_uid not in (0, os.geteuid()):
        raise _Refused(f"{path} belongs to another user; set XDG_CACHE_HOME to a folder that you own")
    # in a sticky folder other users cannot rename our files
    if others_write(facts) and not facts.st_mode & stat.S_ISVTX:
        raise _Refused(f"other users can write {path}; chmod go-w {path}")


def _fail(error: OSError) -> None:
    raise error
