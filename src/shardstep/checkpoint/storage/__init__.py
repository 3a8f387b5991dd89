"""The files of a checkpoint. Knows torch and the codec only."""
