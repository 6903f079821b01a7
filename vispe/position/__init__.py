"""Position encodings: pure functions of positions, torch in and torch out."""
