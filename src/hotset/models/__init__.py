"""Attaching to transformers models: where their experts are, where the weights come from, and how calls reach us."""
