"""The cache of compiled code never loads files that another user could have written, and tolerates a full disk."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
import platformdirs.macos
import platformdirs.unix
import platformdirs.windows
import pytest

from localllm.quant.codecache import CodeCache, NoCodeCache, check_tree, default_folder, private_folder
from tests.conftest import full_disk

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a home folder that contains the cache."""
    made = tmp_path / "home"
    made.mkdir(mode=0o755)
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return made


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def folder() -> Path:
    found = default_folder("kernels")
    assert found is not None
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def refused(reason: str) -> None:
    """Check that the cache is unused, stores nothing, and warns once with a reason, no matter how often it is
    opened.
    """
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        cache = CodeCache(folder())
        cache.write("a", b"code")
        assert cache.read("a") is None
        assert CodeCache(folder()).read("a") is None
    assert [each.category for each in told] == [NoCodeCache]
    assert reason in str(told[0].message)


def kept() -> None:
    """Check that the cache works without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CodeCache(folder()).write("a", b"code")
        assert CodeCache(folder()).read("a") == b"code"


# -- location ------------------------------------------------------------------------------------------------------


def test_where_the_cache_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_folder("kernels") == home / ".cache" / "localllm" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_folder("gpu") == Path("/somewhere/localllm/gpu")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # relative paths are ignored, as the XDG standard requires
    assert default_folder("gpu") == home / ".cache" / "localllm" / "gpu"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    homes = [user.pw_dir for user in pwd.getpwall() if user.pw_uid == os.geteuid() and os.path.isdir(user.pw_dir)]
    if homes:
        assert default_folder("gpu") == Path(homes[0], ".cache/localllm/gpu")


@pytest.mark.parametrize("value", ["~", "relative", "/no/such/home"])
def test_where_no_home_is_known_there_is_no_cache(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", value)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.warns(NoCodeCache, match="no home directory; set XDG_CACHE_HOME"):
        found = default_folder("kernels")
    assert found is None
    assert private_folder(None) is None
    assert list(tmp_path.iterdir()) == []


@as_root
def test_a_user_whom_nobody_knows_has_no_home(tmp_path: Path) -> None:
    def work() -> None:
        os.environ.pop("HOME", None)
        os.environ.pop("XDG_CACHE_HOME", None)
        with pytest.warns(NoCodeCache, match="no home directory"):
            assert default_folder("kernels") is None

    as_user(54321, 54321, work)


# -- modes and owners ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
def test_folders_and_files_are_private_whatever_the_umask(home: Path, mask: int) -> None:
    with umask(mask):
        kept() if mask != 0o777 else CodeCache(folder()).write("a", b"code")
    for made in (home / ".cache", home / ".cache" / "localllm", folder()):
        assert mode(made) == 0o700
    assert mode(folder() / "a") == 0o600 & ~mask


@pytest.mark.parametrize("level", [".cache/localllm/kernels", ".cache/localllm", ".cache", "."])
def test_a_folder_that_all_can_write_is_not_used(home: Path, level: str) -> None:
    kept()
    (home / level).chmod(0o777)
    refused(f"other users can write {(home / level).resolve()}; chmod go-w")
    (home / level).chmod(0o755)
    kept()


def test_what_is_above_the_home_is_the_system_s_business(home: Path) -> None:
    home.parent.chmod(0o777)
    kept()
    home.parent.chmod(0o700)


def test_elsewhere_every_folder_up_to_the_root_counts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = home.parent / "open" / "mine"
    place.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    kept()
    place.parent.chmod(0o777)
    refused(f"other users can write {place.parent}")
    place.parent.chmod(0o1777)  # sticky like /tmp: other users cannot replace our files
    kept()
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.parent))
    kept()
    (place.parent / "localllm" / "kernels").chmod(0o1777)  # not allowed for the kernel folder itself
    refused("does not belong to this user")


@as_root
@pytest.mark.parametrize("level", [".cache/localllm/kernels", ".cache/localllm", ".cache", "."])
def test_a_folder_of_another_user_is_not_used(home: Path, level: str) -> None:
    kept()
    os.chown(home / level, NOBODY, NOBODY)
    refused(f"{(home / level).resolve()} belongs to another user")


@pytest.mark.parametrize("change", [0o602, 0o620])
def test_a_file_that_others_can_write_is_not_read(home: Path, change: int) -> None:
    kept()
    os.chown(folder() / "a", -1, shared_group())
    (folder() / "a").chmod(change)
    assert CodeCache(folder()).read("a") is None
    kept()  # written again
    assert mode(folder() / "a") == 0o600


@as_root
def test_a_file_of_another_user_is_not_read(home: Path) -> None:
    kept()
    os.chown(folder() / "a", NOBODY, NOBODY)
    assert CodeCache(folder()).read("a") is None


def test_a_folder_of_a_shared_group_is_not_used(home: Path) -> None:
    kept()
    os.chown(home / ".cache", -1, shared_group())
    (home / ".cache").chmod(0o770)
    refused(f"other users can write {home / '.cache'}")


def shared_group() -> int:
    """Return a group that is not this user's."""
    groups = [each.gr_gid for each in grp.getgrall()] if os.geteuid() == 0 else os.getgroups()
    found = next((group for group in groups if group != os.getegid()), None)
    if found is None:
        pytest.skip("this user is in no second group, and only root gives files to any")
    return found


@as_root
def test_a_user_s_private_group_may_write() -> None:
    """Distributions that give each user a group of the same name set the umask 002."""
    named = {group.gr_gid: group for group in grp.getgrall()}
    first = [user.pw_gid for user in pwd.getpwall()]
    users = [
        user
        for user in pwd.getpwall()
        if user.pw_uid and first.count(user.pw_gid) == 1
        if user.pw_gid in named and named[user.pw_gid].gr_name == user.pw_name and not named[user.pw_gid].gr_mem
    ]
    if not users:
        pytest.skip("no user here has a private group")
    home = Path(tempfile.mkdtemp())
    os.chown(home, users[0].pw_uid, users[0].pw_gid)

    def work() -> None:
        os.environ["HOME"] = str(home)
        os.environ.pop("XDG_CACHE_HOME", None)
        home.chmod(0o775)
        kept()
        for path in (folder(), folder() / "a", folder().parent):
            path.chmod(0o770)
            kept()

    try:
        as_user(users[0].pw_uid, users[0].pw_gid, work)
    finally:
        shutil.rmtree(home)


def as_user(user: int, group: int, work: Callable[[], None]) -> None:
    """Do `work` in a child process that has become another user."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(group)
            os.setuid(user)
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- links ---------------------------------------------------------------------------------------------------------


def test_a_link_in_the_place_of_a_file_is_not_followed(home: Path) -> None:
    """A link is not followed, even to a file of this user with a matching digest, which could be a download."""
    kept()
    (folder() / "a").rename(home / "download")
    (folder() / "a").symlink_to(home / "download")
    assert CodeCache(folder()).read("a") is None
    kept()
    assert not (folder() / "a").is_symlink()


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_file_is_not_waited_for(home: Path, kind: str) -> None:
    kept()
    (folder() / "a").unlink()
    os.mkfifo(folder() / "a") if kind == "fifo" else (folder() / "a").mkdir()
    assert CodeCache(folder()).read("a") is None


def test_a_user_s_own_link_to_a_private_folder_is_followed(home: Path) -> None:
    """The cache may be on another disk, and every folder on the path is checked."""
    (disk := home.parent / "disk").mkdir()
    (home / "links").mkdir()
    (home / "links" / "out").symlink_to("../../disk")
    (home / ".cache").symlink_to(home / "links" / "out")
    kept()
    assert (disk / "localllm" / "kernels" / "a").exists()
    (home / "links").chmod(0o777)
    refused(f"other users can write {home / 'links'}")
    (home / "links").chmod(0o700)
    disk.chmod(0o777)
    refused(f"other users can write {disk}")


def test_links_in_a_circle_end(home: Path) -> None:
    (home / ".cache").symlink_to(".cache")
    refused("too many links")


@as_root
def test_a_link_of_another_user_is_not_followed(home: Path) -> None:
    (home.parent / "disk").mkdir()
    (home / ".cache").symlink_to(home.parent / "disk")
    os.lchown(home / ".cache", NOBODY, NOBODY)
    refused("is a link of another user")


# -- the content of a folder that another package reads ---------------------------------------------------------------


def test_a_tree_is_this_user_s_files_and_nothing_else(home: Path) -> None:
    top = private_folder(folder())
    assert top is not None
    (top / "sub").mkdir()
    (top / "sub" / "index").write_bytes(b"")
    assert check_tree(top)
    (top / "sub" / "link").symlink_to(home)
    with pytest.warns(NoCodeCache, match="sub/link is a link or belongs to another user; remove it"):
        assert not check_tree(top)
    (top / "sub" / "link").unlink()
    if os.geteuid() == 0:
        os.chown(top / "sub" / "index", NOBODY, NOBODY)
        with pytest.warns(NoCodeCache, match="sub/index is a link or belongs to another user; remove it"):
            assert not check_tree(top)
        os.chown(top / "sub" / "index", 0, 0)
    top.chmod(0o755)
    with pytest.warns(NoCodeCache, match="chmod go="):
        assert not check_tree(top)


# -- disks ---------------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_nothing_and_is_told_once(home: Path) -> None:
    cache = CodeCache(folder())
    with warnings.catch_warnings(record=True) as told, full_disk(100):
        warnings.simplefilter("default")
        for name in ("a", "b"):
            cache.write(name, bytes(1000))
    assert [each.category for each in told] == [NoCodeCache]
    assert f"{folder()}: File too large" in str(told[0].message)
    assert list(folder().iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where nobody may")
def test_a_folder_that_may_not_be_written_is_read_all_the_same(home: Path) -> None:
    kept()
    folder().chmod(0o500)
    assert CodeCache(folder()).read("a") == b"code"
    with pytest.warns(NoCodeCache, match="Permission denied"):
        CodeCache(folder()).write("b", b"code")
    folder().chmod(0o700)


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_the_folder_is_that_of_platformdirs(system: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALAPPDATA", str(home / "AppData" / "Local"))
    monkeypatch.setattr(platformdirs.windows, "get_win_folder", platformdirs.windows.get_win_folder_from_env_vars)
    kinds = {"linux": platformdirs.unix.Unix, "darwin": platformdirs.macos.MacOS, "win32": platformdirs.windows.Windows}
    expected = kinds[system]("localllm", appauthor=False).user_cache_dir
    monkeypatch.setattr(sys, "platform", system)
    assert folder() == Path(expected) / "kernels"


def test_on_windows_the_profile_decides(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Access control lists protect a profile from other users. Folders outside it are not trusted."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("USERPROFILE", str(home))
    monkeypatch.setenv("LOCALAPPDATA", str(home / "AppData" / "Local"))
    cache = CodeCache(folder())
    cache.write("a", b"code")
    assert cache.read("a") == b"code"
    elsewhere = home.parent / "elsewhere"
    monkeypatch.setenv("LOCALAPPDATA", str(elsewhere))
    refused("is not in your profile; set LOCALAPPDATA to a folder in your profile")
    elsewhere.rename(home / "inside")
    elsewhere.symlink_to(home / "inside")  # a link into the profile counts as inside
    assert private_folder(folder()) == home / "inside" / "localllm" / "Cache" / "kernels"
    monkeypatch.delenv("LOCALAPPDATA")
    with pytest.warns(NoCodeCache, match="LOCALAPPDATA is not set"):
        assert default_folder("kernels") is None
