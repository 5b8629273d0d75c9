"""Inputs in, the list of files out: order, names, what is left out and said."""

import errno
import glob
import os
from pathlib import Path
from typing import Any

import pytest

from data_prep import files
from data_prep.errors import DataError
from tests.data_prep.test_sources import rows, texts, write


def test_hidden_temporary_and_other_files_are_left_out_and_said(tmp_path: Path) -> None:  # G4
    write(tmp_path / "a.jsonl", rows("good"))
    write(tmp_path / "._a.jsonl", bytes(range(200)))
    write(tmp_path / "a.jsonl.tmp", b"half")
    write(tmp_path / ".cache" / "b.jsonl", rows("hidden"))
    write(tmp_path / "__pycache__" / "c.txt", "x")
    write(tmp_path / "picture.png", b"\x89PNG")
    (tmp_path / "b.jsonl").mkdir()
    for where in (str(tmp_path), str(tmp_path / "*.jsonl"), str(tmp_path / "*")):
        found, notes = files.find([where])
        assert [file.path for file in found] == [str(tmp_path / "a.jsonl")]
    _, notes = files.find([str(tmp_path)])
    assert notes == [f"{tmp_path}: left out 2 hidden, 1 of other kinds, 2 temporary"]
    assert texts(str(tmp_path)) == ["good"]


def test_pipes_links_to_nowhere_and_links_to_folders_are_left_out_and_said(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.jsonl", rows("good"))
    write(tmp_path / "elsewhere" / "b.jsonl", rows("linked"))
    os.mkfifo(tmp_path / "in" / "pipe.jsonl")
    (tmp_path / "in" / "nowhere.jsonl").symlink_to("missing.jsonl")
    (tmp_path / "in" / "loop").symlink_to(".")
    (tmp_path / "in" / "linked").symlink_to("../elsewhere")
    (tmp_path / "in" / "again").symlink_to("../in")
    links = "3 links to folders, 2 that are no plain files"
    for where, said in (
        ("in", links),
        ("in/**/*.jsonl", links),
        ("in/**", links),
        ("in/*", "2 that are no plain files"),
    ):
        found, notes = files.find([str(tmp_path / where)])
        assert [Path(file.path).name for file in found] == ["a.jsonl"]
        assert notes == [f"{tmp_path / where}: left out {said}"]
    for where in ("in", "in/*"):
        found, notes = files.find([f"file://{tmp_path / where}"])
        assert [Path(file.path).name for file in found] == ["a.jsonl"]
        assert "2 that are no plain files" in notes[0]
    assert texts(str(tmp_path / "in" / "linked")) == texts(str(tmp_path / "in" / "linked" / "*")) == ["linked"]
    (tmp_path / "in" / "a.jsonl").unlink()
    with pytest.raises(DataError, match=f"left out: {links}"):
        files.find([str(tmp_path / "in")])


def test_two_stars_match_what_glob_matches_where_there_is_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.txt", "[b]/c.txt", "[b]/d/e.txt", "f/[b]/g.txt", "f/h.md"):
        write(tmp_path / name, name)
    write(tmp_path / ".hidden" / "i.txt", "i")
    monkeypatch.chdir(tmp_path)
    for pattern in (
        "**",
        "**/*.txt",
        "*/**",
        "**/d/*",
        "f/**/*.txt",
        "**/[[]b]/**/*.txt",
        f"{tmp_path}/**/?.*",
        "./**/*",
    ):
        wanted = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
        assert [file.path for file in files.find([pattern])[0]] == wanted, pattern


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt", "a")
    closed = tmp_path / "closed"
    write(closed / "b.txt", "b")
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if str(path) == str(closed):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="closed: cannot be listed: Permission denied"):
        files.find([str(tmp_path)])


def test_order_is_as_given_then_by_path_and_nothing_comes_twice(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/10.txt", "a/z.txt", "c.txt"):
        write(tmp_path / name, name)
    found = texts([str(tmp_path / "c.txt"), str(tmp_path), str(tmp_path / "**" / "*.txt")])
    assert found == ["c.txt", "a/z.txt", "b/10.txt", "b/2.txt"]
    _, notes = files.find([str(tmp_path / "c.txt"), str(tmp_path)])
    assert notes == [f"{tmp_path}: 1 files came before, by this name or another, and are taken once"]


def test_a_file_is_one_file_by_whatever_names_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x" / "a.txt", "a")
    (tmp_path / "x" / "link.txt").symlink_to("a.txt")
    (tmp_path / "y").symlink_to("x")
    for names in (
        ["x", "./x", str(tmp_path / "x"), "x/../x", "y"],
        ["y/link.txt", "x/a.txt", "./x/*.txt"],
        ["x", f"file://{tmp_path}/x/a.txt"],
        ["hub:corpus", "hub:corpus:train", "hub:corpus::train"],
    ):
        found, notes = files.find(names)
        assert len(found) == 1
        assert sum("by this name or another" in note for note in notes) >= len(names) - 1
    assert len(files.find(["hub:corpus", "hub:corpus:validation", "hub:corpus:train:train"])[0]) == 3


def test_exclude_leaves_out_paths_below_the_input(tmp_path: Path) -> None:
    for name in ("keep.py", "test/a.py", "site-packages/x/b.py", "pkg/test/c.py"):
        write(tmp_path / name, name)
    found, notes = files.find([str(tmp_path)], exclude=["test/*", "*/test/*", "site-packages/*"])
    assert [Path(file.path).name for file in found] == ["keep.py"]
    assert notes == [f"{tmp_path}: left out 3 excluded"]
    found, _ = files.find([str(tmp_path / "**/*.py")], exclude=["*/test/*", "*/site-packages/*"])
    assert [Path(file.path).name for file in found] == ["keep.py"]


def test_missing_and_textless_inputs_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        files.find([str(tmp_path / "nowhere")])
    write(tmp_path / "only.png", b"x")
    with pytest.raises(DataError, match=r"no file with text .* left out: 1 of other kinds"):
        files.find([str(tmp_path)])
    with pytest.raises(DataError, match="no file with text"):
        files.find([str(tmp_path / "*.txt")])
    with pytest.raises(DataError, match="empty string"):
        files.find([""])
