"""Show: plans, runs and refusals as text and as JSON. Computes nothing that `simulate` or a trace does not say."""
