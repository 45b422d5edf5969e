"""The run folder's schema, and everything that reads one: metrics, checks, figures, pages."""
