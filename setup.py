"""Packaging metadata. `make install` is the way to install: Horovod cannot be had by pip alone."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def read_version() -> str:
    text = (HERE / "hvps" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise SystemExit('hvps/__init__.py has no line of the form __version__ = "1.2.3"')
    return found.group(1)


def read_long_description() -> str:
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="hvps",
    version=read_version(),
    description="Train Keras 3 models on many processes, by ring-allreduce or parameter servers",
    long_description=read_long_description(),
    long_description_content_type="text/markdown",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["hvps", "hvps.*"]),
    package_data={"hvps.backends": ["*.conf"]},
    install_requires=[
        "numpy>=1.26",
        "keras>=3.12",
        "pydantic>=2.7",
        "PyYAML>=6.0",
        "rich>=13.0",
        "tensorboard>=2.20",
        "scikit-learn>=1.4",
    ],
    extras_require={
        # TensorFlow is not in install_requires: it comes under two names, and both in one
        # environment overwrite each other's files.
        "cpu": [
            'tensorflow-cpu==2.21.*; platform_machine == "x86_64"',
            'tensorflow==2.21.*; platform_machine != "x86_64"',
        ],
        "gpu": ["tensorflow[and-cuda]==2.21.*"],
        "mpi": ["mpi4py>=4.1"],
        "test": [
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "ruff>=0.9",
            "mypy>=1.13",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["hvps = hvps.cli:main"]},
)
