"""Packages of npm that tests run by node."""

import shutil
import subprocess
from pathlib import Path

import pytest


def install(scripts: Path, folder: Path) -> Path:
    """Copy scripts with their package.json to a folder, and install their packages there; returns the folder.

    npm's cache makes a second installation quick. The test is skipped where npm is missing or reaches no registry.
    """
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    shutil.copytree(scripts, folder)
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline", "--loglevel=error"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    if installed.returncode != 0 and ("ENOTFOUND" in installed.stderr or "EAI_AGAIN" in installed.stderr):
        pytest.skip("npm cannot reach its registry")
    assert installed.returncode == 0, installed.stderr
    return folder
