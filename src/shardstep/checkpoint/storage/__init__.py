"""The files of a checkpoint. Knows torch, the codec and copies to host memory only."""
