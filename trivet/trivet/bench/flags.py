"""Types of flags that several measurements have, for argparse."""

import argparse


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    """Above 0, separated by commas."""
    if not all(word.isdecimal() and int(word) for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text}: numbers above 0 are wanted, separated by commas")
    return [int(word) for word in text.split(",")]
