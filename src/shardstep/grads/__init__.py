"""Where gradients come from, and what can be done with them."""
