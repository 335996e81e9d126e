"""`funitel-server quantize`: a checkpoint in, the same model with smaller weights out."""
