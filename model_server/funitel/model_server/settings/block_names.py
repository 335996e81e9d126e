"""Names of the formats of blocks, and of the usual ones in short. No torch here."""

from collections.abc import Mapping

ALIASES: Mapping[str, str] = {
    "q8": "q8_b32t2",
    "q6": "q6_b64t1",
    "q5": "q5_b64t1",
    "q4": "q4_b32t1a",
    "q3h": "q3h_b64t1",
    "q3": "q3_b32t1b",
    "q2": "q2_b32t1b",
    "a16w8": "a16w8_g128",
    "a16w4": "a16w4_g64",
}
"""Short names of the usual ones."""
A16_GROUPS = (32, 64, 128, 256)
"""Inputs that share a scale in formats of the names `a16w8_g128` and `a16w4_g64`; each is a size of blocks."""
A16_WIDE_GROUPS = (512, -1)
"""The same of several blocks, which repeat the scale; -1 stands for all inputs of an output."""
NAMES = (
    "q8_b32t1 q8_b32t2 q6_b64t1 q5_b64t1 q5_b32t1 q4_b32t1a q4_b32t1b q4_b64t1 q3h_b64t1 q3_b32t1a q3_b32t1b q2_b32t1a "
    "q2_b32t1b"
)
BLOCK_FORMATS = (
    *NAMES.split(),
    *(f"a16w{bits}_g{size}" for bits in (8, 4) for size in (*A16_GROUPS, *A16_WIDE_GROUPS)),
)
"""All of them."""
