"""How good the differential harness is: past bugs and mutants that it has to find."""
