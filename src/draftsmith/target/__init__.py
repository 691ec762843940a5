"""The frozen target: loading it as a text model, its taps, and which samples share a batch."""
