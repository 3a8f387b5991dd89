"""Draws the corpus of past bugs: 60 of the commits in candidates.txt, by part, with a fixed seed.

candidates.txt lists every commit that mended wrong weights, lost state, a hang or a wrong error (read from all 231
commits that change src/, up to 3475ae0), each under the part that it mended. Run ``python tests/corpus/draw.py`` to
print drawn.txt again. "open" commits may be used to widen the generator of programs; "held" ones only to judge it.
"""

import random
from pathlib import Path

SEED, COUNT = 23, 60
HERE = Path(__file__).parent


def draw() -> list[str]:
    by_part: dict[str, list[tuple[str, str]]] = {}
    for line in (HERE / "candidates.txt").read_text().splitlines():
        part, commit, subject = line.split("\t")
        by_part.setdefault(part, []).append((commit, subject))
    # Largest remainders: a part has its share of the 60, whatever the rounding.
    total = sum(map(len, by_part.values()))
    exact = {part: COUNT * len(commits) / total for part, commits in by_part.items()}
    counts = {part: int(share) for part, share in exact.items()}
    for part in sorted(exact, key=lambda part: counts[part] - exact[part])[: COUNT - sum(counts.values())]:
        counts[part] += 1
    generator = random.Random(SEED)
    drawn = [(part, *row) for part, rows in by_part.items() for row in generator.sample(rows, counts[part])]
    # Alternating within the list of parts, so that each part is half open and half held out.
    return [f"{('open', 'held')[at % 2]}\t{part}\t{commit}\t{text}" for at, (part, commit, text) in enumerate(drawn)]


if __name__ == "__main__":
    print("\n".join(draw()))
