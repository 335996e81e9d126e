"""What a step computes: prefill, decode, preemption, admission. Pure."""
