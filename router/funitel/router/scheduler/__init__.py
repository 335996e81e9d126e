"""What a step computes, and for which sequences: the scheduler and its parts. Pure."""
