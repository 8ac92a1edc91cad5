"""From run-api to packed rows: one batch per optimizer step."""
