"""What the fast tier leaves to the full one."""

from .tiers import FILE, Step, choose

COMMON: list[Step] = [("a.py", 0, 1)]
RARE: list[Step] = [("a.py", 1, 2)]


def test_every_function_that_the_file_names_is_there() -> None:
    for name in FILE.read_text().splitlines():
        file, function = name.split("[")[0].split("::")
        assert f"def {function}(" in (FILE.parent / file).read_text(), name


def test_choice() -> None:
    """No case that alone takes a step is left out, no test without cases or steps, and no function."""
    found = {
        "f[1]": (COMMON, 1.0),
        "f[2]": (COMMON, 2.0),
        "f[3]": (COMMON, 3.0),
        "f[alone]": (COMMON + RARE, 20.0),
        "g": (COMMON, 30.0),
        "h[elsewhere]": ([], 5.0),
        "i[dear]": (COMMON, 4.5),
        "i[cheap]": (COMMON, 4.0),
    }
    assert choose(found) == {"f[1]", "f[2]", "f[alone]", "g", "h[elsewhere]", "i[cheap]"}
