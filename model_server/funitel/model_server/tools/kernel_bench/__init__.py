"""`funitel bench kernels`: matrix products, attention and a step against the limits of the processor."""
