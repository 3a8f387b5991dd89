"""Everything between ranks: collectives, shared memory, comparing facts."""
