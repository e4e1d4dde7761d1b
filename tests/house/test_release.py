"""tools/release_check.py: how it compares a wheel, a source distribution, and what git tracks."""

import io
import tarfile
import zipfile

from tools import release_check

FILES = {"htp_export/a.py": b"a = 1\n", "htp_export/page.css": b"p {}\n", "tests/test_a.py": b""}
PACKAGE = {name: content for name, content in FILES.items() if name.startswith("htp_export/")}


def test_distributions_of_the_same_files_are_right():
    sdist = {**FILES, "PKG-INFO": b"Name: htp-export\n"}
    assert release_check.differences(PACKAGE, sdist) == []
    assert release_check.differences(PACKAGE, sdist, set(FILES)) == []


def test_files_that_one_distribution_lacks_or_has_otherwise_are_named():
    without = {"htp_export/a.py": b"a = 2\n", "htp_export/new.py": b""}
    assert release_check.differences(without, FILES) == [
        "htp_export/new.py: only in one of wheel and sdist",
        "htp_export/page.css: only in one of wheel and sdist",
        "htp_export/a.py: not the same in wheel and sdist",
    ]


def test_files_that_git_tracks_are_released_and_no_others():
    tracked = {*PACKAGE, "examples/net.py"}
    assert release_check.differences(PACKAGE, FILES, tracked) == [
        "examples/net.py: tracked by git, but not in the sdist",
        "tests/test_a.py: in the sdist, but not tracked",
    ]


def test_archives_are_read_by_paths_inside_them(tmp_path):
    with (
        zipfile.ZipFile(tmp_path / "p-1.whl", "w") as wheel,
        tarfile.open(tmp_path / "p-1.tar.gz", "w:gz") as sdist,
    ):
        wheel.writestr("p-1.dist-info/METADATA", "")
        for name, content in FILES.items():
            member = tarfile.TarInfo(f"p-1/{name}")
            member.size = len(content)
            sdist.addfile(member, io.BytesIO(content))
            if name in PACKAGE:
                wheel.writestr(name, content)
    assert release_check.wheel_files(tmp_path / "p-1.whl") == PACKAGE
    assert release_check.sdist_files(tmp_path / "p-1.tar.gz") == FILES
