"""Scaling experiments: ladders of small runs, laws fitted to them, predictions with intervals."""
