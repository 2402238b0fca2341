"""The seed of each child of a request with `n` choices, derived alike wherever it is asked for."""

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def child_seed(seed: int, index: int) -> int:
    """Effective uint64 seed of child `index`: child 0 has the seed itself, so choice 0 of `n` equals the run with one choice.

    The others take the SplitMix64 finaliser (Steele, Lea and Flood, 2014) of the seed moved on by `index` golden-ratio steps.
    """
    if index == 0:
        return seed & MASK
    mixed = (seed + index * GOLDEN) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)
