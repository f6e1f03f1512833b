"""What a test may need that pip does not bring, and the skip that names the package."""

import os
import shutil

import pytest


def program(name: str, *, package: str) -> pytest.MarkDecorator:
    """The test needs an executable from a Debian package."""
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"needs {name}: apt-get install {package}")


def root() -> pytest.MarkDecorator:
    """The test changes owners of files."""
    return pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def namespaces() -> pytest.MarkDecorator:
    """The test makes its own mount, pid and network namespaces, which takes root."""
    return pytest.mark.skipif(
        os.geteuid() != 0 or not _has_sys_admin(), reason="needs namespaces: root with CAP_SYS_ADMIN"
    )


def _has_sys_admin() -> bool:
    with open("/proc/self/status") as status:
        capabilities = next(line.split()[1] for line in status if line.startswith("CapEff:"))
    return bool(int(capabilities, 16) >> 21 & 1)
