"""Numbers of tokens for which engines tune a mixture of experts."""

from __future__ import annotations

from fi_core.utils import next_positive_power_of_2


def get_hybrid_num_tokens_buckets(max_num_tokens: int, min_num_tokens: int = 1) -> tuple[int, ...]:
    """Returns bucket sizes: powers of two up to 256, then steps of 256 to 2048 and of 512 to 4096, then powers of two.

    Args:
        max_num_tokens: the last bucket.
        min_num_tokens: the buckets below it are left out.

    Raises:
        ValueError: 1 <= min_num_tokens <= max_num_tokens does not hold.
    """
    if not 1 <= min_num_tokens <= max_num_tokens:
        raise ValueError(
            f"max_num_tokens: 1 <= min_num_tokens <= max_num_tokens is required; got {min_num_tokens} and "
            f"{max_num_tokens}"
        )
    sizes = [1 << exponent for exponent in range(8)]
    sizes += [*range(256, 2048, 256), *range(2048, 4096, 512)]
    size = 4096
    while size < next_positive_power_of_2(max_num_tokens):
        sizes.append(size)
        size *= 2
    return (*(size for size in sizes if min_num_tokens <= size < max_num_tokens), max_num_tokens)
