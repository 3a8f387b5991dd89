"""The parameters on one rank: groups, probe, local optimizer, pieces, buckets, all-gather."""
