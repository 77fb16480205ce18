"""The folder that code is kept in: whole entries or none, nobody else's, and never larger than allowed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuel_core import code_cache
from fuel_core.code_cache import CacheUnusable, CodeCache

FILES = {"code/data/model/a.wrapper.so": b"\x7fELF" + bytes(range(256)) * 40, "code/data/model/a.json": b"{}" * 200}


@pytest.fixture
def cache(tmp_path: Path) -> CodeCache:
    return CodeCache(tmp_path / "fuel")


def path_of(cache: CodeCache, key: str, name: str = "") -> Path:
    return cache.root / "v1" / key / name


def test_an_entry_comes_back_as_it_was_stored(cache: CodeCache) -> None:
    assert cache.find("k") is None
    cache.store("k", FILES, {"seconds": 1.5})
    entry = cache.find("k")
    assert entry is not None
    assert entry.about == {"seconds": 1.5}
    assert entry.size == sum(map(len, FILES.values()))
    assert {name: (entry.folder / name).read_bytes() for name in FILES} == FILES
    assert cache.has("k")
    assert not cache.has("other")


def test_only_the_user_can_look_into_it(cache: CodeCache) -> None:
    cache.store("k", FILES, {})
    assert cache.root.stat().st_mode & 0o777 == 0o700
    assert path_of(cache, "").stat().st_mode & 0o777 == 0o700
    assert path_of(cache, "k").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("named", ["FUEL_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_the_folder_is_the_one_that_is_named(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FUEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(named, str(tmp_path))
    expected = {"FUEL_CACHE": tmp_path, "XDG_CACHE_HOME": tmp_path / "fuel", "HOME": tmp_path / ".cache" / "fuel"}
    assert CodeCache.of_this_user().root == expected[named]


# -- damage ----------------------------------------------------------------------------------------------------------


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def zeroed(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes(len(data) - 200) + data[-100:])


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flipped, zeroed, halved, emptied, Path.unlink])
@pytest.mark.parametrize("name", ["code/data/model/a.wrapper.so", "code/data/model/a.json", "entry.json"])
def test_a_damaged_entry_is_removed_and_can_be_made_again(
    name: str, damage: Callable[[Path], None], cache: CodeCache
) -> None:
    cache.store("k", FILES, {"seconds": 1.5})
    damage(path_of(cache, "k", name))
    assert cache.find("k") is None
    assert not path_of(cache, "k").exists()
    cache.store("k", FILES, {})
    assert cache.find("k") is not None


@pytest.mark.parametrize("change", [{"about": {"seconds": 2}}, {"key": "other"}, {"files": {}}])
def test_a_description_that_was_edited_is_no_entry(change: dict[str, Any], cache: CodeCache) -> None:
    cache.store("k", FILES, {"seconds": 1})
    path = path_of(cache, "k", "entry.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert cache.find("k") is None


def test_an_entry_under_another_name_is_none(cache: CodeCache) -> None:
    cache.store("k", FILES, {})
    path_of(cache, "k").rename(path_of(cache, "other"))
    assert cache.find("other") is None


def test_what_a_killed_process_left_is_no_entry_and_goes_in_time(cache: CodeCache) -> None:
    cache.store("k", FILES, {})
    left = [path_of(cache, ".aside-x1"), path_of(cache, ".build-x2")]
    for folder in left:
        folder.mkdir()
        (folder / "part").write_bytes(b"x")
    assert [key for key, _, _ in cache.entries()] == ["k"]
    cache.store("other", FILES, {})
    assert all(folder.exists() for folder in left), "may be at work"
    for folder in left:
        os.utime(folder, (time.time() - 2 * 86400,) * 2)
    cache.store("third", FILES, {})
    assert not any(folder.exists() for folder in left)


# -- other people's folders, and folders that cannot be written -------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("inner", [False, True])
def test_code_from_a_folder_that_others_can_write_to_is_not_loaded(mode: int, inner: bool, cache: CodeCache) -> None:
    cache.store("k", FILES, {})
    (path_of(cache, "") if inner else cache.root).chmod(mode)
    with pytest.raises(CacheUnusable, match="only you can write to"):
        cache.find("k")
    with pytest.raises(CacheUnusable):
        cache.store("other", FILES, {})


def test_code_from_a_folder_of_somebody_else_is_not_loaded(cache: CodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store("k", FILES, {})
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    for call in (lambda: cache.find("k"), lambda: cache.store("other", FILES, {}), cache.clear, cache.prepare):
        with pytest.raises(CacheUnusable, match="of your own"):
            call()


def test_a_folder_that_others_can_only_read_is_closed(cache: CodeCache) -> None:
    cache.store("k", FILES, {})
    cache.root.chmod(0o755)
    assert cache.find("k") is not None
    assert cache.root.stat().st_mode & 0o777 == 0o700


def test_a_file_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "fuel").write_text("")
    with pytest.raises(CacheUnusable, match="found a file"):
        CodeCache(tmp_path / "fuel").store("k", FILES, {})


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_disk_or_a_read_only_folder_is_one_line_and_leaves_nothing(
    code: int, cache: CodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.prepare()
    written = []

    def write(path: Path, content: bytes) -> None:
        if written:
            raise OSError(code, os.strerror(code))
        written.append(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content[:10])

    monkeypatch.setattr(code_cache, "_write", write)
    with pytest.raises(CacheUnusable, match=os.strerror(code).lower()) as caught:
        cache.store("k", FILES, {})
    assert "\n" not in str(caught.value)
    assert written
    assert [p.name for p in path_of(cache, "").iterdir()] == []


# -- size --------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = CodeCache(tmp_path / "fuel", limit_bytes=3 * 11_800)
    for age, key in enumerate(["a", "b", "c"]):
        cache.store(key, FILES, {})
        os.utime(path_of(cache, key), (1000 + age, 1000 + age))
    assert cache.find("a") is not None, "used just now"
    cache.store("d", FILES, {})
    assert sorted(key for key, _, _ in cache.entries()) == ["a", "c", "d"]


def test_an_entry_larger_than_all_is_kept_alone(tmp_path: Path) -> None:
    cache = CodeCache(tmp_path / "fuel", limit_bytes=10)
    cache.store("a", FILES, {})
    cache.store("b", FILES, {})
    assert [key for key, _, _ in cache.entries()] == ["b"]


def test_clear_counts_what_it_removes(cache: CodeCache) -> None:
    assert cache.clear() == (0, 0)
    cache.store("a", FILES, {})
    cache.store("b", {}, {})
    size = sum(size for _, _, size in cache.entries())
    assert cache.clear() == (2, size)
    assert cache.entries() == []
    assert cache.find("a") is None


# -- several processes -------------------------------------------------------------------------------------------------


def test_whoever_stores_second_keeps_the_first(cache: CodeCache) -> None:
    cache.store("k", FILES, {"by": 1})
    cache.store("k", FILES, {"by": 2})
    entry = cache.find("k")
    assert entry is not None
    assert entry.about == {"by": 1}
    assert [p.name for p in path_of(cache, "").iterdir()] == ["k"]


SCRIPT = """
import sys
from pathlib import Path
from fuel_core.code_cache import CodeCache
cache = CodeCache(Path(sys.argv[1]))
for n in range(20):
    with cache.lock(f"k{n}"):
        if cache.find(f"k{n}") is None:
            print(n)
            cache.store(f"k{n}", {"code/a": bytes(20000)}, {"by": sys.argv[2]})
    assert cache.find(f"k{n}") is not None
"""


def test_processes_at_work_on_the_same_entries_make_each_once(cache: CodeCache) -> None:
    made = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(cache.root), str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(3)
    ]
    lines = [int(line) for process in made for line in process.communicate(timeout=120)[0].split()]
    assert [process.returncode for process in made] == [0, 0, 0]
    assert sorted(lines) == list(range(20))


def test_a_lock_ends_with_its_process(cache: CodeCache) -> None:
    held = "import sys, os; from pathlib import Path; from fuel_core.code_cache import CodeCache\n"
    held += f"with CodeCache(Path({str(cache.root)!r})).lock('k'): os._exit(3)"
    assert subprocess.run([sys.executable, "-c", held], timeout=120).returncode == 3
    with cache.lock("k"):
        pass


def test_a_workshop_is_gone_afterwards(cache: CodeCache) -> None:
    def fails() -> None:
        with cache.workshop() as folder:
            (folder / "x").write_bytes(b"x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert [p.name for p in path_of(cache, "").iterdir()] == []
