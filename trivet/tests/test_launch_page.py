"""The page on settings names every flag of `trivet serve`, and none that it hasn't."""

import re
from pathlib import Path

from trivet.launch.ownership import LAUNCHER_OWN, OWNERS

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_lists_each_flag_of_serve_with_its_owner() -> None:
    text = PAGE.read_text()
    table = text[text.index("## `trivet serve`") :].split("\n## ")[0]
    rows = {
        owner: re.findall(r"`([a-z_]+)`", names)
        for owner, names in re.findall(r"^\| (worker|scheduler|frontend|all three|the launcher) \| (.*) \|$", table, flags=re.MULTILINE)
    }
    expected: dict[str, list[str]] = {"worker": [], "scheduler": [], "frontend": [], "all three": [], "the launcher": sorted(LAUNCHER_OWN)}
    for setting, owners in OWNERS.items():
        expected[owners[0] if len(owners) == 1 else "all three"].append(setting)
    assert {owner: sorted(names) for owner, names in rows.items()} == {owner: sorted(names) for owner, names in expected.items()}
