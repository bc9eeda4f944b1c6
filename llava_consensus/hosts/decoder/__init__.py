"""Language models: methods that cut between decoder layers, and what a prefill left in the cache."""
