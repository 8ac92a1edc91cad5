"""Memory budget: hardware, model shapes, bytes by component."""
