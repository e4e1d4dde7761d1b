"""Check a release: that both distributions hold the same files, and that the installed wheel works by itself.

    python tools/release_check.py dist                    # in an environment with the wheel of this folder and [all]
    python tools/release_check.py dist --clone .          # also: the sdist holds every file that git tracks

``.ci/run`` runs it before the tests' own packages are installed, so a dependency that only [test] brings is noticed.
The commands run in an empty folder, where the package can only be the installed one. The page is also opened in
Chromium, if there is one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = ("htp_export/", "htp_export_plugins/")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
HEADLESS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--virtual-time-budget=20000",
    "--dump-dom",
)


def wheel_files(wheel: Path) -> dict[str, bytes]:
    """The files of the packages in a wheel, by their paths."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name) for name in archive.namelist() if name.startswith(PACKAGES)
        }


def sdist_files(sdist: Path) -> dict[str, bytes]:
    """All files of a source distribution, by their paths inside its folder."""
    with tarfile.open(sdist) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read() for member in members
        }


def differences(
    wheel: dict[str, bytes], sdist: dict[str, bytes], tracked: set[str] | None = None
) -> list[str]:
    """What is wrong with two distributions, a line for each file.

    Args:
        wheel: The package's files in the wheel.
        sdist: All files of the source distribution.
        tracked: The files that git tracks, if the release was built in a clone.
    """
    package = {name: content for name, content in sdist.items() if name.startswith(PACKAGES)}
    wrong = [
        f"{name}: only in one of wheel and sdist" for name in sorted(wheel.keys() ^ package.keys())
    ]
    wrong += [
        f"{name}: not the same in wheel and sdist"
        for name in sorted(wheel.keys() & package.keys())
        if wheel[name] != package[name]
    ]
    if tracked is not None:
        wrong += [
            f"{name}: tracked by git, but not in the sdist"
            for name in sorted(tracked - sdist.keys())
        ]
        wrong += [
            f"{name}: in the sdist, but not tracked"
            for name in sorted(sdist.keys() - tracked - {"PKG-INFO"})
        ]
    return wrong


def run(folder: Path, *command: str) -> str:
    """What an installed program prints, run in a folder without the environment variables that name other code."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = os.pathsep.join(
        [sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
    )
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def check_installed(wheel: Path, sdist: dict[str, bytes], folder: Path) -> None:
    """Run the installed package: its version, an export, the check against PyTorch, and the page.

    Args:
        wheel: The wheel that is installed.
        sdist: The files of the source distribution, whose example is exported.
        folder: An empty folder.
    """
    version = wheel.name.split("-")[1]
    (folder / "net.py").write_bytes(sdist["examples/net.py"])
    found = run(
        folder, sys.executable, "-c", "import htp_export; print(htp_export.__file__)"
    ).strip()
    assert Path(found).is_relative_to(sysconfig.get_path("purelib")), (
        f"the package was imported from {found}"
    )
    assert run(folder, "htp-export", "--version").strip() == f"htp-export {version}"
    for exporter in ("dynamo", "torchscript"):
        run(
            folder,
            "htp-export",
            "export",
            "--entry",
            "net:make",
            f"--{exporter}",
            "-o",
            f"{exporter}.onnx",
            "--verify",
        )
    run(folder, "htp-export", "view", "dynamo.onnx", "-o", "net.html")
    page = (folder / "net.html").read_text(encoding="utf-8")
    assert '<script type="application/octet-stream"' in page, "Model Explorer is not in the page"
    run(folder, "htp-export", "optimize", "dynamo.onnx", "-o", "small.onnx")
    run(folder, "htp-export", "diff", "dynamo.onnx", "small.onnx", "-o", "diff.html")
    if CHROMIUM is None:
        print("there is no Chromium: the pages were written, but not opened")
        return
    for name in ("net.html", "diff.html"):
        drawn = run(folder, CHROMIUM, *HEADLESS, (folder / name).as_uri())
        assert "self_attn" in re.sub(r"<script.*?</script>", "", drawn, flags=re.DOTALL), (
            f"{name} shows no modules"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of one wheel and one sdist")
    parser.add_argument("--clone", type=Path, help="the clone that they were built in")
    options = parser.parse_args()
    (wheel,), (sdist,) = (
        options.folder.resolve().glob("*.whl"),
        options.folder.resolve().glob("*.tar.gz"),
    )
    tracked = None
    if options.clone is not None:
        tracked = set(run(options.clone, "git", "ls-files").splitlines())
    files = sdist_files(sdist)
    if wrong := differences(wheel_files(wheel), files, tracked):
        sys.exit("\n".join(wrong))
    with tempfile.TemporaryDirectory() as folder:
        check_installed(wheel, files, Path(folder))
    print(f"{wheel.name}: works as installed; {len(files)} files in the sdist")


if __name__ == "__main__":
    main()
