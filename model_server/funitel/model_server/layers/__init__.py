"""Building blocks of a decoder: linear, attention, MLP, rotary embedding, elementwise operations."""
