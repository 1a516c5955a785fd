"""The baseline without disaggregation: one engine that prefills and decodes, chunks and tokens in the same steps."""
