"""Texts that error messages share."""

from mesh_lm.errors import number_ranges


def test_many_numbers_are_few_words() -> None:
    assert number_ranges([0, 1, 2, 5, 7, 8]) == "processes 0-2, 5, 7-8"
    assert number_ranges([3], "node", "nodes") == "node 3"
    assert number_ranges([*range(0, 40, 2)]).endswith("12, 14 and more")
