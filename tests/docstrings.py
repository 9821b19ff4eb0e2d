"""What the docstring of a script promises to write."""

import re


def keys(text: str, after: str = "", before: str = "\n\n") -> set[str]:
    """Names listed between two marks: all words but "and", those in brackets left out."""
    found = text.partition(after)[2] if after else text
    assert found, f"no {after!r}"
    plain = re.sub(r"\([^()]*\)", "", found.partition(before)[0])
    return set(re.findall(r"\w+", plain)) - {"and"}
