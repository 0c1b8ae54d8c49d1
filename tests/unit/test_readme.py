"""What the README shows exists."""

from __future__ import annotations

import re

from hvps.config import leaf_fields
from tests.launching import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
KEYS = {key for key, _ in leaf_fields()}
SECTIONS = {key.split(".")[0] for key in KEYS if "." in key}
FREE = ("optimizer.", "task_args.")


def test_the_example_is_the_file() -> None:
    assert f"```python\n{(ROOT / 'examples' / 'own_model.py').read_text()}```" in README


def test_keys_exist() -> None:
    named = set(re.findall(r"\b((?:{})\.[a-z_.]*[a-z_])".format("|".join(SECTIONS)), README))
    files = {name for name in named if name.endswith((".py", ".json", ".yaml"))}
    unknown = {n for n in named - files if n not in KEYS and not n.startswith(FREE)}
    unknown -= {n for n in unknown if any(key.startswith(n + ".") for key in KEYS)}
    assert not unknown
    assert len(named) > 20


def test_files_and_make_targets_exist() -> None:
    for path in re.findall(r"\b(?:configs|hvps|examples|tools)/[a-z_]+\.(?:py|yaml)", README):
        assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"train", "test", "bench", "parity", "install"} <= named
    assert named <= targets
