"""The optimizer's state: looked at, collected, given out and taken in."""
