"""Loading, converting and exporting of weights."""
