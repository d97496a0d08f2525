"""Several machines: which device serves which stages, planned ahead and simulated."""
