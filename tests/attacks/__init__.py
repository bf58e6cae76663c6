"""Attacks on the evaluator, their benign twins, and the harness that judges both. Nothing here is imported by the product."""
