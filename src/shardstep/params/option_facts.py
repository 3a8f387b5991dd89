"""The options of parameter groups as facts that ranks compare."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from shardstep.comm.codec import option_text
from shardstep.params.local_optimizer import options_of


def option_texts(group: Mapping[str, Any]) -> dict[str, str]:
    """The options of a group as texts, which are equal exactly when the options are."""
    return {key: option_text(value) for key, value in sorted(options_of(dict(group)).items())}


def option_facts(
    groups: Sequence[Mapping[str, Any]], only: Sequence[Container[str]] | None = None
) -> list[tuple[str, dict[str, str]]]:
    """For each group its options, or of those the ones in ``only``."""
    facts = []
    for position, group in enumerate(groups):
        texts = option_texts(group)
        if only is not None:
            texts = {key: text for key, text in texts.items() if key in only[position]}
        facts.append((f"parameter group {position}", texts))
    return facts
